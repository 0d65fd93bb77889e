"""Circuits: subsets of a model's circuit edges, heads or attention edges."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from sparse_tl.calls.arguments import checked
from sparse_tl.gates.patches import Patch, needs_reference
from sparse_tl.graph import AttentionGrid, CircuitEdge, CircuitGraph, HeadGrid, PositionedGraph
from sparse_tl.results import Result

if TYPE_CHECKING:
    import networkx as nx
    import pandas as pd

Grid = CircuitGraph | PositionedGraph | HeadGrid | AttentionGrid
"""The grid of all parts that circuits and scores refer to; a union, so that saved results load."""


@checked
@dataclass(frozen=True, eq=False)
class Circuit(Result):
    """The parts of a model that are kept, out of a grid of circuit edges, heads or attention edges.

    Args:
        grid: grid of all parts, kept or not.
        mask: true for the parts that are kept.

    Raises:
        ValueError: the mask does not have the shape of the grid, or marks parts that do not exist.
    """

    grid: Grid
    mask: Bool[Tensor, "*axes"]

    def __post_init__(self) -> None:
        exists = self.grid.exists
        if self.mask.shape != exists.shape or bool((self.mask.cpu() & ~exists).any()):
            raise ValueError(
                f"the mask, of shape {tuple(self.mask.shape)}, must have the shape "
                f"{tuple(exists.shape)} of {self.grid!r}, without edges that do not exist"
            )

    @classmethod
    def of(cls, grid: Grid, parts: Iterable[Any]) -> Circuit:
        """A circuit from the names or indices of its parts, such as a published circuit.

        Args:
            grid: grid of all parts, such as ``scores.grid``.
            parts: names or indices: ``"a9.h9"`` or ``(9, 9)`` for heads, ``"a0.h1->m3"`` for edges.

        Raises:
            ValueError: the grid lacks a part.
        """
        return cls(grid, torch.zeros_like(grid.exists)).having(*parts)

    @property
    def graph(self) -> CircuitGraph:
        """The graph of all circuit edges that a circuit of circuit edges is part of.

        Raises:
            ValueError: the circuit consists of other parts.
        """
        if not isinstance(self.grid, CircuitGraph):
            remedy = ""
            if isinstance(self.grid, PositionedGraph):
                remedy = f'; circuit.at("{self.grid.positions[-1]}") has those of one position'
            raise ValueError(f"this circuit consists of {self.grid.noun}{remedy}")
        return self.grid

    def at(self, position: str | int) -> Circuit:
        """The circuit edges that are kept at one position.

        Args:
            position: column of a token, or name of a span.

        Raises:
            ValueError: the circuit has no positions, or lacks this one.
        """
        grid = positioned(self.grid)
        return Circuit(grid.graph, self.mask[grid.position(position)])

    @property
    def edges(self) -> tuple[CircuitEdge, ...]:
        """The circuit edges that are kept; raises as `graph` does."""
        return self.graph.edges_of(self.mask)

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """The heads that are kept, as (layer, head) pairs.

        Raises:
            ValueError: the circuit consists of edges.
        """
        if not isinstance(self.grid, HeadGrid):
            raise ValueError(f"this circuit consists of {self.grid.noun}, not of heads")
        return tuple((layer, head) for layer, head in self.mask.nonzero().tolist())

    def __len__(self) -> int:
        return int(self.mask.count_nonzero())

    def having(self, *parts: Any) -> Circuit:
        """The circuit with parts added, given by name (``a0.h1->m3``) or index.

        Raises:
            ValueError: the grid lacks a part.
        """
        mask = self.mask.clone()
        for part in parts:
            mask[self.grid.index(part)] = True
        return Circuit(self.grid, mask)

    def without(self, *parts: Any) -> Circuit:
        """The circuit with parts removed, given by name or index.

        Raises:
            ValueError: the grid lacks a part, or the circuit does not keep it.
        """
        mask = self.mask.clone()
        for part in parts:
            index = self.grid.index(part)
            if not mask[index]:
                raise ValueError(f"the circuit does not contain {part}")
            mask[index] = False
        return Circuit(self.grid, mask)

    def connected(self, *, patch: Patch = "corrupted") -> Circuit:
        """The circuit without the circuit edges that have no effect under a patch.

        An edge has no effect if no kept path leads from its destination to the logits. With
        "corrupted" and "resample" patches, which come from a single run on another prompt, an edge
        also has no effect if no kept path leads from the input to its source: a node that reads
        only patches then writes its own patch. With "mean", "zero" and tensors, such a node writes
        something else, so its edges are kept.

        Args:
            patch: patch that the circuit is evaluated with.

        Raises:
            ValueError: the patch is unknown.
        """
        grid = self.grid
        if not isinstance(grid, PositionedGraph):
            grid = PositionedGraph(self.graph, ("0",))
        mask, follows = self.mask.cpu().view(grid.exists.shape).numpy().copy(), grid.follows.numpy()
        if needs_reference(patch) and patch != "mean":
            for group in grid.graph.groups:
                inputs = np.logical_or.reduce(mask[:, :, group.columns], axis=1)
                mask[:, group.rows] &= group.written_from(inputs, follows)[:, :, None]
        for group in reversed(grid.graph.groups):
            nodes = np.logical_or.reduce(mask[:, group.rows], axis=2)
            mask[:, :, group.columns] &= group.read_for(nodes, follows)[:, None]
        kept = torch.from_numpy(mask).view(self.mask.shape)
        return Circuit(self.grid, kept.to(self.mask.device))

    def to_networkx(self) -> nx.MultiDiGraph:
        """A network of the kept circuit edges and the nodes that they connect."""
        network = self.graph.to_networkx(self.mask)
        network.remove_nodes_from([node for node, degree in network.degree() if degree == 0])
        return network

    def to_pandas(self) -> pd.DataFrame:
        """One row per kept part: its name and index."""
        import pandas as pd

        return pd.DataFrame(self.grid.columns(self.mask.nonzero()))

    def _repr_html_(self) -> str:
        if not isinstance(self.grid, (CircuitGraph, PositionedGraph)):
            return super()._repr_html_()
        # A larger figure would need scores, to choose the edges that it shows.
        if 0 < len(self) <= 2000:
            return self.figure()._repr_html_()
        return f"<p>{escape(repr(self))}</p>"

    def __repr__(self) -> str:
        return f"Circuit({len(self):,} of {self.grid.n_parts:,} {self.grid.noun} of {self.grid!r})"


def check_grid(graph: CircuitGraph, grid: Grid, *kinds: type[Grid]) -> None:
    """Raise a ValueError if a grid is not the model's own, or of none of these kinds."""
    whole = grid.graph if isinstance(grid, PositionedGraph) else grid
    if not isinstance(grid, kinds) or whole not in (graph, graph.heads):
        nouns = " or ".join(kind.noun for kind in kinds)
        raise ValueError(f"these are parts of {grid!r}, not {nouns} of the model's own {graph!r}")


def positioned(grid: Grid) -> PositionedGraph:
    """The grid, after a check that it is one of circuit edges by position."""
    if not isinstance(grid, PositionedGraph):
        raise ValueError(f'{grid.noun} have no positions; score with positions="tokens"')
    return grid


def reaches_logits(
    graph: CircuitGraph, mask: Bool[Tensor, "source destination"], column: int
) -> bool:
    """Whether a destination leads to the logits: some node that it feeds keeps an outgoing edge."""
    group = next((group for group in graph.groups if column < group.columns.stop), None)
    if group is None:
        return True  # the logits themselves
    nodes = np.logical_or.reduce(mask[group.rows].numpy(), axis=1)
    reaching = group.read_for(nodes[None], np.ones((1, 1), dtype=bool))
    return bool(reaching[0, column - group.columns.start])
