"""What a component diagram draws: the strongest kept edges of a circuit, and what is on a path.

1. Rank the kept edges by ``|score|``, the largest first; ties stay in the graph's order.
2. Draw the first of them. The *strength* of an edge is ``|score| / max |score|`` over the kept
   edges of its panel, and 1 where there are no scores.
3. An edge joins its source to every node that reads there: one, or under grouped-query attention
   those heads of the group that take part in the drawn circuit.
4. An edge is *on a path* if its source can be reached from the input, and the logits can be
   reached from its end, over drawn edges. A head passes on what any of its three slots reads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from sparse_tl.circuits import Circuit, Scores
from sparse_tl.graph import CircuitGraph
from sparse_tl.nodes import CircuitEdge, Node, Slot

INPUT, LOGITS = Node("input"), Node("logits")


@dataclass(frozen=True)
class DrawnEdge:
    """One kept edge.

    Args:
        edge: what it joins.
        readers: the nodes where its line ends; several under grouped-query attention.
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
class DrawnCircuit:
    """The drawn edges of one panel.

    Args:
        name: of the panel.
        edges: the strongest first.
        on_path: for each edge, whether it is on a path from the input to the logits.
        nodes_on_path: the ends of those edges.
        n_kept: edges of the circuit, drawn or not.
        n_existing: edges of the model.
    """

    name: str
    edges: tuple[DrawnEdge, ...]
    on_path: tuple[bool, ...]
    nodes_on_path: frozenset[Node]
    n_kept: int
    n_existing: int

    @cached_property
    def nodes(self) -> frozenset[Node]:
        """The ends of all drawn edges."""
        return frozenset(node for edge in self.edges for node in (edge.source, *edge.readers))

    @cached_property
    def entering(self) -> dict[tuple[Node, Slot | None], list[bool]]:
        """The lines that enter each slot of each node: which are on a path."""
        lines: dict[tuple[Node, Slot | None], list[bool]] = defaultdict(list)
        for edge in self.edges:
            for reader in edge.readers:
                lines[reader, edge.slot].append(self.line_on_path(edge, reader))
        return dict(lines)

    def line_on_path(self, edge: DrawnEdge, reader: Node) -> bool:
        """Whether this line of an edge is on a path; under grouped-query attention some may be."""
        return edge.source in self.nodes_on_path and reader in self.nodes_on_path

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
    on_path, nodes = edges_on_path(edges)
    return DrawnCircuit(name, edges, on_path, nodes, len(kept), graph.n_edges)


def _readers(graph: CircuitGraph, edge: CircuitEdge, taking_part: set[Node]) -> tuple[Node, ...]:
    readers = graph.readers_of(edge.destination)
    # A group of which no head takes part still shows where the edge goes.
    return tuple(node for node in readers if node in taking_part) or tuple(readers)


def edges_on_path(edges: Sequence[DrawnEdge]) -> tuple[tuple[bool, ...], frozenset[Node]]:
    """Which edges are on a path from the input to the logits, and the nodes on such paths."""
    downstream = _closure(INPUT, ((edge.source, edge.readers) for edge in edges))
    upstream = _closure(
        LOGITS, ((reader, (edge.source,)) for edge in edges for reader in edge.readers)
    )
    nodes = downstream & upstream
    on_path = tuple(
        edge.source in nodes and any(reader in nodes for reader in edge.readers) for edge in edges
    )
    return on_path, frozenset(nodes if any(on_path) else ())


def _closure(start: Node, steps: Iterable[tuple[Node, Iterable[Node]]]) -> set[Node]:
    """All nodes that can be reached from one, itself included."""
    following: dict[Node, list[Node]] = {}
    for node, ends in steps:
        following.setdefault(node, []).extend(ends)
    reached, waiting = {start}, [start]
    while waiting:
        new = [node for node in following.get(waiting.pop(), ()) if node not in reached]
        reached.update(new)
        waiting.extend(new)
    return reached
