"""The result of post-training, on every group of rows and on held-out texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import pandas as pd

from sparse_tl.results import Result
from sparse_tl.training.constraint import TargetEdges, TargetLoss
from sparse_tl.training.evaluation import HeldOut

UNUSED = 0.5
"""A group that uses less than this share of its loss budget was not limited by the constraint."""
STILL_FALLING = 0.95
"""Active edges at the end, as a share of those after nine tenths of the run; below this, more steps
would close more edges."""


@dataclass(frozen=True)
class DenseAndSparse:
    """Measurements of the dense and the sparse model on the same rows."""

    dense: HeldOut
    sparse: HeldOut

    @property
    def loss_increase(self) -> float:
        """The sparse model's loss minus the dense model's, in nats."""
        return self.sparse.loss - self.dense.loss

    @property
    def times_fewer(self) -> float:
        """Possible attention edges over active ones; infinite if none is active."""
        active = self.sparse.active_attention_edges
        return self.sparse.possible_attention_edges / active if active else math.inf

    def used(self, target: TargetLoss) -> float:
        """The share of the loss budget that the rows used; NaN without a measured divergence."""
        gap = self.sparse.divergence if target.of == "divergence" else self.loss_increase
        return math.nan if gap is None else gap / max(target.budget(self.dense.loss), 1e-12)

    def row(self) -> dict[str, float]:
        """The main numbers of both models, by name."""
        dense, sparse = self.dense, self.sparse
        numbers = {
            "dense loss": dense.loss,
            "sparse loss": sparse.loss,
            "divergence": sparse.divergence,
            "dense edges per token": dense.active_attention_edges_per_token,
            "sparse edges per token": sparse.active_attention_edges_per_token,
            "times fewer": self.times_fewer,
        }
        return {name: math.nan if value is None else value for name, value in numbers.items()}


@dataclass(frozen=True, eq=False)
class PostTraining(Result):
    """The result of a post-training run.

    Args:
        feasible: whether any validation evaluation met the target, except that before training.
        target: the target that every group had to meet, or that the mean of their edges had to.
        dense: validation measurements of the dense model.
        sparse: validation measurements of the selected weights.
        best_step: step of the selected weights.
        history: one row per step; validation columns are set at steps with an evaluation.
        groups: validation measurements of every group, by name, if the groups have names.
        held_out: measurements on held-out rows, by name: those of a group, or of other texts.
    """

    feasible: bool
    target: TargetLoss | TargetEdges
    dense: HeldOut
    sparse: HeldOut
    best_step: int
    history: pd.DataFrame
    groups: Mapping[str, DenseAndSparse] = field(default_factory=dict)
    held_out: Mapping[str, DenseAndSparse] = field(default_factory=dict)

    @property
    def loss_increase(self) -> float:
        """Validation loss minus the dense model's, in nats."""
        return self._overall.loss_increase

    @property
    def times_fewer(self) -> float:
        """Possible edges over active edges; infinite if none is active."""
        return self._overall.times_fewer

    @property
    def reported(self) -> dict[str, DenseAndSparse]:
        """Measurements of every group and held-out text; of groups on held-out rows, if any."""
        return {**self.groups, **self.held_out}

    @property
    def _overall(self) -> DenseAndSparse:
        return DenseAndSparse(self.dense, self.sparse)

    @property
    def verdict(self) -> str:
        """The outcome in a few sentences."""
        edges = (
            f"{self.sparse.active_attention_edges:,.2f} of "
            f"{self.sparse.possible_attention_edges:,.0f} attention edges active per example "
            f"({self.times_fewer:.1f}x fewer){self.sparse.mlps} at validation loss "
            f"{self.sparse.loss:.4f} nats ({self.loss_increase:+.4f} over the dense model"
        )
        if self.sparse.divergence is not None:
            edges += f", {self.sparse.divergence:.4f} divergence from it"
        edges += ")"
        target = f"Target {self.target.in_words}"
        of_edges = isinstance(self.target, TargetEdges)
        if (n := len(self.dense.group_losses)) > 1:
            target += f", on average over {n} groups," if of_edges else f" in each of {n} groups"
        if not self.feasible:
            advice = "start from a smaller threshold or a larger bias, or allow more loss"
            if of_edges:
                advice = "or allow more edges"
            outcome = (
                f"{target} NOT met by any validation evaluation after the first step; kept the "
                f"weights that came closest, from step {self.best_step}: {edges}. Train for "
                f"longer, {advice}."
            )
        else:
            outcome = f"{target} met at step {self.best_step}: {edges}.{self._loose}"
        return " ".join([outcome, *self._lines])

    @property
    def _loose(self) -> str:
        """Advice for a longer run; empty if there is none."""
        if (
            isinstance(self.target, TargetEdges)
            or "validation_active_attention_edges" not in self.history
        ):
            return ""
        edges = self.history.set_index("step")["validation_active_attention_edges"].dropna()
        if len(edges) < 2:
            return ""
        last = edges.index[-1]
        if self.best_step < last / 2 and edges.iloc[-1] < edges[self.best_step]:
            return (
                f" Later in training fewer edges were active ({edges.iloc[-1]:,.2f} at the end), "
                "but the target was missed. Train for longer, or allow more loss."
            )
        groups = self.groups or {"": self._overall}
        loose = [name for name, models in groups.items() if models.used(self.target) < UNUSED]
        if not loose or edges.iloc[-1] >= STILL_FALLING * edges[edges.index <= 0.9 * last].iloc[-1]:
            return ""
        where = f" on {', '.join(loose)}" if self.groups else ""
        return (
            f" The constraint did not bind{where}: less than half of the loss budget was used, and "
            "edges were still closing at the end. More steps would close more."
        )

    @property
    def _lines(self) -> list[str]:
        """One sentence for every group, and for every held-out text."""
        lines = []
        for name, models in self.reported.items():
            held_out = " (held-out rows)" if name in self.groups else " (held out)"
            note = held_out if name in self.held_out else ""
            loss = f"loss {models.sparse.loss:.3f} nats ({models.loss_increase:+.3f})"
            if models.sparse.divergence is not None:
                loss += f", divergence {models.sparse.divergence:.3f}"
            edges = f"{models.sparse.active_attention_edges_per_token:,.1f} edges per token"
            lines.append(f"{name}{note}: {edges} ({models.times_fewer:.1f}x fewer), {loss}.")
        return lines

    def to_pandas(self) -> pd.DataFrame:
        """Dense and sparse side by side; with named groups or held-out texts, one row for each."""
        rows = {name: models.row() for name, models in self.reported.items()}
        if rows:
            return pd.DataFrame.from_dict(rows, orient="index")
        return pd.DataFrame({"dense": self.dense.numbers, "sparse": self.sparse.numbers})

    def __repr__(self) -> str:
        return f"PostTraining({self.verdict})"
