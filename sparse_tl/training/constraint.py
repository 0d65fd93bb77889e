"""The loss constraint: as few edges as possible while the loss stays at its target.

    min_theta max_lambda  log(1 + E|A|) + lambda * (loss - target)

``lambda > 0`` is moved in the log: up while the loss is above its target, down while below, by a
smoothed and clipped violation, ``log lambda += rate * ema(clip((loss - target) / scale))``. It may
fall more slowly than it rises: edges close faster than they are found again.

Reference: GECO, Rezende and Viola, arXiv 1810.00597; arXiv 2512.05865, section 3. The violation is
taken relative to a scale in nats, so that one rate serves targets of any size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Reference = Literal["absolute", "dense"]


@dataclass(frozen=True)
class TargetLoss:
    """A loss in nats, or an increase in nats over the frozen dense model on the same batch."""

    nats: float
    reference: Reference

    @staticmethod
    def parse(target: float | str | TargetLoss) -> TargetLoss:
        """Read ``0.01`` or ``"0.01"`` as absolute, ``"+0.05"`` as an increase over the dense model.

        Raises:
            ValueError: not a finite number of nats that a loss could have.
        """
        if isinstance(target, TargetLoss):
            return target
        text = str(target).strip()
        reference: Reference = "dense" if text.startswith("+") else "absolute"
        try:
            nats = float(text)
        except ValueError:
            nats = math.nan
        if not math.isfinite(nats) or nats <= 0:
            raise ValueError(
                "expected a target loss in nats above 0, such as 0.01, or an increase over the "
                f'dense model, such as "+0.05"; got {target!r}'
            )
        return TargetLoss(nats, reference)

    def __str__(self) -> str:
        return f"{'+' if self.reference == 'dense' else ''}{self.nats:g}"


@dataclass
class LossConstraint:
    """Lambda of the constraint and what it needs to be moved.

    Args:
        rate: how far log lambda moves per step at a full violation.
        smoothing: weight of the past in the moving average of violations.
        log_lambda: where it starts, and is.
        scale: the violation in nats that counts as a full one.
        fall: the largest step of log lambda downwards, as a multiple of `rate`.
        rise: the largest step upwards, likewise: above 1, it rises the faster the more violations
            are above `scale`.
        bounds: of log lambda.
        average: the moving average; ``None`` before the first step.
    """

    scale: float
    rate: float = 0.01
    smoothing: float = 0.9
    log_lambda: float = 0.0
    fall: float = 0.3
    rise: float = 1.0
    bounds: tuple[float, float] = (-5.0, 10.0)
    average: float | None = None

    @property
    def lambda_(self) -> float:
        """lambda."""
        return math.exp(self.log_lambda)

    def update(self, violation: float) -> None:
        """Move lambda by one step; `violation` is loss minus target, in nats."""
        clipped = max(-self.fall, min(self.rise, violation / self.scale))
        if self.average is None:
            self.average = clipped
        else:
            self.average = self.smoothing * self.average + (1 - self.smoothing) * clipped
        low, high = self.bounds
        self.log_lambda = max(low, min(high, self.log_lambda + self.rate * self.average))

    def ease(self, factor: float = 1.3) -> None:
        """Weigh the loss more, by a factor on lambda."""
        self.log_lambda = min(self.bounds[1], self.log_lambda + math.log(factor))
