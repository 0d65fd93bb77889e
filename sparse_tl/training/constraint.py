"""The loss constraint: the smallest size at which every group's validation loss meets its target.

    min_theta max_lambda  mean_g log(1 + size_g) + mean_g lambda_g (loss_g - target)

Every group ``g`` of rows has its own ``lambda_g``. At every step ``t``, a PI controller moves the
logarithm of lambda by the relative excess of the gap, extrapolated from validation evaluations,

    e_t  =  clip((gap_g + lead * change_g - limit_g) / limit_g, -1, 1),

where the *change* is that between the last two evaluations. Edges go on closing for several
evaluations after lambda has risen, and hardly reopen, so that lambda has to rise in time. The
*lead* is `GAP_LEAD` evaluations for a divergence, and 0 for a loss, whose noise it would multiply.
The *gap* is the increase in loss over the dense model or, for a divergence target, the divergence
from it. The *loss budget* is the largest gap that the target allows, and the *limit* starts above
it and falls to it during the run. Then

    log lambda_t  =  log START + INTEGRAL / n * sum_{s <= t} e_s + PROPORTIONAL * e_t

with n steps between two evaluations, so that a short run moves lambda as far as a long one. The
integral term finds lambda; the proportional term responds to an excess at once and vanishes with
it, which keeps lambda from oscillating. The target applies to validation rows under deterministic
gates. The loss of a training batch says little about it: sampled gates raise the loss where
deterministic ones do not, and the batch's noise can be many times a small target.

Under a target of attention edges, the same controller moves one lambda for all groups, and the loss
is the divergence from the dense model. The number of edges per token is to follow a line, geometric
from its first value to the target at `ARRIVAL` of the run, and to stay there:

    e_t  =  clip((1 + STEEPNESS |log(first / target)|) log(line / edges), -1, 1),

both at `LEAD` evaluations from now, edges by extrapolation from the last two evaluations. The
farther the line falls, the faster lambda has to follow it; where it is flat, such a gain makes it
oscillate.

Reference: nu-PI, Sohrabi et al., arXiv 2406.04558, without its moving average; the logarithm is
that of GECO, Rezende and Viola, arXiv 1810.00597.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

Measured = Literal["loss", "increase", "divergence"]

START = 10.0
"""lambda before the first step."""
INTEGRAL, PROPORTIONAL = 0.4, 0.5
"""Gains of the controller; the integral gain is the total over the steps between evaluations."""
BOUNDS = (5.0, 20_000.0)
"""Smallest and largest lambda. A group that has long met its target keeps some weight in case it
misses it later: at 5, a nat of its loss is worth e^5 = 150 times fewer edges."""

GAP_LEAD = 8
"""Evaluations over which divergences are extrapolated."""
OF_EDGES: dict[str, Any] = {"integral": 0.9, "bounds": (1.0, BOUNDS[1])}
"""Settings of the controller under a target of edges."""
ARRIVAL = 0.6
"""Share of the run after which the target number of edges is reached."""
BELOW = 0.98
"""Where the line ends, as a share of the target, so that evaluations scatter below the target."""
LEAD, AHEAD = 4, 0.1
"""Evaluations over which edges are extrapolated, and as a share of the run."""
STEEPNESS = 3.0
"""Gain on the logarithm of the ratio of line to edges, per unit of the line's fall; 1 is added."""


@dataclass(frozen=True)
class TargetLoss:
    """The target that every group of rows must meet.

    Args:
        nats: upper bound on the quantity `of`, in nats per label.
        of: the bounded quantity: the model's "loss", its "increase" over the frozen dense model's,
            or the "divergence" from that model, ``KL(dense || sparse)``.
    """

    nats: float
    of: Measured

    @staticmethod
    def parse(target: float | str | TargetLoss) -> TargetLoss:
        """Read ``0.01`` as a loss, ``"+0.05"`` as an increase and ``"kl+0.05"`` as a divergence.

        Raises:
            ValueError: the target is not a finite number of nats above 0.
        """
        if isinstance(target, TargetLoss):
            return target
        text = str(target).strip()
        signs: dict[str, Measured] = {"kl+": "divergence", "+": "increase", "": "loss"}
        sign = next(sign for sign in signs if text.startswith(sign))
        nats = _above_zero(text.removeprefix(sign.removesuffix("+")))
        if nats is None:
            raise ValueError(
                f"{target!r} is not a target loss in nats above 0: give a loss, such as 0.01, an "
                'increase over the dense model, "+0.05", or a divergence from it, "kl+0.05"'
            )
        return TargetLoss(nats, signs[sign])

    def budget(self, dense_loss: float) -> float:
        """The largest gap to the dense model, in nats, that the target allows."""
        return self.nats - dense_loss if self.of == "loss" else self.nats

    def __str__(self) -> str:
        sign = {"loss": "", "increase": "+", "divergence": "kl+"}[self.of]
        return f"{sign}{self.nats:.15g}"

    @property
    def in_words(self) -> str:
        """The target in words."""
        return f"divergence of {self.nats:g} nats" if self.of == "divergence" else f"{self} nats"


@dataclass(frozen=True)
class TargetEdges:
    """The number of attention edges to which training brings the model.

    Args:
        amount: active edges per token, as a mean over groups, or how many times fewer these are
            than in the dense model.
        times_fewer: whether `amount` is relative to the dense model.
    """

    amount: float
    times_fewer: bool
    of: ClassVar[Measured] = "divergence"
    """What is minimised."""

    @staticmethod
    def parse(target: float | str) -> TargetEdges:
        """Read ``300`` as edges per token and ``"100x"`` as a hundred times fewer than dense.

        Raises:
            ValueError: the target is not a finite number above 0.
        """
        text = str(target).strip()
        amount = _above_zero(text.removesuffix("x"))
        if amount is None:
            raise ValueError(
                f"{target!r} is not a number of target edges: give edges per token, such as 300, "
                'or how many times fewer than in the dense model, "100x"'
            )
        return TargetEdges(amount, text.endswith("x"))

    def per_token(self, dense: float) -> float:
        """The target in edges per token, given the dense model's."""
        return dense / self.amount if self.times_fewer else self.amount

    def budget(self, dense_loss: float) -> float:
        """The largest gap to the dense model: any."""
        return math.inf

    def __str__(self) -> str:
        fewer = " times fewer" * self.times_fewer
        return f"{self.amount:.15g}{fewer} edges per token"

    @property
    def in_words(self) -> str:
        """The target in words."""
        return f"of {self}"


def parse_target(
    target_loss: float | str | None, target_edges: float | str | None, default: str
) -> TargetLoss | TargetEdges:
    """The target that is given.

    Raises:
        ValueError: both are given, or the one that is given is invalid.
    """
    if target_edges is None:
        return TargetLoss.parse(default if target_loss is None else target_loss)
    if target_loss is not None:
        raise ValueError("give a target loss or target edges: each determines the other")
    return TargetEdges.parse(target_edges)


def _above_zero(text: str) -> float | None:
    """The finite number above 0 that is written, if it is one."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


class LossConstraint:
    """The lambda of every group, and the controller that moves it.

    `SparsityObjective` computes gaps and limits.

    Args:
        n_groups: number of groups of rows, each with a loss of its own.
        start: lambda before the first step.
        integral: integral gain, in total over the updates between two evaluations.
        proportional: proportional gain.
        evaluated_every: updates between two evaluations.
        bounds: smallest and largest lambda.
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
        # In float64, which JSON stores exactly, so that a resumed run starts from the same value.
        self._log_lambda = torch.full((n_groups,), math.log(start), dtype=torch.float64)
        self._last_error = torch.zeros_like(self._log_lambda)
        self._integral, self._proportional = integral / evaluated_every, proportional
        self._bounds = [math.log(bound) for bound in bounds]

    @property
    def lambda_(self) -> Float[Tensor, " group"]:
        """The lambda of every group."""
        return self._log_lambda.exp()

    def update(self, excess: Float[Tensor, " group"]) -> None:
        """Move lambda by one step.

        Args:
            excess: of every group's extrapolated gap over its limit, relative to the limit.
        """
        error = excess.clamp(-1, 1).to(self._log_lambda)
        both = self._integral + self._proportional
        change = error * both - self._last_error * self._proportional
        self._log_lambda = (self._log_lambda + change).clamp(*self._bounds)
        self._last_error = error

    def state(self) -> dict[str, Any]:
        """The state that is carried from step to step."""
        carried = {"log_lambda": self._log_lambda, "last_error": self._last_error}
        return {name: values.tolist() for name, values in carried.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self._log_lambda = torch.tensor(state["log_lambda"], dtype=torch.float64)
        self._last_error = torch.tensor(state["last_error"], dtype=torch.float64)
