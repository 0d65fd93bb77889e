"""What attribution returns: a score for every circuit edge or head, which circuits are cut by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.circuits.circuit import Circuit, HeadCircuit
from sparse_tl.graph import CircuitGraph, Edge
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class EdgeScores(Result):
    """One score per circuit edge, in units of the metric; negative: patching it lowers the metric.

    Args:
        graph: the edges.
        scores: 0 where there is no edge.
        method: how they were found.

    Raises:
        ValueError: scores of another shape, or that are no numbers.
    """

    graph: CircuitGraph
    scores: Float[Tensor, "source destination"]
    method: str

    def __post_init__(self) -> None:
        if self.scores.shape != self.graph.exists.shape:
            raise ValueError(
                f"expected scores of shape {tuple(self.graph.exists.shape)} for {self.graph!r}; "
                f"got {tuple(self.scores.shape)}"
            )
        if not bool(self.scores.isfinite().all()):
            raise ValueError("expected finite scores; some are NaN or infinite")

    def __getitem__(self, edge: Edge | str) -> float:
        return self.scores[self.graph.edge_index(edge)].item()

    def top(self, size: int, *, signed: bool = False) -> Circuit:
        """The circuit of the `size` edges with the largest scores by absolute value.

        Args:
            size: edges kept; ties are kept in the graph's order.
            signed: rank by how much an edge helps (the most negative scores) instead.

        Raises:
            ValueError: a size that the graph does not have.
        """
        if not 0 <= size <= self.graph.n_edges:
            raise ValueError(f"expected a size in 0..{self.graph.n_edges}; got {size}")
        values = self.scores[self.graph.exists]
        order = (-values if signed else values.abs()).argsort(descending=True, stable=True)
        kept = torch.zeros_like(values, dtype=torch.bool)
        kept[order[:size]] = True
        mask = torch.zeros_like(self.graph.exists)
        mask[self.graph.exists] = kept
        return Circuit(self.graph, mask)

    def to_pandas(self) -> pd.DataFrame:
        """One row per edge, the largest scores by absolute value first."""
        table = self.graph.to_pandas().assign(score=self.scores[self.graph.exists].tolist())
        return table.sort_values(
            "score", key=abs, ascending=False, kind="stable", ignore_index=True
        )

    def __repr__(self) -> str:
        best = self.to_pandas().head(3)
        listed = ", ".join(f"{e} {s:.3g}" for e, s in zip(best["edge"], best["score"], strict=True))
        return f"EdgeScores({self.graph.n_edges:,} edges by {self.method}: {listed}, ...)"


@dataclass(frozen=True, eq=False)
class HeadScores(Result):
    """One score per head, in units of the metric; negative: patching it lowers the metric."""

    scores: Float[Tensor, "layer head"]
    method: str

    def __post_init__(self) -> None:
        if not bool(self.scores.isfinite().all()):
            raise ValueError("expected finite scores; some are NaN or infinite")

    def order(self) -> list[tuple[int, int]]:
        """Heads as (layer, head), the largest scores by absolute value first."""
        ranked = self.scores.flatten().abs().argsort(descending=True, stable=True)
        return [divmod(index, self.scores.shape[1]) for index in ranked.tolist()]

    def top(self, size: int) -> HeadCircuit:
        """The circuit of the `size` heads with the largest scores by absolute value.

        Raises:
            ValueError: more heads than there are, or fewer than none.
        """
        if not 0 <= size <= self.scores.numel():
            raise ValueError(f"expected a size in 0..{self.scores.numel()}; got {size}")
        mask = torch.zeros_like(self.scores, dtype=torch.bool)
        for layer, head in self.order()[:size]:
            mask[layer, head] = True
        return HeadCircuit(mask)

    def to_pandas(self) -> pd.DataFrame:
        """One row per head, the largest scores by absolute value first."""
        import pandas as pd

        rows = [
            {"head": f"a{layer}.h{head}", "score": self.scores[layer, head].item()}
            for layer, head in self.order()
        ]
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        best = ", ".join(
            f"{h} {s:.3g}" for h, s in self.to_pandas().head(3).itertuples(index=False)
        )
        return f"HeadScores({self.scores.numel()} heads by {self.method}: {best}, ...)"
