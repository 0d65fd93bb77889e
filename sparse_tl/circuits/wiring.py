"""The paths of a circuit: its nodes and lines, also across positions, and what each line carries.

1. Lines. A circuit edge is a line to every node that reads it: one, or under grouped queries those
   heads of the group that take part. With positions, every node stands at its position, and a head
   reads keys and values at a node of its own, ``a1.h0<kv>@3``. A circuit does not say which query
   attends to which key. So a *crossing* leads from there to the same head wherever it takes part,
   for tokens at the same or a later position; it carries what the keys and values read.
2. Influence. A line's share is its ``|score|`` over that of all lines on a path into its reader;
   without scores, all count alike. The product of the shares along a path from the input to the
   logits is the influence of the path: over all paths they add up to 1. The influence of a line is
   the sum over the paths through it: ``share(line) * influence(reader)``.
3. Order. Edges enter in order of decreasing influence (or ``|score|``), each with the most
   influential path through it. So what has entered after any path consists of whole paths.

Reference: the normalised graph and its pruning in Ameisen et al., Circuit Tracing (2025), without
the error nodes, which a circuit of all components does not have.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.scores import Scores
from sparse_tl.nodes import Node
from sparse_tl.positioned_graph import PositionedGraph

CROSSING = "attention"
"""The slot of a crossing."""


@dataclass(frozen=True)
class Spot:
    """A node, or the keys and values that a head reads, at a position.

    Args:
        node: the node.
        position: index of its position; ``None`` without positions.
        keys: whether these are a head's keys and values.
        at: name of the position.
    """

    node: Node
    position: int | None = None
    keys: bool = False
    at: str = ""

    def __str__(self) -> str:
        return f"{self.node}{'<kv>' * self.keys}" + ("" if self.position is None else f"@{self.at}")

    @property
    def kind(self) -> str:
        return "keys" if self.keys else self.node.kind

    @property
    def step(self) -> int:
        """The order in which spots compute; a line leads to a later step."""
        if self.node.kind == "input":
            return 0
        if self.node.kind == "logits":
            return 1 << 30
        return 1 + 3 * self.node.layer + (2 if self.node.kind == "mlp" else not self.keys)


@dataclass(frozen=True)
class Line:
    """A line between two spots, given by index.

    Args:
        source, reader: the ends.
        slot: input of a head that it enters, or `CROSSING`.
        edge: index of the circuit edge; -1 for a crossing.
        weight: ``|score|``, or 1 without scores.
    """

    source: int
    reader: int
    slot: str | None
    edge: int
    weight: float


@dataclass(frozen=True)
class Wiring:
    """The lines of a circuit.

    Args:
        spots: all ends of lines, in the order in which they compute.
        lines: the lines.
        names: names of the circuit edges.
        scores: their scores, or nothing.
    """

    spots: tuple[Spot, ...]
    lines: tuple[Line, ...]
    names: tuple[str, ...]
    scores: tuple[float, ...] | None

    @cached_property
    def on_path(self) -> frozenset[int]:
        """The lines on a path from an input to the logits."""
        return connected(self.lines, range(len(self.lines)), self.ends)

    @cached_property
    def ends(self) -> tuple[frozenset[int], frozenset[int]]:
        """The inputs, and the logits."""
        kinds = [spot.kind for spot in self.spots]
        found = ({i for i, kind in enumerate(kinds) if kind == end} for end in ("input", "logits"))
        first, last = map(frozenset, found)
        return first, last

    @cached_property
    def shares(self) -> dict[int, float]:
        """The share of each line on a path among those into its reader."""
        total = defaultdict[int, float](float)
        number = defaultdict[int, int](int)
        for i in self.on_path:
            total[self.lines[i].reader] += self.lines[i].weight
            number[self.lines[i].reader] += 1
        return {
            i: line.weight / total[line.reader] if total[line.reader] else 1 / number[line.reader]
            for i, line in enumerate(self.lines)
            if i in self.on_path
        }

    @cached_property
    def influence(self) -> list[float]:
        """The influence of each line, 0 to 1; 0 on no path. Those into the logits add up to 1."""
        _, last = self.ends
        reached = {
            spot: sum(self.lines[i].weight for i in self.on_path if self.lines[i].reader == spot)
            for spot in last
        }
        whole = sum(reached.values())
        at = [0.0] * len(self.spots)
        for spot, weight in reached.items():
            at[spot] = weight / whole if whole else 1 / len(reached)
        found = [0.0] * len(self.lines)
        for i in self._downwards:
            line = self.lines[i]
            found[i] = self.shares[i] * at[line.reader]
            at[line.source] += found[i]
        return found

    @cached_property
    def best(self) -> tuple[dict[int, int], dict[int, int]]:
        """The lines by which the most influential path enters and leaves each spot."""
        first, last = self.ends
        into, out = dict[int, int](), dict[int, int]()
        logs = {i: math.log(max(share, 1e-300)) for i, share in self.shares.items()}
        up, down = dict.fromkeys(first, 0.0), dict.fromkeys(last, 0.0)
        for i in reversed(self._downwards):
            line = self.lines[i]
            if up[line.source] + logs[i] > up.get(line.reader, -math.inf):
                up[line.reader], into[line.reader] = up[line.source] + logs[i], i
        for i in self._downwards:
            line = self.lines[i]
            if down[line.reader] + logs[i] > down.get(line.source, -math.inf):
                down[line.source], out[line.source] = down[line.reader] + logs[i], i
        return into, out

    def path(self, line: int) -> list[int]:
        """The lines of the most influential path through a line."""
        into, out = self.best
        found = [line]
        while (spot := self.lines[found[0]].source) in into:
            found.insert(0, into[spot])
        while (spot := self.lines[found[-1]].reader) in out:
            found.append(out[spot])
        return found

    def order(self, by: Sequence[float]) -> tuple[list[int], list[int]]:
        """Edges in the order in which they enter, and how many have after each whole path.

        Args:
            by: a value of each line, largest first; edges on no path come last.
        """
        rank = sorted(self.on_path, key=lambda i: (-by[i], i))
        entered, sizes = dict[int, None](), list[int]()
        for i in rank:
            edge = self.lines[i].edge
            if edge >= 0 and edge not in entered:
                path = (self.lines[j].edge for j in self.path(i))
                entered |= dict.fromkeys(edge for edge in path if edge >= 0)
                sizes.append(len(entered))
        rest = [i for i in range(len(self.names)) if i not in entered]
        if self.scores is not None:
            rest.sort(key=lambda i: -abs(self.scores[i]))  # type: ignore[index]
        sizes += range(len(entered) + 1, len(self.names) + 1)
        return [*entered, *rest], sizes

    @cached_property
    def _downwards(self) -> list[int]:
        """The lines on a path, those into later spots first."""
        return sorted(self.on_path, key=lambda i: (-self.lines[i].reader, i))


def in_order(spots: Iterable[Spot]) -> list[Spot]:
    """Spots in the order in which they compute."""
    return sorted(spots, key=lambda spot: (spot.step, spot.position or 0, spot.node.head))


def connected(
    lines: Sequence[Line], among: Iterable[int], ends: tuple[frozenset[int], frozenset[int]]
) -> frozenset[int]:
    """Which of some lines are on a path of such lines from an input to the logits."""
    chosen = sorted(among, key=lambda i: (lines[i].source, lines[i].reader))
    above, below = set(ends[0]), set(ends[1])
    for i in chosen:
        if lines[i].source in above:
            above.add(lines[i].reader)
    for i in reversed(chosen):
        if lines[i].reader in below:
            below.add(lines[i].source)
    return frozenset(i for i in chosen if lines[i].source in above and lines[i].reader in below)


def wire(circuit: Circuit, scores: Scores | None) -> Wiring:
    """The lines of a circuit of circuit edges, with or without positions."""
    site = circuit.site
    graph = site.graph if isinstance(site, PositionedGraph) else circuit.graph
    places = circuit.mask.cpu().nonzero()
    names = tuple(site.names(places)) if len(places) else ()
    values = None
    if scores is not None:
        values = tuple(scores.mean().detach().double().cpu()[tuple(places.T)].tolist())
    positions = site.positions if isinstance(site, PositionedGraph) else None
    ends = [(None, *place) if positions is None else place for place in places.tolist()]
    taking = {graph.sources[row] for _, row, _ in ends}
    taking |= {graph.destinations[column].node for _, _, column in ends}
    drawn = list[tuple[Spot, Spot, str | None, int, float]]()

    def spot(node: Node, p: int | None, keys: bool = False) -> Spot:
        return Spot(node, p, keys, "" if positions is None or p is None else positions[p])

    for edge, (p, row, column) in enumerate(ends):
        to = graph.destinations[column]
        group = graph.readers_of(to)
        readers = [node for node in group if node in taking] or group
        weight = 1.0 if values is None else abs(values[edge])
        for node in readers:
            keys = positions is not None and to.slot in ("k", "v")
            end = spot(node, p, keys)
            drawn.append((spot(graph.sources[row], p), end, to.slot, edge, weight))
    if isinstance(site, PositionedGraph):
        drawn += _crossings(drawn, site)
    if positions is None or not drawn:
        every = {spot(Node(kind), None if positions is None else 0) for kind in ("input", "logits")}
    else:
        every = set[Spot]()
    every |= {end for source, reader, *_ in drawn for end in (source, reader)}
    spots = in_order(every)
    index = {found: i for i, found in enumerate(spots)}
    lines = (Line(index[a], index[b], slot, edge, weight) for a, b, slot, edge, weight in drawn)
    return Wiring(tuple(spots), tuple(lines), names, values)


def _crossings(
    drawn: Sequence[tuple[Spot, Spot, str | None, int, float]], site: PositionedGraph
) -> list[tuple[Spot, Spot, str | None, int, float]]:
    """From a head's keys and values to the head, wherever one may follow the other."""
    carried = defaultdict[Spot, float](float)
    heads = defaultdict[Node, dict[Spot, None]](dict)
    for source, reader, _, _, weight in drawn:
        if reader.keys:
            carried[reader] += weight
        for end in (source, reader):
            if end.kind == "head":
                heads[end.node][end] = None
    follows = site.follows
    return [
        (keys, head, CROSSING, -1, weight)
        for keys, weight in carried.items()
        for head in heads[keys.node]
        if bool(follows[head.position, keys.position])
    ]
