"""Circuits: some of a model's circuit edges, or some of its heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Bool
from torch import Tensor

from sparse_tl.graph import CircuitGraph, Edge
from sparse_tl.results import Result

if TYPE_CHECKING:
    import networkx as nx
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Circuit(Result):
    """Some of a graph's edges: those that are kept.

    Raises:
        ValueError: a mask of another graph, or with edges that do not exist.
    """

    graph: CircuitGraph
    mask: Bool[Tensor, "source destination"]

    def __post_init__(self) -> None:
        if self.mask.shape != self.graph.exists.shape or bool(
            (self.mask & ~self.graph.exists).any()
        ):
            raise ValueError(
                f"expected a mask over the {self.graph.n_edges:,} edges of {self.graph!r}; got one "
                f"of shape {tuple(self.mask.shape)}, or with edges that do not exist"
            )

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The edges that are kept."""
        return self.graph.edges_of(self.mask)

    def __len__(self) -> int:
        return int(self.mask.sum())

    def having(self, *edges: Edge | str) -> Circuit:
        """The circuit with these edges too, by themselves or by names such as ``a0.h1->m3``.

        Raises:
            ValueError: an edge that the graph lacks.
        """
        return self._changed(edges, kept=True)

    def without(self, *edges: Edge | str) -> Circuit:
        """The circuit without these edges.

        Raises:
            ValueError: an edge that the graph lacks, or that the circuit does not keep.
        """
        return self._changed(edges, kept=False)

    def _changed(self, edges: Sequence[Edge | str], *, kept: bool) -> Circuit:
        mask = self.mask.clone()
        for edge in edges:
            place = self.graph.edge_index(edge)
            if not kept and not mask[place]:
                raise ValueError(f"expected edges that the circuit keeps; it lacks {edge}")
            mask[place] = kept
        return Circuit(self.graph, mask)

    def connected(self, *, patch: str = "corrupted") -> Circuit:
        """Without the edges that have no effect under a patch.

        No kept edge leads from where they end to the logits; or, where patches are corrupted
        prompts' values, none leads from the input to where they begin: a node that reads nothing
        but patches then writes its patch. (It does not where the patch is a mean or 0.)
        """
        graph, mask = self.graph, self.mask.clone()
        for row, node in enumerate(graph.sources):
            reads = node.kind == "input" or bool(mask[:, list(graph.readers(node))].any())
            if patch == "corrupted" and not reads:
                mask[row] = False
        for column in reversed(range(len(graph.destinations))):
            if not reaches_logits(graph, mask, column):
                mask[:, column] = False
        return Circuit(graph, mask)

    def to_networkx(self) -> nx.MultiDiGraph:
        """The kept edges and the nodes that they join."""
        network = self.graph.to_networkx(self.mask)
        network.remove_nodes_from([node for node, degree in network.degree() if degree == 0])
        return network

    def to_pandas(self) -> pd.DataFrame:
        """One row per kept edge: its name, source, destination and slot."""
        return (
            self.graph.to_pandas().loc[self.mask[self.graph.exists].numpy()].reset_index(drop=True)
        )

    def _repr_html_(self) -> str:
        return self.figure()._repr_html_() if len(self) else f"<p>{self!r}</p>"

    def __repr__(self) -> str:
        return f"Circuit({len(self)} of {self.graph.n_edges:,} edges of {self.graph!r})"


@dataclass(frozen=True, eq=False)
class HeadCircuit(Result):
    """Some of a model's heads: those that are kept."""

    mask: Bool[Tensor, "layer head"]

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """The heads that are kept, as (layer, head)."""
        return tuple((layer, head) for layer, head in self.mask.nonzero().tolist())

    def __len__(self) -> int:
        return int(self.mask.sum())

    def to_pandas(self) -> pd.DataFrame:
        """One row per kept head."""
        import pandas as pd

        return pd.DataFrame({"head": [f"a{layer}.h{head}" for layer, head in self.heads]})

    def __repr__(self) -> str:
        return f"HeadCircuit({len(self)} of {self.mask.numel()} heads)"


def reaches_logits(
    graph: CircuitGraph, mask: Bool[Tensor, "source destination"], column: int
) -> bool:
    """Whether what is read there goes on: some later edge of a node that reads it is kept."""
    readers = graph.readers_of(graph.destinations[column])
    return any(
        node.kind == "logits" or bool(mask[graph.source_index(node)].any()) for node in readers
    )
