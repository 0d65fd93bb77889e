"""The loss constraint: the smallest size at which every group's validation loss meets its target.

    min_theta max_lambda  log(1 + size) + sum_g lambda_g (loss_g - target)

Every group ``g`` of rows has a ``lambda_g`` of its own. A PI controller moves its logarithm at
every step ``t`` by the relative violation at the last validation evaluation,

    e_t  =  clip((increase_g - allowed_g) / allowed_g, -1, 1),

the increase being the loss above the dense model's; what is allowed falls, in the course of the
run, to what the target leaves:

    log lambda_t  =  log START + INTEGRAL / n * sum_{s <= t} e_s + PROPORTIONAL * e_t

with n steps between two evaluations, so that a short run moves lambda as far as a long one. The
integral finds lambda; the proportional part answers a violation at once and takes its answer
back when it is over, which keeps lambda from swinging. Validation rows under deterministic gates
are what the target is about; the loss of a training batch says little of it, since sampled gates
cost loss that deterministic ones do not, and a batch's own noise can be many times a small target.

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

from sparse_tl.scopes import autograd

Measured = Literal["loss", "increase", "divergence"]

START = 10.0
"""lambda before the first step."""
INTEGRAL, PROPORTIONAL = 0.4, 0.5
"""Gains of the controller: between two evaluations, and at once."""
BOUNDS = (5.0, 20_000.0)
"""Least and largest lambda. A group that has met its target for long keeps some weight for when it
does not: at 5, a nat of its loss is worth e^5 = 150 times fewer edges."""


@dataclass(frozen=True)
class TargetLoss:
    """What every group of rows may lose.

    Args:
        nats: the limit, in nats per label.
        of: what it limits: the model's "loss", its "increase" over the frozen dense model's, or its
            "divergence" from it, ``KL(dense || sparse)``.
    """

    nats: float
    of: Measured

    @staticmethod
    def parse(target: float | str | TargetLoss) -> TargetLoss:
        """Read ``0.01`` as a loss, ``"+0.05"`` as an increase and ``"kl+0.05"`` as a divergence.

        Raises:
            ValueError: not a finite number of nats that a loss could have.
        """
        if isinstance(target, TargetLoss):
            return target
        text = str(target).strip()
        of: Measured = "loss"
        if text.startswith("+"):
            of = "increase"
        elif text.startswith("kl+"):
            of, text = "divergence", text.removeprefix("kl")
        try:
            nats = float(text)
        except ValueError:
            nats = math.nan
        if not math.isfinite(nats) or nats <= 0:
            raise ValueError(
                "expected a target loss in nats above 0, such as 0.01, an increase over the dense "
                'model, such as "+0.05", or a divergence from it, such as "kl+0.05"; got '
                f"{target!r}"
            )
        return TargetLoss(nats, of)

    def __str__(self) -> str:
        return f"{_WRITTEN[self.of]}{self.nats:g}"

    @property
    def limit(self) -> str:
        """The target in words."""
        if self.of == "divergence":
            return f"divergence of {self.nats:g} nats"
        return f"{self} nats"


_WRITTEN: dict[Measured, str] = {"loss": "", "increase": "+", "divergence": "kl+"}


class LossConstraint:
    """lambda of every group, and the controller that moves it.

    Args:
        n_groups: number of groups of rows, each with a loss of its own.
        start: lambda before the first step.
        integral: gain between two evaluations.
        proportional: gain at once.
        evaluated_every: updates between two evaluations.
        bounds: least and largest lambda.
    """

    def __init__(
        self,
        n_groups: int = 1,
        *,
        start: float = START,
        integral: float = INTEGRAL,
        proportional: float = PROPORTIONAL,
        evaluated_every: int = 1,
        bounds: tuple[float, float] = BOUNDS,
    ) -> None:
        from cooper.optim import nuPI, nuPIInitType

        # In float64, so that a resumed run reads back from JSON exactly what was there.
        log_lambda = torch.full((n_groups,), math.log(start), dtype=torch.float64)
        self._log_lambda = nn.Parameter(log_lambda)
        self._bounds = [math.log(bound) for bound in bounds]
        self._controller = nuPI(
            [self._log_lambda],
            lr=1.0,
            Kp=torch.tensor(proportional, dtype=torch.float64),
            Ki=torch.tensor(integral / evaluated_every, dtype=torch.float64),
            init_type=nuPIInitType.ZEROS,
            maximize=True,
        )

    @property
    def lambda_(self) -> Float[Tensor, " group"]:
        """lambda of every group."""
        return self._log_lambda.detach().exp()

    def update(self, violation: Float[Tensor, " group"]) -> None:
        """Move lambda by one step.

        Args:
            violation: of every group, relative to what is allowed.
        """
        self._log_lambda.grad = violation.clamp(-1, 1).to(self._log_lambda)
        self._controller.step()
        with autograd(False):
            self._log_lambda.clamp_(*self._bounds)

    def state(self) -> dict[str, Any]:
        """What is carried from step to step."""
        known = self._controller.state.get(self._log_lambda, {})
        error = known.get("xi", torch.zeros_like(self._log_lambda))
        return {"log_lambda": self._log_lambda.tolist(), "last_error": error.tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._log_lambda.data.copy_(torch.tensor(state["log_lambda"], dtype=torch.float64))
        error = torch.tensor(state["last_error"], dtype=torch.float64)
        self._controller.state[self._log_lambda]["xi"] = error
