"""What a training run is told: how weights move, which ones, and which evaluation is best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from sparse_tl.lens import read_parameters

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
        acceptable: whether metrics are good enough to go on from.
        retreat_after: evaluations in a row that are not acceptable, after which training goes
            back to the best weights, with the learning rate cut by `RETREAT_RATE`; None for never.
        from_step: no evaluation before this step counts towards `retreat_after` or an early end.
        near: whether the best metrics are near enough to the present ones to go back to; going
            back farther would undo what was learned since.
    """

    evaluate: Callable[[], Metrics]
    better: Callable[[Metrics, Metrics], bool]
    finished: Callable[[Metrics], bool] = lambda metrics: False
    acceptable: Callable[[Metrics], bool] = lambda metrics: True
    retreat_after: int | None = None
    from_step: int = 0
    near: Callable[[Metrics, Metrics], bool] = lambda best, now: True


def choose_trained(model: nn.Module, patterns: Mapping[str, float]) -> dict[str, float]:
    """The parameters whose names match a pattern, with the first such pattern's multiple.

    Raises:
        ValueError: a pattern matches no parameter.
    """
    names = list(read_parameters(model))
    chosen: dict[str, float] = {}
    for pattern, scale in patterns.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(
                f"expected patterns of parameter names; {pattern!r} matches none of {names[:8]}..."
            )
        for name in matching:
            chosen.setdefault(name, scale)
    return chosen
