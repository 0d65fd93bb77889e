"""Circuits: subsets of a model's circuit edges, heads or attention edges."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from sparse_tl.arguments import checked
from sparse_tl.gates.patches import Patch, needs_reference
from sparse_tl.graph import CircuitEdge, CircuitGraph
from sparse_tl.grids import AttentionGrid, HeadGrid
from sparse_tl.positioned_graph import PositionedGraph
from sparse_tl.results import Result

if TYPE_CHECKING:
    import networkx as nx
    import pandas as pd

Site = CircuitGraph | PositionedGraph | HeadGrid | AttentionGrid
"""The set of parts that scores and circuits are defined over."""


@checked
@dataclass(frozen=True, eq=False)
class Circuit(Result):
    """A subset of the parts at a site: the parts that are kept.

    Args:
        site: all parts: circuit edges, heads, or attention edges.
        mask: true for the parts that are kept.

    Raises:
        ValueError: the mask has another site's shape, or marks parts that do not exist.
    """

    made_by: ClassVar[str] = "attribute_circuit_edges(...).top(100)"

    site: Site
    mask: Bool[Tensor, "*axes"]

    def __post_init__(self) -> None:
        exists = self.site.exists
        if self.mask.shape != exists.shape or bool((self.mask.cpu() & ~exists).any()):
            raise ValueError(
                f"expected a mask over the {self.site.n_parts:,} {self.site.noun} of "
                f"{self.site!r}; got one of shape {tuple(self.mask.shape)}, or with "
                f"{self.site.noun} that do not exist"
            )

    @classmethod
    def of(cls, site: Site, parts: Iterable[Any]) -> Circuit:
        """Build a circuit from part names or indices, such as a published circuit.

        Args:
            site: all parts, such as ``scores.site``.
            parts: names or indices: ``"a9.h9"`` or ``(9, 9)`` for heads, ``"a0.h1->m3"`` for edges.

        Raises:
            ValueError: the site lacks a part.
        """
        return cls(site, torch.zeros_like(site.exists)).having(*parts)

    @property
    def graph(self) -> CircuitGraph:
        """The site of a circuit made of circuit edges.

        Raises:
            ValueError: the circuit consists of other parts.
        """
        if not isinstance(self.site, CircuitGraph):
            how = ""
            if isinstance(self.site, PositionedGraph):
                how = f'; circuit.at("{self.site.positions[-1]}") has those of one position'
            raise ValueError(
                f"expected a circuit of circuit edges; got one of {self.site.noun}{how}"
            )
        return self.site

    def at(self, position: str | int) -> Circuit:
        """The circuit edges that are kept at one position.

        Args:
            position: column of a token, or name of a span.

        Raises:
            ValueError: the circuit has no positions, or not this one.
        """
        site = positioned(self.site)
        return Circuit(site.graph, self.mask[site.position(position)])

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
        if not isinstance(self.site, HeadGrid):
            raise ValueError(f"expected a circuit of heads; got one of {self.site.noun}")
        return tuple((layer, head) for layer, head in self.mask.nonzero().tolist())

    def __len__(self) -> int:
        return int(self.mask.count_nonzero())

    def having(self, *parts: Any) -> Circuit:
        """The circuit with these parts added, given by name (``a0.h1->m3``) or index.

        Raises:
            ValueError: the site lacks a part.
        """
        mask = self.mask.clone()
        for part in parts:
            mask[self.site.index(part)] = True
        return Circuit(self.site, mask)

    def without(self, *parts: Any) -> Circuit:
        """The circuit with these parts removed.

        Raises:
            ValueError: the site lacks a part, or the circuit does not keep it.
        """
        mask = self.mask.clone()
        for part in parts:
            place = self.site.index(part)
            if not mask[place]:
                raise ValueError(
                    f"expected {self.site.noun} that the circuit keeps; it lacks {part}"
                )
            mask[place] = False
        return Circuit(self.site, mask)

    def connected(self, *, patch: Patch = "corrupted") -> Circuit:
        """Drop the circuit edges that have no effect under a patch.

        Under every patch, an edge has no effect if no kept path leads from its destination to the
        logits. Under "corrupted" and "resample", all patches come from one run on another prompt,
        so a node that reads only patches writes its own patch: an edge has no effect either if no
        kept path leads from the input to its source. Under "mean", "zero" and tensors, such a node
        writes something other than its patch, and its edges are kept.

        Args:
            patch: patch that the circuit is evaluated with.

        Raises:
            ValueError: the patch is unknown.
        """
        site = self.site
        if not isinstance(site, PositionedGraph):
            site = PositionedGraph(self.graph, ("0",))
        mask, follows = self.mask.cpu().view(site.exists.shape).numpy().copy(), site.follows.numpy()
        if needs_reference(patch) and patch != "mean":
            for group in site.graph.groups:
                inputs = np.logical_or.reduce(mask[:, :, group.columns], axis=1)
                mask[:, group.rows] &= group.written_from(inputs, follows)[:, :, None]
        for group in reversed(site.graph.groups):
            nodes = np.logical_or.reduce(mask[:, group.rows], axis=2)
            mask[:, :, group.columns] &= group.read_for(nodes, follows)[:, None]
        kept = torch.from_numpy(mask).view(self.mask.shape)
        return Circuit(self.site, kept.to(self.mask.device))

    def to_networkx(self) -> nx.MultiDiGraph:
        """The kept circuit edges and the nodes that they connect."""
        network = self.graph.to_networkx(self.mask)
        network.remove_nodes_from([node for node, degree in network.degree() if degree == 0])
        return network

    def to_pandas(self) -> pd.DataFrame:
        """One row per kept part: its name and index."""
        import pandas as pd

        return pd.DataFrame(self.site.columns(self.mask.nonzero()))

    def _repr_html_(self) -> str:
        if not isinstance(self.site, (CircuitGraph, PositionedGraph)):
            return super()._repr_html_()
        # Without scores there is nothing to choose the edges of a larger picture by.
        drawn = 0 < len(self) <= 2000
        return self.figure()._repr_html_() if drawn else f"<p>{escape(repr(self))}</p>"

    def __repr__(self) -> str:
        return f"Circuit({len(self):,} of {self.site.n_parts:,} {self.site.noun} of {self.site!r})"


def positioned(site: Site) -> PositionedGraph:
    """The site, checked to have positions.

    Raises:
        ValueError: it has none.
    """
    if not isinstance(site, PositionedGraph):
        raise ValueError(
            f'expected circuit edges by position, as scored with positions="tokens"; got '
            f"{site.noun}"
        )
    return site


def reaches_logits(
    graph: CircuitGraph, mask: Bool[Tensor, "source destination"], column: int
) -> bool:
    """Whether a read at this column can reach the logits: a node that it feeds keeps an edge."""
    group = next((group for group in graph.groups if column < group.columns.stop), None)
    if group is None:
        return True  # the logits themselves
    nodes = np.logical_or.reduce(mask[group.rows].numpy(), axis=1)
    read = group.read_for(nodes[None], np.ones((1, 1), dtype=bool))
    return bool(read[0, column - group.columns.start])
