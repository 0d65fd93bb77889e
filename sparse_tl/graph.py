"""The parts of a model: their names, grids of them, and the circuit edges between them.

A *source* is a node that writes to the residual stream, a *destination* is an input that reads from
it: a head reads three times (slots q, k and v), an MLP and the logits once. A circuit edge connects
a source to a later destination. Under grouped-query attention the k and v inputs belong to a
key-value head, written ``a3.kv1``.

Scores and circuits are arrays over a grid of parts: heads ``[layer, head]``, attention edges
``[layer, head, query, key]``, or circuit edges ``[source, destination]``, both in topological
order, with the position in front if each position has its own. Nothing here knows a model.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, checked, did_you_mean

Kind = Literal["input", "head", "kv_head", "mlp", "logits"]
Slot = Literal["q", "k", "v"]

_NAME = re.compile(r"(input|logits)|m(\d+)|a(\d+)\.(h|kv)(\d+)")
_ATTENTION_EDGE = re.compile(r"a(\d+)\.h(\d+):(\d+)->(\d+)")


class _Named:
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"


@dataclass(frozen=True, repr=False)
class Node(_Named):
    """A part of the model: ``input``, ``a3.h2``, ``m3`` or ``logits``.

    Args:
        kind: kind of node; a "kv_head" only reads, on behalf of the heads of its group.
        layer: layer of a head or MLP.
        head: index of a head within its layer.
    """

    kind: Kind
    layer: int = 0
    head: int = 0

    def __str__(self) -> str:
        if self.kind == "mlp":
            return f"m{self.layer}"
        if self.kind in ("head", "kv_head"):
            return f"a{self.layer}.{'h' if self.kind == 'head' else 'kv'}{self.head}"
        return self.kind

    @staticmethod
    def parse(name: str) -> Node:
        """Parse the name of a node."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f'{name!r} is no node such as "input", "a3.h2", "a3.kv1" or "m3"')
        plain, mlp, layer, kind, head = match.groups()
        if plain:
            return Node("input" if plain == "input" else "logits")
        if mlp:
            return Node("mlp", int(mlp))
        return Node("head" if kind == "h" else "kv_head", int(layer), int(head))


@dataclass(frozen=True, repr=False)
class Destination(_Named):
    """An input that reads from the residual stream: ``a3.h2<q>``, ``m3``, ``logits``."""

    node: Node
    slot: Slot | None = None

    def __str__(self) -> str:
        return str(self.node) if self.slot is None else f"{self.node}<{self.slot}>"


@dataclass(frozen=True, repr=False)
class CircuitEdge(_Named):
    """A circuit edge: ``a0.h1->a3.h2<q>``."""

    source: Node
    destination: Destination

    def __str__(self) -> str:
        return f"{self.source}->{self.destination}"


class PartGrid(ABC):
    """Parts that can be scored and kept individually."""

    noun: ClassVar[str]
    """Name of the parts, in the plural."""

    @cached_property
    @abstractmethod
    def exists(self) -> Bool[Tensor, "*axes"]:
        """Which indices of the array hold a part."""

    def index(self, part: Any) -> tuple[int, ...]:
        """The index of a part, from its name or index.

        Raises:
            ValueError: the part does not exist.
        """
        index = tuple(part) if isinstance(part, tuple | list) else self._named(part)
        shape = self.exists.shape
        fits = len(index) == len(shape) and all(
            0 <= i < n for i, n in zip(index, shape, strict=True)
        )
        if not fits or not self.exists[index]:
            raise ValueError(f"{self!r} has no {part} among its {self.noun}")
        return index

    @abstractmethod
    def _named(self, part: Any) -> tuple[int, ...]:
        """The index that a name stands for."""

    @abstractmethod
    def columns(self, places: Int[Tensor, "part axis"]) -> dict[str, Any]:
        """Table columns of the parts at these indices; the first column holds their names."""

    def names(self, places: Int[Tensor, "part axis"]) -> list[str]:
        return list(next(iter(self.columns(places).values())))

    def layer(self, index: Sequence[int]) -> int:
        """The first layer affected by a part; the number of layers for the logits."""
        return index[0]

    @cached_property
    def n_parts(self) -> int:
        return int(self.exists.sum())

    @cached_property
    def places(self) -> Int[Tensor, "part axis"]:
        """The indices of all parts, in row-major order: the order of ``values[grid.exists]``."""
        return self.exists.nonzero()


@dataclass(frozen=True)
class HeadGrid(PartGrid):
    """All heads of a model, named ``a3.h2``."""

    n_layers: int
    n_heads: int
    noun = "heads"

    @cached_property
    def exists(self) -> Bool[Tensor, "layer head"]:
        return torch.ones(self.n_layers, self.n_heads, dtype=torch.bool)

    def _named(self, part: Node | str) -> tuple[int, ...]:
        node = Node.parse(part) if isinstance(part, str) else part
        return (node.layer, node.head) if node.kind == "head" else ()

    def columns(self, places: Int[Tensor, "part axis"]) -> dict[str, Any]:
        return {"head": [f"a{layer}.h{head}" for layer, head in places.tolist()]}

    def __repr__(self) -> str:
        return f"HeadGrid({self.n_layers} layers x {self.n_heads} heads)"


@dataclass(frozen=True)
class AttentionGrid(PartGrid):
    """All attention edges of prompts of one length, named ``a3.h2:5->8`` (key to query).

    Args:
        n_layers: number of layers.
        n_heads: heads per layer.
        n_positions: prompt length.
        causal: whether attention is causal.
        allowed: pairs that the model's masks allow; None means all causal pairs, or all pairs if
            attention is not causal.
    """

    n_layers: int
    n_heads: int
    n_positions: int
    causal: bool = True
    allowed: Bool[Tensor, "layer query key"] | None = field(default=None, compare=False)
    noun = "attention edges"

    @cached_property
    def exists(self) -> Bool[Tensor, "layer head query key"]:
        """Pairs of a query and a key that it can attend to."""
        if self.allowed is not None:
            return self.allowed[:, None].expand(-1, self.n_heads, -1, -1)
        pairs = torch.ones(self.n_positions, self.n_positions, dtype=torch.bool)
        pairs = pairs.tril() if self.causal else pairs
        return pairs.expand(self.n_layers, self.n_heads, -1, -1)

    def _named(self, part: str) -> tuple[int, ...]:
        return self.parse(part)

    @staticmethod
    def parse(name: str) -> tuple[int, int, int, int]:
        """Layer, head, query and key of an attention edge, from its name."""
        match = _ATTENTION_EDGE.fullmatch(name)
        if match is None:
            raise ValueError(
                f'{name!r} is no attention edge, from key to query, such as "a3.h2:5->8"'
            )
        layer, head, key, query = map(int, match.groups())
        return layer, head, query, key

    def columns(self, places: Int[Tensor, "part axis"]) -> dict[str, Any]:
        """The edges' names, and their layer, head, query and key."""
        layer, head, query, key = (column.tolist() for column in places.T)
        named = zip(layer, head, key, query, strict=True)
        names = [f"a{layer}.h{head}:{key}->{query}" for layer, head, key, query in named]
        return {"edge": names, "layer": layer, "head": head, "query": query, "key": key}

    def __repr__(self) -> str:
        return (
            f"AttentionGrid({self.n_layers} layers x {self.n_heads} heads, {self.n_positions} "
            f"positions{'' if self.causal else ', bidirectional'})"
        )


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
        return self._place(str(node), self._rows, "source")

    def destination_index(self, destination: Destination | str) -> int:
        """The column of a destination."""
        name = str(destination)
        head = re.fullmatch(r"((a\d+)\.h(\d+))(<[kv]>)", name)
        if head and name not in self._columns and f"{head[1]}<q>" in self._columns:
            group = int(head[3]) * self.n_kv_heads // self.n_heads
            raise ValueError(
                f"heads of {self!r} share keys and values: {head[1]} reads "
                f"{head[2]}.kv{group}{head[4]}"
            )
        return self._place(name, self._columns, "destination")

    def _place(self, name: str, places: dict[str, int], kind: str) -> int:
        if name not in places:
            raise ValueError(f"{self!r} has no {name} as a {kind}.{did_you_mean(name, places)}")
        return places[name]

    def _named(self, part: CircuitEdge | str) -> tuple[int, ...]:
        source, arrow, destination = str(part).partition("->")
        if not arrow:
            raise ValueError(f'{part!r} is no edge such as "a0.h1->a3.h2<q>"')
        index = self.source_index(source), self.destination_index(destination)
        if not self.exists[index]:
            raise ValueError(f"{part} is no edge of {self!r}: {source} is too late for it")
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
    def n_reads(self) -> int:
        """Number of destinations of a layer: the q, k and v inputs of its heads, and its MLP."""
        return self.n_heads + 2 * self.n_kv_heads + self.has_mlps

    @cached_property
    def feeds(self) -> Bool[Tensor, "destination source"]:
        """Which sources' outputs depend on a destination; none on the logits."""
        found = torch.zeros(len(self.destinations), len(self.sources), dtype=torch.bool)
        for column, destination in enumerate(self.destinations[:-1]):
            rows = [self.source_index(node) for node in self.readers_of(destination)]
            if self.coupled and destination.slot is not None:
                first = self.source_index(Node("head", destination.node.layer))
                rows = [*range(first, first + self.n_heads)]
            found[column, rows] = True
        return found

    @cached_property
    def attended(self) -> Bool[Tensor, " destination"]:
        """Which destinations are keys or values, which heads also read at later positions."""
        return torch.tensor([destination.slot in ("k", "v") for destination in self.destinations])

    def reaches_logits(self, mask: Bool[Tensor, "source destination"], column: int) -> bool:
        """Whether a destination leads to the logits: what it feeds keeps an outgoing edge."""
        return column == len(self.destinations) - 1 or bool(mask[self.feeds[column]].any())

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


@dataclass(frozen=True)
class PositionedGraph(PartGrid):
    """The circuit edges of a model at each position, named ``a0.h1->m1@3`` or ``a0.h1->m1@END``.

    Arrays are indexed ``[position, source, destination]``. The source and the destination of an
    edge have the same position; only heads carry information to later positions, from their keys
    and values to their query.

    Args:
        graph: circuit edges of the model.
        positions: columns of tokens, starting with "0", or names of spans.
    """

    graph: CircuitGraph
    positions: tuple[str, ...]
    noun = "circuit edges by position"

    @cached_property
    def exists(self) -> Bool[Tensor, "position source destination"]:
        """Which pairs are edges: the same at every position."""
        return self.graph.exists.expand(len(self.positions), -1, -1)

    @property
    def of_tokens(self) -> bool:
        """Whether positions are tokens, not named spans."""
        return self.positions == tuple(map(str, range(len(self.positions))))

    @cached_property
    def follows(self) -> Bool[Tensor, "later earlier"]:
        """Whether a query at one position may read a key at the other; for spans, always true."""
        n = len(self.positions)
        every = torch.ones(n, n, dtype=torch.bool)
        return every.tril() if self.of_tokens else every

    def position(self, name: str | int) -> int:
        """The index of a position."""
        if str(name) not in self.positions:
            raise ValueError(f"there is no position {name!r}, only {self.positions}")
        return self.positions.index(str(name))

    def _named(self, part: str) -> tuple[int, ...]:
        edge, at, position = part.partition("@")
        if not at:
            raise ValueError(f"{part!r} names no position: add one, such as @{self.positions[-1]}")
        return self.position(position), *self.graph.index(edge)

    def layer(self, index: Sequence[int]) -> int:
        """The layer in which an edge ends; the number of layers for the logits."""
        return self.graph.layer(index[1:])

    def columns(self, places: Int[Tensor, "part axis"]) -> dict[str, Any]:
        """The columns of `CircuitGraph`, and the positions."""
        columns = self.graph.columns(places[:, 1:])
        at = np.array(self.positions, dtype=object)[places[:, 0].numpy()]
        return {**columns, "edge": columns["edge"] + "@" + at, "position": at}

    def __repr__(self) -> str:
        kind = "positions" if self.of_tokens else f"spans {', '.join(self.positions)}"
        many = f"{len(self.positions)} " if self.of_tokens else ""
        return f"PositionedGraph({many}{kind} of {self.graph!r})"
