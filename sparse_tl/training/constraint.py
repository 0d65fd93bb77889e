"""The loss constraint: lambda, what moves it, and the validation rows that must meet the target.

The smallest size at which every group ``g`` of rows meets the target is a saddle point of

    mean_g log(1 + size_g) + mean_g lambda_g (loss_g - target).

At every step ``t``, a PI controller moves each lambda by an error ``e`` between -1 and 1,

    log lambda_t  =  log START + I / n * sum_{s <= t} e_s + P * e_t

with n steps between two evaluations on validation rows, under deterministic gates. A group's *gap*
is its increase in loss over the dense model, or its divergence from it.

*A divergence* is steered along a line, from its first value at the start of the run to `AIM` of the
target at `ARRIVAL`:

    e_t  =  clip(STEERING / left^2 * log(gap_g / line_g), -1, 1)

with `left` falling from 1 at `ARRIVAL` to `LEAST_LEFT`, as what is left of the run does. A group
that begins beyond the target, in a model that is sparse already, is to meet it at once.
*The attention edges* per token, if they are the target, are steered likewise, by one lambda for all
groups, to `BELOW` times their target; their logarithm falls along a parabola that ends flat, and e
has the other sign. So edges close steadily, instead of too fast and then not at all: what a model
loses when it closes too many is not regained at the same number of edges. With too few edges, e > 0
counts `TOO_FEW` times in the sum, since edges that cost little close at almost any lambda.

*An increase in loss*, which may be 0 or negative, moves lambda by its relative excess over a limit,

    e_t  =  clip((gap_g - limit_g) / limit_g, -1, 1)

which falls, with the gates' noise, from `MARGIN` above the *loss budget*, the largest gap that the
target allows, to that budget. ``docs/post-training.md`` has the reasons for all choices.

Reference: nu-PI, Sohrabi et al., arXiv 2406.04558, without its moving average; the logarithm is
that of GECO, Rezende and Viola, arXiv 1810.00597.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.backend import adapt
from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.training import ranks
from sparse_tl.training.distillation import DensePredictions, Reference, as_dense
from sparse_tl.training.evaluation import DenseAndSparse, HeldOut, evaluate_held_out
from sparse_tl.training.loop import Metrics, Precision, in_precision

DEFAULT_TARGET = "kl+0.05"
"""For every group: nats of divergence per label."""
START = 10.0
"""lambda before the first step."""
INTEGRAL, PROPORTIONAL = 0.4, 0.5
"""I and P for losses; I is the total over the steps between two evaluations."""
BOUNDS = (5.0, 20_000.0)
"""Smallest and largest lambda: at 5, a nat of a group's loss is worth 150 times fewer edges."""

NO_NOISE = 0.7
"""Fraction of the run after which the gates have no noise, and the limits no margin."""
MARGIN = 0.05
"""Nats by which the initial loss limit exceeds the final one, whatever the target."""
LEAST_BUDGET = 1e-4
"""Smallest loss budget, in nats, that lambda is moved by; the exact one decides feasibility."""
EVALUATIONS = 40
"""Number of validation evaluations in a run."""
STEERING = 2.0
"""Error per unit of the logarithm of the ratio to a line."""
OF_DIVERGENCE: dict[str, Any] = {
    "steered": True,
    "integral": 0.08,
    "proportional": 0.5,
    "bounds": (1.0, BOUNDS[1]),
}
"""Settings of the controller under a target of a divergence."""
OF_EDGES: dict[str, Any] = {**OF_DIVERGENCE, "integral": 0.1, "proportional": 2.0}
"""Settings of the controller under a target of edges."""
ARRIVAL = 0.6
"""Fraction of the run after which a line reaches its end."""
LEAST_LEFT = 0.25
"""Least that counts as left of the run, relative to `ARRIVAL`. The learning rate falls about as its
square, and lambda has to move as much further for the same effect."""
AIM = 0.95
"""Where a divergence's line ends, as a multiple of the target: evaluations scatter below it."""
BELOW = 0.98
"""Where the line of edges ends, likewise."""
TOO_FEW = 4.0
"""How many times as fast the integral term rises, if there are too few edges, as it falls."""
TINY = 1e-6
"""Edges per token, or nats, that count as none; their logarithm is finite."""


@dataclass(frozen=True)
class Target:
    """What training has to reach: a bound for every group of rows, or a number of attention edges.

    Args:
        amount: upper bound in nats per label; or active edges per token, as a mean over groups; or
            how many times fewer these are than in the dense model.
        of: what is bounded in each group: the model's "loss", its "increase" over the frozen dense
            model's, or the "divergence" from that model, ``KL(dense || sparse)``; or "edges" per
            token, or "times fewer" edges.
    """

    amount: float
    of: Literal["loss", "increase", "divergence", "edges", "times fewer"]

    @staticmethod
    def parse(loss: float | str | None = None, edges: float | str | None = None) -> Target:
        """Read ``0.01`` as a loss, ``"+0.05"`` as an increase and ``"kl+0.05"`` as a divergence.

        Of edges, ``300`` is a number per token, and ``"100x"`` a hundred times fewer than dense.
        Without either, the target is a loss: `DEFAULT_TARGET`.
        """
        if loss is not None and edges is not None:
            raise ValueError("give a target loss or target edges: each determines the other")
        given = loss if edges is None else edges
        text = str(DEFAULT_TARGET if given is None else given).strip()
        if edges is not None:
            of, number = ("times fewer" if text.endswith("x") else "edges"), text.removesuffix("x")
            asked = 'edges per token, such as 300, or how many times fewer than dense, "100x"'
        else:
            sign = next(sign for sign in _SIGNS if text.startswith(sign))
            of, number = _SIGNS[sign], text.removeprefix(sign.removesuffix("+"))
            asked = 'nats above 0: a loss, 0.01, an increase, "+0.05", or a divergence, "kl+0.05"'
        try:
            amount = float(number)
        except ValueError:
            amount = math.nan
        if not 0 < amount < math.inf:
            raise ValueError(f"{given!r} is not a target; give {asked}")
        return Target(amount, of)

    @property
    def of_edges(self) -> bool:
        """Whether the number of edges is given, and the divergence is minimised."""
        return self.of in ("edges", "times fewer")

    @property
    def of_divergence(self) -> bool:
        """Whether the gap to the dense model is a divergence."""
        return self.of_edges or self.of == "divergence"

    def edges(self, dense: float) -> float | None:
        """The target in edges per token, given the dense model's; None for a target loss."""
        if not self.of_edges:
            return None
        return self.amount if self.of == "edges" else dense / self.amount

    def budget(self, dense_loss: float) -> float:
        """The largest gap to the dense model, in nats, that the target allows."""
        if self.of_edges:
            return math.inf
        return self.amount - dense_loss if self.of == "loss" else self.amount

    def __str__(self) -> str:
        if self.of_edges:
            fewer = " times fewer" * (self.of == "times fewer")
            return f"{self.amount:.15g}{fewer} edges per token"
        sign = next(sign for sign, of in _SIGNS.items() if of == self.of)
        return f"{sign}{self.amount:.15g}"


_SIGNS: dict[str, Literal["loss", "increase", "divergence"]] = {
    "kl+": "divergence",
    "+": "increase",
    "": "loss",
}


@dataclass
class LossConstraint:
    """The lambda of every group, and the controller that moves it.

    Args:
        budget: the largest gap that the target allows each group, in nats.
        steered: whether divergences, or edges, follow a line, instead of losses a limit.
        target_edges: edges per token at the end of the line, if these are the target.
        evaluated_every: updates between two evaluations.
        start: lambda before the first step.
        integral: integral gain, in total over the updates between two evaluations.
        proportional: proportional gain.
        bounds: smallest and largest lambda.
    """

    budget: Float[Tensor, " group"]
    steered: bool = False
    target_edges: float | None = None
    evaluated_every: int = 1
    start: float = START
    integral: float = INTEGRAL
    proportional: float = PROPORTIONAL
    bounds: tuple[float, float] = BOUNDS

    def __post_init__(self) -> None:
        # In float64, which JSON stores exactly, so that a resumed run starts from the same value.
        self.budget = self.budget.double().clamp(min=LEAST_BUDGET)
        self._log_lambda = torch.full_like(self.budget, math.log(self.start))
        self._last_error = torch.zeros_like(self.budget)
        self._last = self.limit(0.0)  # no excess before the first evaluation
        self._first = torch.full_like(self.budget, math.nan)

    @property
    def lambda_(self) -> Float[Tensor, " group"]:
        """The lambda of every group."""
        return self._log_lambda.exp()

    def limit(self, done: float) -> Float[Tensor, " group"]:
        """The limit on every group's gap when a fraction `done` of the run is over, in nats."""
        return self.budget + MARGIN * remaining(done)

    def line(self, done: float) -> Float[Tensor, " group"]:
        """Where each group's divergence, in nats, or the edges per token should be."""
        share = min(done / ARRIVAL, 1.0)
        if self.target_edges is None:
            end = AIM * self.budget
            return self._first.minimum(end).lerp(end, share)
        share *= 2 - share  # most edges close at no cost, and early; the last ones take time
        return self._first ** (1 - share) * (BELOW * self.target_edges) ** share

    def record(self, gap: Float[Tensor, " group"], edges: float) -> None:
        """Record every group's gap, and edges per token, as evaluated on validation rows."""
        last = gap if self.target_edges is None else torch.full_like(gap, edges)
        self._last = last.clamp(min=TINY) if self.steered else last
        self._first = torch.where(self._first.isnan(), self._last, self._first)

    def update(self, done: float) -> float:
        """Move lambda by one step; return the largest excess over a limit, or over the line."""
        allowed = self.line(done) if self.steered else self.limit(done)
        over = self._last - allowed
        if self.steered:
            left = min(1.0, max((1 - done) / (1 - ARRIVAL), LEAST_LEFT))
            error = STEERING / left**2 * (self._last / allowed).log()
        else:
            error = over / allowed
        self.move(error if self.target_edges is None else -error)
        return over.max().item()

    def move(self, error: Float[Tensor, " group"]) -> None:
        """Move lambda by one step, given every group's error ``e_t`` before clipping."""
        error = error.clamp(-1, 1).to(self._log_lambda)
        summed = error * self.integral / self.evaluated_every
        if self.target_edges is not None:
            summed = torch.where(error > 0, TOO_FEW * summed, summed)
        change = summed + self.proportional * (error - self._last_error)
        self._log_lambda = (self._log_lambda + change).clamp(*map(math.log, self.bounds))
        self._last_error = error

    def state(self) -> dict[str, Any]:
        """The state that is carried from step to step."""
        carried = [self._log_lambda, self._last_error, self._first, self._last]
        return dict(zip(_CARRIED, map(Tensor.tolist, carried), strict=True))

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        carried = (torch.tensor(state[name], dtype=torch.float64) for name in _CARRIED)
        self._log_lambda, self._last_error, self._first, self._last = carried


_CARRIED = ("log_lambda", "last_error", "first", "last")


def remaining(done: float) -> float:
    """The fraction of noise and margin that is left when a fraction `done` of the run is over."""
    return 0.5 * (1 + math.cos(math.pi * min(done / NO_NOISE, 1.0)))


class Validation:
    """Validation rows, each group of which must meet the target, and held-out rows.

    The constructor measures the dense model, so it must be called before training. Arguments are
    those of `post_train`, and the frozen dense model, if divergences from it are measured.
    """

    def __init__(
        self,
        sparse: SparseTransformer,
        rows: TokenBatch | Mapping[str, TokenBatch],
        held_out: Mapping[str, TokenBatch],
        target: Target,
        edge_cost: Float[Tensor, "*#edge"] | None,
        precision: Precision,
        dense: Reference | None,
    ) -> None:
        self.sparse, self.target, self.edge_cost = sparse, target, edge_cost
        self.precision: Precision = precision
        self.groups = rows if isinstance(rows, Mapping) else {}
        self.rows = TokenBatch.joined(list(rows.values())) if isinstance(rows, Mapping) else rows
        self.held_out, self.predictions = held_out, None
        if dense is not None and target.of_divergence:
            # Not the objective's, which keeps training rows, in the run's checkpoints too.
            self.predictions = DensePredictions(dense)
        self.dense = self._of_dense(self.rows)
        self.dense_groups, self.dense_held_out = (
            {name: self._of_dense(some) for name, some in of.items()}
            for of in (self.groups, held_out)
        )
        losses, most = self.dense.group_losses, self.dense.edges_per_token
        if missing := set(range(max(losses) + 1)) - set(losses):
            raise ValueError(
                f"no label of the validation rows is of the groups {sorted(missing)[:5]}, of "
                f"{max(losses) + 1} groups"
            )
        self.target_edges = target.edges(most)
        """The target in edges per token, if it is one of edges."""
        if self.target_edges is not None and self.target_edges > most:
            raise ValueError(
                f"a target of {target} is above the dense model's {most:,.1f} edges per token"
            )
        self.loss_budget = _by_group({g: target.budget(loss) for g, loss in losses.items()})
        """The largest gap that the target allows each group, in nats."""
        if target.of == "loss" and self.loss_budget.min() < 0:
            raise ValueError(
                f"the dense model's own validation loss is {max(losses.values()):.5f} nats, above "
                f"the target of {target}. Give a larger one, or an increase such as "
                f'"+{max(self.dense.loss * 0.02, 0.01):.2g}".'
            )

    def check_own_reference(self) -> None:
        """Warn if the dense model, a copy of the weights with open gates, has lost to the gates.

        So it is where both were trained together: the model that they were made from is not there.
        """
        gated, opened = self.measured(self.rows).group_losses, self.dense.group_losses
        group = max(gated, key=lambda g: opened[g] - gated[g])
        if opened[group] - gated[group] > MARGIN:
            warnings.warn(
                f"with open gates, which the target and the training compare it with, this model "
                f"has a loss of {opened[group]:.3g} nats, and {gated[group]:.3g} with its gates: "
                "its weights were trained with them. Go on from its adapters, or give a loss "
                "as the target, such as 0.01",
                stacklevel=3,
            )

    def measured(self, rows: TokenBatch) -> HeldOut:
        """Measurements of the current sparse model on some rows."""
        return self._evaluated(rows, edge_cost=self.edge_cost, dense=self.predictions)

    def gaps(self, measured: HeldOut) -> Float[Tensor, " group"]:
        """Every group's gap to the dense model, in nats."""
        if self.target.of_divergence:
            return _by_group(measured.group_divergences)
        return _by_group(measured.group_losses) - _by_group(self.dense.group_losses)

    def metrics(self, measured: HeldOut) -> Metrics:
        """Measurements on the validation rows by name, which select the weights.

        The *violation* is the largest excess over a group's loss budget, or that over the target
        number of edges.
        """
        gaps = self.gaps(measured)
        violation = (gaps - self.loss_budget).max().item()
        if self.target_edges is not None:
            violation = measured.edges_per_token - self.target_edges
        return {
            **measured.numbers,
            **{f"gap_{n}": x for n, x in zip(self.groups, gaps.tolist(), strict=False)},
            "log_size": measured.log_size,
            "gap": gaps.mean().item(),
            "violation": violation,
        }

    def compared(
        self, rows: Mapping[str, TokenBatch], dense: Mapping[str, HeldOut]
    ) -> dict[str, DenseAndSparse]:
        """Measurements of both models by name of the rows, those of the dense model given."""
        return {
            name: DenseAndSparse(dense[name], self.measured(some)) for name, some in rows.items()
        }

    def _of_dense(self, rows: TokenBatch) -> HeldOut:
        """Measurements of the dense model; before training, where its weights are trained."""
        with as_dense(self.sparse):
            found = self._evaluated(rows)
        return replace(found, active_mlps=None, possible_mlps=None, active_size=None)

    def _evaluated(self, rows: TokenBatch, **how: Any) -> HeldOut:
        with in_precision(self.precision, adapt(self.sparse).device):
            return ranks.from_first(evaluate_held_out(self.sparse, rows, **how))


def is_feasible(metrics: Metrics) -> bool:
    """Whether an evaluation meets the target, that of a loss in every group."""
    return metrics["violation"] <= 0


def _by_group(values: Mapping[int, float]) -> Float[Tensor, " group"]:
    return torch.tensor([value for _, value in sorted(values.items())], dtype=torch.float64)
