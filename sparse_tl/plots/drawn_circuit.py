"""What a component diagram draws: the strongest kept edges of a circuit, and what is on a path.

1. Rank the kept edges by ``|score|``, the largest first; ties stay in the graph's order.
2. Draw the first of them. The *strength* of an edge is ``|score| / max |score|`` over the kept
   edges of its panel, and 1 where there are no scores.
3. An edge has a line to every node that reads there: one, or under grouped-query attention
   those heads of the group that take part in the drawn circuit.
4. A line is *on a path* if its source can be reached from the input, and the logits can be
   reached from its end, over drawn lines. A head passes on what any of its three slots reads.

The reader may draw fewer of the strongest edges. What is on a path with some of them stays on it
with more, so that one number says when: the fewest edges with which it is. It is the smallest,
over all paths, of the largest rank on the path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparse_tl.circuits import Circuit, Scores
from sparse_tl.graph import CircuitGraph
from sparse_tl.nodes import CircuitEdge, Node, Slot

INPUT, LOGITS = Node("input"), Node("logits")


@dataclass(frozen=True)
class DrawnEdge:
    """One kept edge.

    Args:
        edge: what it joins.
        readers: the nodes where its lines end; several under grouped-query attention.
        score: in units of the metric; ``None`` without scores.
        strength: 0..1, relative to the strongest kept edge.
    """

    edge: CircuitEdge
    readers: tuple[Node, ...]
    score: float | None
    strength: float

    @property
    def source(self) -> Node:
        return self.edge.source

    @property
    def slot(self) -> Slot | None:
        return self.edge.destination.slot


@dataclass(frozen=True)
class Seen:
    """The fewest of the strongest edges with which something is drawn, and on a path.

    Args:
        drawn: from which number of edges on; infinite where it never is.
        on_path: likewise.
    """

    drawn: float = math.inf
    on_path: float = math.inf

    def or_with(self, other: Seen) -> Seen:
        """The same of what is seen where either of two things is."""
        return Seen(min(self.drawn, other.drawn), min(self.on_path, other.on_path))


@dataclass(frozen=True)
class DrawnCircuit:
    """The drawn edges of one panel.

    Args:
        name: of the panel.
        edges: the strongest first.
        lines: when each line, by the rank of its edge and by its reader, is seen.
        nodes: when each end of a line is seen.
        n_kept: edges of the circuit, drawn or not.
        n_existing: edges of the model.
    """

    name: str
    edges: tuple[DrawnEdge, ...]
    lines: dict[tuple[int, Node], Seen]
    nodes: dict[Node, Seen]
    n_kept: int
    n_existing: int

    @property
    def n_on_path(self) -> int:
        """Edges of which a line is on a path."""
        return len({rank for (rank, _), seen in self.lines.items() if seen.on_path < math.inf})

    @property
    def has_scores(self) -> bool:
        return any(edge.score is not None for edge in self.edges)


def draw_strongest(
    name: str, circuit: Circuit, edge_scores: Scores | None, max_circuit_edges: int
) -> DrawnCircuit:
    """The strongest edges of a circuit, at most so many.

    Args:
        name: of the panel.
        circuit: of circuit edges.
        edge_scores: signed; negative: patching the edge lowers the metric, so it helps. ``None``:
            no edge has a score, as in circuits found by search.
        max_circuit_edges: how many are drawn at most.
    """
    graph = circuit.graph
    mask = circuit.mask.cpu()
    kept = graph.edges_of(mask)
    scores = None if edge_scores is None else edge_scores.values.detach().double().cpu()[mask]
    ranked = range(len(kept))
    if scores is not None:
        ranked = scores.abs().argsort(descending=True, stable=True).tolist()
    chosen = [(kept[index], None if scores is None else scores[index].item()) for index in ranked]
    chosen = chosen[:max_circuit_edges]
    largest = max((abs(score) for _, score in chosen if score is not None), default=0.0)
    taking_part = {edge.source for edge, _ in chosen}
    taking_part |= {edge.destination.node for edge, _ in chosen}
    edges = tuple(
        DrawnEdge(
            edge,
            _readers(graph, edge, taking_part),
            score,
            1.0 if score is None else abs(score) / largest if largest else 0.0,
        )
        for edge, score in chosen
    )
    return DrawnCircuit(name, edges, *_seen(edges), len(kept), graph.n_edges)


def _readers(graph: CircuitGraph, edge: CircuitEdge, taking_part: set[Node]) -> tuple[Node, ...]:
    readers = graph.readers_of(edge.destination)
    # A group of which no head takes part still shows where the edge goes.
    return tuple(node for node in readers if node in taking_part) or tuple(readers)


def _seen(
    edges: Sequence[DrawnEdge],
) -> tuple[dict[tuple[int, Node], Seen], dict[Node, Seen]]:
    """When each line and each of its ends is seen."""
    lines = [
        (edge.source, reader, rank) for rank, edge in enumerate(edges, 1) for reader in edge.readers
    ]
    # Every line is met after all the lines through which its nearer end is reached.
    above = _reached(INPUT, sorted(lines, key=lambda line: _height(line[0])))
    upside_down = [(reader, source, rank) for source, reader, rank in lines]
    below = _reached(LOGITS, sorted(upside_down, key=lambda line: -_height(line[0])))
    seen: dict[tuple[int, Node], Seen] = {}
    nodes: dict[Node, Seen] = {}
    for source, reader, rank in lines:
        on_path = max(rank, above.get(source, math.inf), below.get(reader, math.inf))
        seen[rank - 1, reader] = Seen(rank, on_path)
        for node in (source, reader):
            nodes[node] = nodes.get(node, Seen()).or_with(seen[rank - 1, reader])
    return seen, nodes


def _reached(start: Node, lines: Iterable[tuple[Node, Node, int]]) -> dict[Node, float]:
    """The fewest edges over which each node is reached from one."""
    fewest: dict[Node, float] = {start: 0}
    for near, far, rank in lines:
        if near in fewest:
            fewest[far] = min(fewest.get(far, math.inf), max(fewest[near], rank))
    return fewest


def _height(node: Node) -> float:
    """The order in which nodes write to the residual stream."""
    if node in (INPUT, LOGITS):
        return -1 if node == INPUT else math.inf
    return 2 * node.layer + (node.kind == "mlp")
