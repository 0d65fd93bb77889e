"""The computational graph of a model: nodes, slots and circuit edges, independent of any model.

A *source* is a node that writes to the residual stream, a *destination* is an input that reads from
it: a head reads three times (slots q, k and v), an MLP and the logits once. A circuit edge connects
a source to a later destination. Under grouped-query attention the k and v inputs belong to a
key-value head, written ``a3.kv1``.

Arrays over edges are indexed ``[source, destination]``, both in topological order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sparse_tl.calls.arguments import AtLeastOne, checked
from sparse_tl.graph.grids import HeadGrid, PartGrid
from sparse_tl.graph.nodes import CircuitEdge, Destination, Kind, Node

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["CircuitEdge", "CircuitGraph", "Destination", "Node"]


@dataclass(frozen=True)
class NodeGroup:
    """The heads, or the MLP (without key-value heads), of one layer: nodes with no edges between.

    `rows` are those of the nodes as sources, `columns` those of their inputs as destinations.
    """

    rows: slice
    columns: slice
    n_kv_heads: int
    coupled: bool

    def written_from(
        self,
        inputs: Bool[np.ndarray, "position column"],
        follows: Bool[np.ndarray, "later earlier"],
    ) -> Bool[np.ndarray, "position row"]:
        """Which outputs depend on any of these inputs; see `PositionedGraph.follows`."""
        if not self.n_kv_heads:
            return inputs
        n_heads = self.rows.stop - self.rows.start
        q, k, v = np.split(inputs, [n_heads, n_heads + self.n_kv_heads], axis=1)
        nodes = q | np.repeat(follows @ (k | v), n_heads // self.n_kv_heads, axis=1)
        return nodes | nodes.any(axis=1, keepdims=True) if self.coupled else nodes

    def read_for(
        self, nodes: Bool[np.ndarray, "position row"], follows: Bool[np.ndarray, "later earlier"]
    ) -> Bool[np.ndarray, "position column"]:
        """Which inputs affect the output of any of these nodes."""
        if not self.n_kv_heads:
            return nodes
        heads = nodes | nodes.any(axis=1, keepdims=True) if self.coupled else nodes
        shared = follows.T @ heads.reshape(len(heads), self.n_kv_heads, -1).any(axis=2)
        return np.concatenate([heads, shared, shared], axis=1)


@checked
@dataclass(frozen=True)
class CircuitGraph(PartGrid):
    """All nodes and circuit edges of a model.

    GPT-2 small (12 layers, 12 heads, sequential) has 158 nodes and 32,491 edges.

    Args:
        n_layers: number of layers.
        n_heads: query heads per layer.
        n_kv_heads: key-value heads per layer; `n_heads` without grouped queries.
        has_mlps: false for attention-only models.
        parallel: whether an MLP reads the same input as its layer's heads, not their output.
        coupled: whether the summed head output of a layer is normalised (Gemma 2, OLMo-2), so that
            each head affects the others' outputs.

    Raises:
        ValueError: the sizes are inconsistent.
    """

    n_layers: AtLeastOne
    n_heads: AtLeastOne
    n_kv_heads: AtLeastOne
    has_mlps: bool = True
    parallel: bool = False
    coupled: bool = False
    noun = "circuit edges"

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"{self.n_heads} heads cannot share {self.n_kv_heads} key-value heads evenly"
            )

    @cached_property
    def sources(self) -> tuple[Node, ...]:
        """Nodes that write, in topological order."""
        nodes = [Node("input")]
        for layer in range(self.n_layers):
            nodes += [Node("head", layer, head) for head in range(self.n_heads)]
            nodes += [Node("mlp", layer)] * self.has_mlps
        return tuple(nodes)

    @cached_property
    def destinations(self) -> tuple[Destination, ...]:
        """Inputs that read, in topological order: each layer's q, k and v inputs, then its MLP."""
        inputs: list[Destination] = []
        kind: Kind = "head" if self.n_kv_heads == self.n_heads else "kv_head"
        for layer in range(self.n_layers):
            inputs += [Destination(Node("head", layer, h), "q") for h in range(self.n_heads)]
            for slot in ("k", "v"):
                inputs += [Destination(Node(kind, layer, h), slot) for h in range(self.n_kv_heads)]
            inputs += [Destination(Node("mlp", layer))] * self.has_mlps
        return (*inputs, Destination(Node("logits")))

    @property
    def heads(self) -> HeadGrid:
        """The grid of the model's heads, for scores and circuits of heads."""
        return HeadGrid(self.n_layers, self.n_heads)

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The sources and the logits."""
        return (*self.sources, Node("logits"))

    @cached_property
    def exists(self) -> Bool[Tensor, "source destination"]:
        """Which pairs are edges."""
        before = torch.tensor([self.n_sources_before(d.node) for d in self.destinations])
        return torch.arange(len(self.sources))[:, None] < before

    @property
    def n_edges(self) -> int:
        return self.n_parts

    @cached_property
    def edges(self) -> tuple[CircuitEdge, ...]:
        """All edges, in row-major order of `exists`: the order of ``scores[graph.exists]``."""
        return self.edges_of(self.exists)

    def edges_of(self, mask: Bool[Tensor, "source destination"]) -> tuple[CircuitEdge, ...]:
        """The edges where a mask is true, in row-major order."""
        return tuple(
            CircuitEdge(self.sources[source], self.destinations[destination])
            for source, destination in mask.nonzero().tolist()
        )

    def n_sources_before(self, node: Node) -> int:
        """Number of sources that write before this node reads; they come first."""
        if node.kind == "input":
            return 0
        if node.kind == "logits":
            return len(self.sources)
        before = 1 + node.layer * (self.n_heads + self.has_mlps)
        return before + (self.n_heads if node.kind == "mlp" and not self.parallel else 0)

    def source_index(self, node: Node | str) -> int:
        """The row of a source."""
        if str(node) not in self._rows:
            raise ValueError(f"{self!r} has no {node} as a source")
        return self._rows[str(node)]

    def destination_index(self, destination: Destination | str) -> int:
        """The column of a destination."""
        if str(destination) not in self._columns:
            raise ValueError(f"{self!r} has no {destination} as a destination")
        return self._columns[str(destination)]

    def index(self, part: CircuitEdge | str | tuple[int, ...]) -> tuple[int, ...]:
        """Row and column of an edge."""
        if isinstance(part, tuple | list):
            return self._checked(part, part)
        edge = CircuitEdge.parse(part) if isinstance(part, str) else part
        index = self.source_index(edge.source), self.destination_index(edge.destination)
        if not self.exists[index]:
            raise ValueError(f"{edge} is no edge of {self!r}: {edge.source} is too late for it")
        return index

    def layer(self, index: Sequence[int]) -> int:
        """The layer in which an edge ends; the number of layers for the logits."""
        node = self.destinations[index[1]].node
        return self.n_layers if node.kind == "logits" else node.layer

    def readers_of(self, destination: Destination) -> list[Node]:
        """The nodes that read a destination: for a key-value head, all heads of the group."""
        if destination.node.kind != "kv_head":
            return [destination.node]
        size = self.n_heads // self.n_kv_heads
        first = destination.node.head * size
        return [Node("head", destination.node.layer, h) for h in range(first, first + size)]

    @cached_property
    def groups(self) -> tuple[NodeGroup, ...]:
        """The heads and the MLP of each layer, in topological order."""
        groups = list[NodeGroup]()
        row, column = 1, 0
        for _ in range(self.n_layers):
            shapes = [(self.n_heads, self.n_kv_heads)] + [(1, 0)] * self.has_mlps
            for n_nodes, n_kv in shapes:
                rows = slice(row, row + n_nodes)
                columns = slice(column, column + n_nodes + 2 * n_kv)
                groups.append(NodeGroup(rows, columns, n_kv, self.coupled and n_kv > 0))
                row, column = rows.stop, columns.stop
        return tuple(groups)

    def to_networkx(
        self, mask: Bool[Tensor, "source destination"] | None = None
    ) -> nx.MultiDiGraph:
        """A networkx graph: nodes with kind and layer, and one edge per slot, keyed by the slot.

        Args:
            mask: the edges to include; all of them by default.
        """
        import networkx as nx

        network = nx.MultiDiGraph()
        for node in self.nodes:
            network.add_node(str(node), kind=node.kind, layer=node.layer, head=node.head)
        for edge in self.edges if mask is None else self.edges_of(mask):
            for reader in self.readers_of(edge.destination):
                network.add_edge(str(edge.source), str(reader), key=edge.destination.slot or "")
        return network

    def columns(self, places: Int[Tensor, "part axis"]) -> dict[str, Any]:
        """Names, sources, destinations and slots of the edges at these indices."""
        rows, columns = places.numpy().T
        sources = np.array([str(node) for node in self.sources], dtype=object)[rows]
        named = [(str(to), str(to.node), to.slot or "") for to in self.destinations]
        readers, nodes, slots = np.array(named, dtype=object)[columns].T
        return {
            "edge": sources + "->" + readers,
            "source": sources,
            "destination": nodes,
            "slot": slots,
        }

    def __repr__(self) -> str:
        grouped = "" if self.n_kv_heads == self.n_heads else f" over {self.n_kv_heads} kv"
        kind = "attention only" if not self.has_mlps else "parallel" if self.parallel else ""
        sizes = f"{self.n_layers} layers x {self.n_heads} heads{grouped}"
        return (
            f"CircuitGraph({sizes}{', ' + kind if kind else ''}: {len(self.nodes)} nodes, "
            f"{self.n_edges:,} edges)"
        )

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {str(node): row for row, node in enumerate(self.sources)}

    @cached_property
    def _columns(self) -> dict[str, int]:
        return {str(destination): column for column, destination in enumerate(self.destinations)}
