"""The loss constraint: the smallest size at which every group's loss meets its target.

    min_theta max_lambda  log(1 + size) + sum_g lambda_g (loss_g - target)

Every group ``g`` of rows has a ``lambda_g > 0`` of its own. A PI controller moves its logarithm by
the relative violation, averaged over about 20 steps, ``e = clip(ema((loss_g - target) / target),
-1, 1)``:

    log lambda  =  log START + INTEGRAL * sum_t e_t + PROPORTIONAL * e_t

The clip is symmetric, so that the noise of the batches moves lambda neither up nor down.

The integral finds lambda; the proportional part answers a violation at once and takes its answer
back when it is over, which keeps lambda from swinging. The average comes before the clip: where a
few wrong answers make the loss, most batches have none, and clipping those that do would hide them.

Reference: nu-PI, Sohrabi et al., arXiv 2406.04558, from the library `cooper`; the logarithm is that
of GECO, Rezende and Viola, arXiv 1810.00597.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

Reference = Literal["absolute", "dense"]

START = 10.0
"""lambda before the first step."""
INTEGRAL, PROPORTIONAL = 0.01, 0.5
"""Gains of the controller: by step, and at once."""
SMOOTHING = 0.95
"""Weight of the past in the average of the violations."""
WILD = 30.0
"""The largest violation of one step that the average knows, up or down."""
BOUNDS = (-5.0, 10.0)
"""Of log lambda."""


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


class LossConstraint:
    """lambda of every group, and the controller that moves it.

    Args:
        n_groups: of rows, each with a loss of its own.
        start: lambda before the first step.
        integral: gain by step.
        proportional: gain at once.
    """

    def __init__(
        self,
        n_groups: int = 1,
        *,
        start: float = START,
        integral: float = INTEGRAL,
        proportional: float = PROPORTIONAL,
    ) -> None:
        from cooper.optim import nuPI, nuPIInitType

        # In float64, so that a resumed run reads back from JSON exactly what was there. Each by
        # itself, since the controller leaves alone what has no gradient, and moves all else.
        begin = torch.tensor(math.log(start), dtype=torch.float64)
        self._log_lambdas = [nn.Parameter(begin.clone()) for _ in range(n_groups)]
        self._averages: list[float | None] = [None] * n_groups
        self._controller = nuPI(
            self._log_lambdas,
            lr=1.0,
            Kp=torch.tensor(proportional, dtype=torch.float64),
            Ki=torch.tensor(integral, dtype=torch.float64),
            init_type=nuPIInitType.ZEROS,
            maximize=True,
        )

    @property
    def lambda_(self) -> Float[Tensor, " group"]:
        """lambda of every group."""
        return torch.stack([one.detach() for one in self._log_lambdas]).exp()

    def update(self, violation: Float[Tensor, " group"]) -> None:
        """Move lambda by one step.

        Args:
            violation: relative; NaN for a group that the batch has no row of, whose lambda stays.
        """
        for group, found in enumerate(violation.tolist()):
            log_lambda, average = self._log_lambdas[group], self._averages[group]
            if math.isnan(found):
                log_lambda.grad = None
                continue
            found = min(max(found, -WILD), WILD)
            average = found if average is None else SMOOTHING * average + (1 - SMOOTHING) * found
            self._averages[group] = average
            log_lambda.grad = torch.full_like(log_lambda, min(max(average, -1.0), 1.0))
        self._controller.step()
        with torch.no_grad():
            for log_lambda in self._log_lambdas:
                log_lambda.clamp_(*BOUNDS)

    def state(self) -> dict[str, Any]:
        """What is carried from step to step."""
        known = self._controller.state  # of those that were moved before
        return {
            "log_lambda": [one.item() for one in self._log_lambdas],
            "average_violation": list(self._averages),
            "last_error": [float(known[one].get("xi", 0.0)) for one in self._log_lambdas],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._averages = list(state["average_violation"])
        kept = zip(state["log_lambda"], state["last_error"], strict=True)
        for one, (log_lambda, error) in zip(self._log_lambdas, kept, strict=True):
            one.data.fill_(log_lambda)
            self._controller.state[one]["xi"] = torch.full_like(one.data, error)
