"""Settings of a training run: optimisation, trained parameters, and model selection."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch

from sparse_tl.calls.arguments import (
    AtLeastOne,
    Count,
    Fraction,
    NotNegative,
    Positive,
    Seed,
    checked,
)
from sparse_tl.lens import HookedModel, adapt, lora_parameters, read_parameters

Metrics = dict[str, float]
Precision = Literal["float32", "bf16"]


def in_precision(precision: Precision, device: torch.device) -> torch.autocast:
    """Run the block's forward passes in this precision: under autocast for "bf16"."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@checked
@dataclass(frozen=True)
class TrainingConfig:
    """Settings of the optimizer and the training loop.

    Args:
        steps: number of optimizer steps.
        learning_rate: peak learning rate.
        warmup: number of linear warm-up steps.
        decay: final share of the steps, over which the rate decays.
        schedule: shape of the decay: cosine or linear.
        final_rate: final learning rate, as a share of the peak.
        betas: betas of AdamW.
        weight_decay: weight decay of AdamW.
        clip: maximum gradient norm; None for no clipping.
        accumulate: micro-batches per step.
        precision: "bf16" runs the forward pass under autocast.
        seed: random seed for gate noise.
        evaluate_every: steps between validation evaluations.
        checkpoint_every: steps between checkpoints.
        patience: evaluations without improvement before training stops; None never stops early.
    """

    steps: AtLeastOne
    learning_rate: Positive
    warmup: Count = 50
    decay: Fraction = 0.5
    schedule: Literal["cosine", "linear"] = "cosine"
    final_rate: Fraction = 0.02
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: NotNegative = 0.0
    clip: Positive | None = 1.0
    accumulate: AtLeastOne = 1
    precision: Precision = "float32"
    seed: Seed = 0
    evaluate_every: AtLeastOne = 50
    checkpoint_every: AtLeastOne = 100
    patience: Count | None = None

    def rate(self, step: int) -> float:
        """The learning rate at a step: warm-up, plateau, decay."""
        scale = min(1.0, (step + 1) / max(1, self.warmup))
        start = self.steps * (1 - self.decay)
        if step > start:
            decayed = (step - start) / (self.steps - start)
            left = 1 - decayed
            if self.schedule == "cosine":
                left = 0.5 * (1 + math.cos(math.pi * decayed))
            scale *= self.final_rate + (1 - self.final_rate) * left
        return self.learning_rate * scale


@dataclass
class Selection:
    """Model selection: which evaluation is best, and when training may stop early.

    Args:
        evaluate: returns the current model's validation metrics.
        better: whether the first metrics beat the second.
        finished: whether training can stop early, given the best metrics.
    """

    evaluate: Callable[[], Metrics]
    better: Callable[[Metrics, Metrics], bool]
    finished: Callable[[Metrics], bool] = lambda metrics: False


def choose_trained(model: HookedModel, rates: Mapping[str, float]) -> dict[str, float]:
    """Resolve names and patterns to parameter names, each with the rate of its first match.

    If a model has low-rank adapters, only these and its gates can be trained.

    Args:
        model: model that owns the parameters.
        rates: learning-rate multiples by ``"gates"`` (of attention edges and MLPs), ``"lora"``
            (adapters), ``"qk"`` (in latent attention, including the weights that keys share with
            values), ``"all"``, or a pattern of parameter names.

    Raises:
        ValueError: a name or pattern matches no parameter.
    """
    names = {id(parameter): name for name, parameter in read_parameters(model).items()}
    gates = [name for name in names.values() if name.startswith(("gates.", "mlp_gates."))]
    lora = [names[id(p)] for p in lora_parameters(model)]
    if lora:
        names = {key: name for key, name in names.items() if name in {*gates, *lora}}
    chosen: dict[str, float] = {}
    for wanted, rate in rates.items():
        if wanted == "gates":
            matches = gates
        elif wanted == "lora":
            matches = lora
        elif wanted in ("qk", "all"):
            matches = [names[id(p)] for p in adapt(model).parameters(wanted) if id(p) in names]
            matches += gates if wanted == "all" else []
        else:
            matches = [name for name in names.values() if fnmatchcase(name, wanted)]
        if not matches:
            raise ValueError(
                "expected 'gates', 'lora', 'qk', 'all' or patterns of parameter names; "
                f"{wanted!r} matches none of {list(names.values())[:8]}..."
            )
        for name in matches:
            chosen.setdefault(name, rate)
    return chosen
