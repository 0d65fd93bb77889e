"""Contents of a component diagram: the strongest kept edges, and which of them are on a path.

1. Rank the kept edges by decreasing ``|score|``; ties keep the graph's order.
2. Draw the first ones. The *strength* of an edge is ``|score| / max |score|`` over the kept edges
   of its panel, and 1 without scores.
3. An edge has a line to every node that reads from it: one node, or under grouped-query attention
   the heads of the group that appear in the drawn circuit.
4. A line is *on a path* if drawn lines lead from the input to its source and from its end to the
   logits. A head passes on what any of its three slots reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparse_tl.circuits import Circuit, Scores
from sparse_tl.nodes import CircuitEdge, Node, Slot

INPUT, LOGITS = Node("input"), Node("logits")

LineState = Literal["path", "open", "absent"]
"""On a path from the input to the logits; drawn but on no path; not drawn."""


@dataclass(frozen=True)
class Line:
    """A line from a source, at its lower end, to one of the nodes that read from it."""

    source: Node
    reader: Node
    slot: Slot | None


@dataclass(frozen=True)
class DrawnEdge:
    """One kept edge.

    Args:
        edge: the circuit edge.
        lines: lines that represent it; several under grouped-query attention.
        score: score in units of the metric; ``None`` without scores.
        strength: strength in 0..1, relative to the strongest kept edge.
    """

    edge: CircuitEdge
    lines: tuple[Line, ...]
    score: float | None
    strength: float


@dataclass(frozen=True)
class DrawnCircuit:
    """The drawn edges of one panel.

    Args:
        name: name of the panel.
        edges: edges in order of decreasing strength.
        on_path: lines on a path from the input to the logits.
        n_kept: number of edges in the circuit, drawn or not.
        n_existing: number of edges in the model.
    """

    name: str
    edges: tuple[DrawnEdge, ...]
    on_path: frozenset[Line]
    n_kept: int
    n_existing: int

    @property
    def lines(self) -> list[Line]:
        return [line for edge in self.edges for line in edge.lines]

    @property
    def n_on_path(self) -> int:
        """Number of edges with a line on a path."""
        return sum(self.state(edge.lines) == "path" for edge in self.edges)

    @property
    def has_scores(self) -> bool:
        return any(edge.score is not None for edge in self.edges)

    def state(self, lines: Sequence[Line]) -> LineState:
        """The state of something that these lines belong to."""
        if not lines:
            return "absent"
        return "open" if self.on_path.isdisjoint(lines) else "path"


def draw_strongest(
    name: str, circuit: Circuit, edge_scores: Scores | None, max_circuit_edges: int
) -> DrawnCircuit:
    """Select the strongest edges of a circuit.

    Args:
        name: name of the panel.
        circuit: circuit of circuit edges.
        edge_scores: signed scores; negative: patching the edge lowers the metric, so it helps.
            ``None`` if edges have no score, as in circuits found by search.
        max_circuit_edges: maximum number of edges to draw.
    """
    graph = circuit.graph
    mask = circuit.mask.cpu()
    kept = graph.edges_of(mask)
    scores = None if edge_scores is None else edge_scores.mean().detach().double().cpu()[mask]
    ranked = range(len(kept))
    if scores is not None:
        ranked = scores.abs().argsort(descending=True, stable=True).tolist()
    chosen = [(kept[index], None if scores is None else scores[index].item()) for index in ranked]
    chosen = chosen[:max_circuit_edges]
    largest = max((abs(score) for _, score in chosen if score is not None), default=0.0)
    taking_part = {node for edge, _ in chosen for node in (edge.source, edge.destination.node)}
    edges = []
    for edge, score in chosen:
        readers = graph.readers_of(edge.destination)
        # If no head of a group appears in the circuit, draw lines to all of them.
        readers = [node for node in readers if node in taking_part] or readers
        lines = tuple(Line(edge.source, node, edge.destination.slot) for node in readers)
        strength = 1.0 if score is None else abs(score) / largest if largest else 0.0
        edges.append(DrawnEdge(edge, lines, score, strength))
    upwards = sorted(
        (line for edge in edges for line in edge.lines),
        key=lambda line: graph.source_index(line.source),
    )
    return DrawnCircuit(name, tuple(edges), _on_path(upwards), len(kept), graph.n_edges)


def _on_path(upwards: Sequence[Line]) -> frozenset[Line]:
    """The lines on a path, given lines in the order in which their sources write."""
    above, below = {INPUT}, {LOGITS}
    for line in upwards:
        if line.source in above:
            above.add(line.reader)
    for line in reversed(upwards):
        if line.reader in below:
            below.add(line.source)
    return frozenset(line for line in upwards if line.source in above and line.reader in below)
