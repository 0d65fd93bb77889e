"""The graph of a circuit's paths from the input to the logits, and the influence of each path.

1. Links. A circuit edge becomes a link to each node that reads it: to one node, or, with grouped
   queries, to every head of the group that is in the circuit. With positions, each node has its
   own position, and the keys and values that a head reads are a separate node, ``a1.h0<kv>@3``. A
   circuit does not say which query attends to which key, so *crossing* links lead from that node
   to the same head at every position that may attend to it. Their weight is the sum of those of
   the links into that node.
2. Influence. The share of a link is its ``|score|`` divided by the sum over all links on a path
   into the same node; without scores, all links weigh 1. The influence of a path is the product of
   its shares; over all paths it adds up to 1. The influence of a link is the sum over the paths
   through it: ``share(link) * influence(reader)``.
3. Order. Edges are added in order of decreasing influence (or ``|score|``), each with the most
   influential path through it, so that the edges added so far always form whole paths.

Reference: the normalised graph and its pruning in Ameisen et al., Circuit Tracing (2025), without
error nodes: the components of a model leave no error.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sparse_tl.circuits.circuit import Circuit, Scores
from sparse_tl.graph import Node, PositionedGraph

CROSSING = "attention"
"""The slot of a crossing link."""


@dataclass(frozen=True)
class PositionedNode:
    """A component, or with `keys` the keys and values that a head reads, at a position.

    `position` is an index, ``None`` without positions, and `at` the name of the position.
    """

    component: Node
    position: int | None = None
    keys: bool = False
    at: str = ""

    def __str__(self) -> str:
        name = f"{self.component}<kv>" if self.keys else str(self.component)
        return name if self.position is None else f"{name}@{self.at}"

    @property
    def kind(self) -> str:
        return "keys" if self.keys else self.component.kind

    @property
    def step(self) -> int:
        """Rank in the order of computation; every link leads to a higher step."""
        if self.component.kind == "input":
            return 0
        if self.component.kind == "logits":
            return 1 << 30
        return 1 + 3 * self.component.layer + (2 if self.component.kind == "mlp" else not self.keys)


_LinkOfNodes = tuple[PositionedNode, PositionedNode, str | None, int, float]
"""The fields of a `Link`, with its nodes in place of their indices."""


@dataclass(frozen=True)
class Link:
    """A link between two nodes of a `PathGraph`, given by index.

    `slot` is the input of a head that the link enters, or `CROSSING`; `edge` the index of the
    circuit edge, -1 for a crossing; `weight` ``|score|``, or 1 without scores.
    """

    source: int
    reader: int
    slot: str | None
    edge: int
    weight: float


@dataclass(frozen=True)
class PathGraph:
    """The nodes of a circuit in order of computation, its links, the names and scores of its edges,
    and the influence of its paths."""

    nodes: tuple[PositionedNode, ...]
    links: tuple[Link, ...]
    names: tuple[str, ...]
    scores: tuple[float, ...] | None

    @cached_property
    def on_path(self) -> frozenset[int]:
        """The links on a path from an input to the logits."""
        return connected(self.links, range(len(self.links)), self.ends)

    @cached_property
    def ends(self) -> tuple[frozenset[int], frozenset[int]]:
        """The nodes where paths start (inputs) and end (logits)."""
        inputs = frozenset(i for i, node in enumerate(self.nodes) if node.kind == "input")
        logits = frozenset(i for i, node in enumerate(self.nodes) if node.kind == "logits")
        return inputs, logits

    @cached_property
    def shares(self) -> dict[int, float]:
        """The share of each link on a path in the weight of all such links into its reader."""
        read = defaultdict[int, dict[int, float]](dict)
        for i in sorted(self.on_path):
            read[self.links[i].reader][i] = self.links[i].weight
        return {i: share for weights in read.values() for i, share in _shares(weights).items()}

    @cached_property
    def influence(self) -> list[float]:
        """The influence of each link: 0 off all paths; over links into the logits it sums to 1."""
        of_nodes, of_links = [0.0] * len(self.nodes), [0.0] * len(self.links)
        read = dict.fromkeys(sorted(self.ends[1]), 0.0)
        for i in sorted(self.on_path):
            if self.links[i].reader in read:
                read[self.links[i].reader] += self.links[i].weight
        for node, share in _shares(read).items():
            of_nodes[node] = share
        for i in self._last_first:
            link = self.links[i]
            of_links[i] = self.shares[i] * of_nodes[link.reader]
            of_nodes[link.source] += of_links[i]
        return of_links

    @cached_property
    def best(self) -> tuple[dict[int, int], dict[int, int]]:
        """The links by which the most influential path enters and leaves each node."""
        inputs, logits = self.ends
        into, out = dict[int, int](), dict[int, int]()
        logs = {i: math.log(max(share, 1e-300)) for i, share in self.shares.items()}
        up, down = dict.fromkeys(inputs, 0.0), dict.fromkeys(logits, 0.0)
        for i in reversed(self._last_first):
            link = self.links[i]
            if up[link.source] + logs[i] > up.get(link.reader, -math.inf):
                up[link.reader], into[link.reader] = up[link.source] + logs[i], i
        for i in self._last_first:
            link = self.links[i]
            if down[link.reader] + logs[i] > down.get(link.source, -math.inf):
                down[link.source], out[link.source] = down[link.reader] + logs[i], i
        return into, out

    def path(self, link: int) -> list[int]:
        """The links of the most influential path through a link."""
        into, out = self.best
        path = [link]
        while (node := self.links[path[0]].source) in into:
            path.insert(0, into[node])
        while (node := self.links[path[-1]].reader) in out:
            path.append(out[node])
        return path

    def order(self, by: Sequence[float]) -> tuple[list[int], list[int]]:
        """The order in which edges are added, and the number of edges after each whole path.

        Links with a large value `by` come first, and edges on no path last.
        """
        ranked = sorted(self.on_path, key=lambda i: (-by[i], i))
        added, sizes = dict[int, None](), list[int]()
        for i in ranked:
            edge = self.links[i].edge
            if edge >= 0 and edge not in added:
                path = (self.links[j].edge for j in self.path(i))
                added |= dict.fromkeys(edge for edge in path if edge >= 0)
                sizes.append(len(added))
        others = [i for i in range(len(self.names)) if i not in added]
        if self.scores is not None:
            others.sort(key=lambda i: -abs(self.scores[i]))  # type: ignore[index]
        sizes += range(len(added) + 1, len(self.names) + 1)
        return [*added, *others], sizes

    @cached_property
    def _last_first(self) -> list[int]:
        """The links on a path, those into later nodes first."""
        return sorted(self.on_path, key=lambda i: (-self.links[i].reader, i))


def _shares(weights: Mapping[int, float]) -> dict[int, float]:
    """Weights divided by their sum; equal shares if all are 0."""
    total = sum(weights.values())
    return {i: weight / total if total else 1 / len(weights) for i, weight in weights.items()}


def in_order(nodes: Iterable[PositionedNode]) -> list[PositionedNode]:
    """Nodes in order of computation."""
    return sorted(nodes, key=lambda node: (node.step, node.position or 0, node.component.head))


def connected(
    links: Sequence[Link], chosen: Iterable[int], ends: tuple[frozenset[int], frozenset[int]]
) -> frozenset[int]:
    """The chosen links that are on a path of chosen links from an input to the logits."""
    ordered = sorted(chosen, key=lambda i: (links[i].source, links[i].reader))
    from_input, to_logits = set(ends[0]), set(ends[1])
    for i in ordered:
        if links[i].source in from_input:
            from_input.add(links[i].reader)
    for i in reversed(ordered):
        if links[i].reader in to_logits:
            to_logits.add(links[i].source)
    return frozenset(
        i for i in ordered if links[i].source in from_input and links[i].reader in to_logits
    )


def path_graph(circuit: Circuit, scores: Scores | None) -> PathGraph:
    """The nodes and links of a circuit of circuit edges, with or without positions."""
    grid = circuit.grid
    graph = grid.graph if isinstance(grid, PositionedGraph) else circuit.graph
    places = circuit.mask.cpu().nonzero()
    names = tuple(grid.names(places)) if len(places) else ()
    values = None
    if scores is not None:
        values = tuple(scores.mean().detach().double().cpu()[tuple(places.T)].tolist())
    positions = grid.positions if isinstance(grid, PositionedGraph) else None
    indices = [(None, *place) if positions is None else place for place in places.tolist()]
    in_circuit = {graph.sources[row] for _, row, _ in indices}
    in_circuit |= {graph.destinations[column].node for _, _, column in indices}
    links = list[_LinkOfNodes]()

    def at_position(node: Node, p: int | None, keys: bool = False) -> PositionedNode:
        name = "" if positions is None or p is None else positions[p]
        return PositionedNode(node, p, keys, name)

    for edge, (p, row, column) in enumerate(indices):
        destination = graph.destinations[column]
        group = graph.readers_of(destination)
        readers = [node for node in group if node in in_circuit] or group
        weight = 1.0 if values is None else abs(values[edge])
        keys = positions is not None and destination.slot in ("k", "v")
        source = at_position(graph.sources[row], p)
        for node in readers:
            links.append((source, at_position(node, p, keys), destination.slot, edge, weight))
    if isinstance(grid, PositionedGraph):
        links += _crossings(links, grid)
    distinct = {end for source, reader, *_ in links for end in (source, reader)}
    if positions is None or not links:
        p = None if positions is None else 0
        distinct |= {at_position(Node(kind), p) for kind in ("input", "logits")}
    nodes = in_order(distinct)
    index = {node: i for i, node in enumerate(nodes)}
    by_index = (Link(index[a], index[b], slot, edge, weight) for a, b, slot, edge, weight in links)
    return PathGraph(tuple(nodes), tuple(by_index), names, values)


def _crossings(links: Sequence[_LinkOfNodes], grid: PositionedGraph) -> list[_LinkOfNodes]:
    """Links from a head's keys and values to the head at every position that may attend there."""
    read = defaultdict[PositionedNode, float](float)
    heads = defaultdict[Node, dict[PositionedNode, None]](dict)
    for source, reader, _, _, weight in links:
        if reader.keys:
            read[reader] += weight
        for end in (source, reader):
            if end.kind == "head":
                heads[end.component][end] = None
    return [
        (keys, head, CROSSING, -1, weight)
        for keys, weight in read.items()
        for head in heads[keys.component]
        if bool(grid.follows[head.position, keys.position])
    ]
