"""What a training run is told: how weights move, which ones, and which evaluation is best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from sparse_tl.lens import HookedModel, adapt, read_parameters

Metrics = dict[str, float]


@dataclass(frozen=True)
class TrainingConfig:
    """How weights are moved.

    Args:
        steps: optimizer steps.
        learning_rate: at its peak.
        warmup: steps of linear increase.
        decay: the last share of all steps, over which the rate falls.
        schedule: how it falls there: along a cosine or a line.
        final_rate: what is left of the rate at the end, as a share of the peak.
        betas: of AdamW.
        weight_decay: of AdamW.
        clip: largest norm of the gradient; None for any.
        accumulate: micro-batches per step.
        precision: "bf16" runs the forward pass under autocast.
        seed: of gate noise.
        evaluate_every: steps between validation evaluations.
        checkpoint_every: steps between checkpoints.
        patience: evaluations without improvement after which training stops; None for never.
    """

    steps: int
    learning_rate: float
    warmup: int = 50
    decay: float = 0.5
    schedule: Literal["cosine", "linear"] | str = "cosine"
    final_rate: float = 0.02
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.0
    clip: float | None = 1.0
    accumulate: int = 1
    precision: Literal["float32", "bf16"] = "float32"
    seed: int = 0
    evaluate_every: int = 50
    checkpoint_every: int = 100
    patience: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "learning_rate", "accumulate", "evaluate_every", "checkpoint_every"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} above 0; got {getattr(self, name)}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"expected clip above 0, or None; got {self.clip}")
        if self.precision not in ("float32", "bf16"):
            raise ValueError(f'expected precision "float32" or "bf16"; got {self.precision!r}')
        if self.schedule not in ("cosine", "linear"):
            raise ValueError(f'expected schedule "cosine" or "linear"; got {self.schedule!r}')
        if not 0 <= self.decay <= 1 or not 0 <= self.final_rate <= 1:
            raise ValueError(
                f"expected decay and final_rate in 0..1; got {self.decay}, {self.final_rate}"
            )

    def rate(self, step: int) -> float:
        """The learning rate of a step: warm-up, plateau, decay."""
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
    """Which evaluation is best, and when training may end.

    Args:
        evaluate: validation metrics of the model as it is now.
        better: whether the first metrics beat the second.
        finished: whether nothing more is to be gained after these metrics.
    """

    evaluate: Callable[[], Metrics]
    better: Callable[[Metrics, Metrics], bool]
    finished: Callable[[Metrics], bool] = lambda metrics: False


def choose_trained(model: HookedModel, rates: Mapping[str, float]) -> dict[str, float]:
    """The parameters that are named or match a pattern, with the number of the first such name.

    Args:
        model: theirs.
        rates: numbers by ``"gates"``, those on attention edges and on MLPs, ``"qk"``, ``"all"``, or
            a pattern of parameter names.

    Raises:
        ValueError: a name that no parameter has.
    """
    parameters = read_parameters(model)
    names = {id(parameter): name for name, parameter in parameters.items()}
    gates = [name for name in names.values() if name.startswith(("gates.", "mlp_gates."))]
    chosen: dict[str, float] = {}
    for wanted, rate in rates.items():
        if wanted == "gates":
            found = gates
        elif wanted in ("qk", "all"):
            found = [names[id(p)] for p in adapt(model).parameters(wanted)]
            found += gates if wanted == "all" else []
        else:
            found = [name for name in names.values() if fnmatchcase(name, wanted)]
        if not found:
            raise ValueError(
                "expected 'gates', 'qk', 'all' or patterns of parameter names; "
                f"{wanted!r} matches none of {list(parameters)[:8]}..."
            )
        for name in found:
            chosen.setdefault(name, rate)
    return chosen
