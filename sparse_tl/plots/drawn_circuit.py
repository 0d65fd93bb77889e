"""What a component diagram draws: the strongest kept edges of a circuit, and what is on a path.

1. Rank the kept edges by ``|score|``, the largest first; ties stay in the graph's order.
2. Draw the first of them. The *strength* of an edge is ``|score| / max |score|`` over the kept
   edges of its panel, and 1 where there are no scores.
3. An edge has a line to every node that reads there: one, or under grouped-query attention
   those heads of the group that take part in the drawn circuit.
4. A line is *on a path* if its source can be reached from the input, and the logits can be
   reached from its end, over drawn lines. A head passes on what any of its three slots reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparse_tl.circuits import Circuit, Scores
from sparse_tl.nodes import CircuitEdge, Node, Slot

INPUT, LOGITS = Node("input"), Node("logits")

LineState = Literal["path", "open", "absent"]
"""On a path from the input to the logits; drawn, but on none; not drawn."""


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
        edge: what it joins.
        lines: that stand for it; several under grouped-query attention.
        score: in units of the metric; ``None`` without scores.
        strength: 0..1, relative to the strongest kept edge.
    """

    edge: CircuitEdge
    lines: tuple[Line, ...]
    score: float | None
    strength: float


@dataclass(frozen=True)
class DrawnCircuit:
    """The drawn edges of one panel.

    Args:
        name: of the panel.
        edges: the strongest first.
        on_path: the lines that lead from the input to the logits.
        n_kept: edges of the circuit, drawn or not.
        n_existing: edges of the model.
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
        """Edges of which a line is on a path."""
        return sum(self.state(edge.lines) == "path" for edge in self.edges)

    @property
    def has_scores(self) -> bool:
        return any(edge.score is not None for edge in self.edges)

    def state(self, lines: Sequence[Line]) -> LineState:
        """That of something to which these lines belong."""
        if not lines:
            return "absent"
        return "open" if self.on_path.isdisjoint(lines) else "path"


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
        # A group of which no head takes part still shows where the edge goes.
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
    """The lines on a path, of lines in the order in which their sources write."""
    above, below = {INPUT}, {LOGITS}
    for line in upwards:
        if line.source in above:
            above.add(line.reader)
    for line in reversed(upwards):
        if line.reader in below:
            below.add(line.source)
    return frozenset(line for line in upwards if line.source in above and line.reader in below)
