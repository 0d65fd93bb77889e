"""The rows of a component diagram: which nodes are in them, and where lines pass between these.

1. Rows, upwards: the input; each layer's heads with its MLP beside them, or above them where the
   MLP reads from one of these heads; the logits. A layer without a drawn edge has no row.
2. `place_nodes` finds the order and the x coordinates of the nodes for the lines of all panels.
3. `route_lines` keeps the nodes in place and leads the lines of one panel past them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sparse_tl.nodes import Node
from sparse_tl.plots.component_curves import Line, port_offset
from sparse_tl.plots.drawn_circuit import INPUT, LOGITS
from sparse_tl.plots.layered_layout import Segment, count_crossings, order_rows, place_rows
from sparse_tl.plots.token_text import text_width

NODE_TEXT_SIZE = 11.5

# (distance between lines that run side by side, between nodes): the roomiest that fits is taken.
_SPACINGS = ((10, 56), (10, 40), (9, 28), (8, 20), (7, 15), (6, 12), (5, 10), (4, 8), (3, 7))
_LINE_TO_NODE = 5
# As in Graphviz: of segments with no, one and two bends at their ends.
_WEIGHTS = (1.0, 2.0, 8.0)
_END_ROOM = 24.0


@dataclass(frozen=True)
class Row:
    """The nodes at one height; the label names their layer."""

    label: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Bend:
    """Where a line passes a row; itself and no other, so that it is quick to look up."""

    row: int


@dataclass(frozen=True)
class NodePlaces:
    """Where the nodes are.

    Args:
        order: nodes and bends of each row from left to right, the lowest row first.
        bends: of each line, upwards.
        x: the middle of each node, in pixels.
        widths: of the nodes, in pixels.
        bounds: the left and the right end of what is drawn.
        spacing: the least distance between lines, and between nodes.
    """

    order: tuple[tuple[Node | Bend, ...], ...]
    bends: dict[Line, tuple[Bend, ...]]
    x: dict[Node, float]
    widths: dict[Node, float]
    bounds: tuple[int, int]
    spacing: tuple[int, int]


def node_rows(nodes: Iterable[Node], lines: Sequence[Line]) -> list[Row]:
    """The rows of these nodes, from the lowest to the highest."""
    # An MLP that reads from a head of its layer has to be above it.
    raised = {
        line.reader
        for line in lines
        if line.reader.kind == "mlp"
        and line.source.kind == "head"
        and line.source.layer == line.reader.layer
    }
    inner = set(nodes) - {INPUT, LOGITS}
    rows = [Row("", (INPUT,))]
    for layer in sorted({node.layer for node in inner}):
        inside = [node for node in inner if node.layer == layer]
        inside.sort(key=lambda node: (node.kind == "mlp", node.head))
        label = f"Layer {layer}"
        if inside[-1] in raised:
            rows += [Row(label, tuple(inside[:-1])), Row(label, (inside[-1],))]
        else:
            rows.append(Row(label, tuple(inside)))
    return [*rows, Row("", (LOGITS,))]


def place_nodes(rows: Sequence[Row], lines: Sequence[Line], bounds: tuple[int, int]) -> NodePlaces:
    """Order and place the nodes so that few of these lines cross.

    Args:
        rows: from the lowest to the highest.
        lines: of all panels.
        bounds: the room there is; the right end moves outwards where it is too small.
    """
    widths = {node: _node_width(node, lines) for row in rows for node in row.nodes}
    start = {
        node: (index + 0.5) / len(row.nodes) for row in rows for index, node in enumerate(row.nodes)
    }
    height = {node: index for index, row in enumerate(rows) for node in row.nodes}
    bends = {
        line: tuple(map(Bend, range(height[line.source] + 1, height[line.reader])))
        for line in lines
    }
    straight, segments = _net(rows, bends, start, widths)
    order = order_rows(straight, segments)
    spacing, widest = _roomiest(order, widths, bounds[1] - bounds[0])
    bounds = bounds[0], max(bounds[1], bounds[0] + widest)
    x = place_rows(order, segments, _separations(order, widths, spacing), _inner(bounds))
    return NodePlaces(
        order=tuple(tuple(row) for row in order),
        bends=bends,
        x={node: round(x[node], 1) for node in widths},
        widths=widths,
        bounds=bounds,
        spacing=spacing,
    )


def route_lines(
    rows: Sequence[Row], lines: Sequence[Line], places: NodePlaces
) -> dict[Line, list[float]]:
    """The x coordinate of each line in each row that it passes.

    A line passes the nodes on the same sides as with the lines of all panels, or, where that
    crosses no more of them, on the sides of a straight line.
    """
    bends = {line: places.bends[line] for line in lines}
    straight, segments = _net(rows, bends, places.x, places.widths)
    own = {vertex for row in straight for vertex in row}
    given = [[vertex for vertex in row if vertex in own] for row in places.order]
    candidates = [given]
    if count_crossings(straight, segments) <= count_crossings(given, segments):
        candidates = [straight, given]
    anchors: dict[Node | Bend, float] = {**places.x}
    x = anchors
    for order in candidates:
        # Two nodes that had a line between them may be closer than neighbours are elsewhere.
        separations = _separations(order, places.widths, (places.spacing[0], 0))
        x = place_rows(order, segments, separations, _inner(places.bounds), anchors)
        if all(abs(x[node] - at) < 1 for node, at in places.x.items()):
            break
    return {line: [x[bend] for bend in passed] for line, passed in bends.items()}


def _net(
    rows: Sequence[Row],
    bends: Mapping[Line, Sequence[Bend]],
    at: Mapping[Node, float],
    widths: Mapping[Node, float],
) -> tuple[list[list[Node | Bend]], list[Segment[Node | Bend]]]:
    """Nodes and bends in rows, each line straight, and the segments that join them."""
    position: dict[Node | Bend, float] = {**at}
    order: list[list[Node | Bend]] = [list(row.nodes) for row in rows]
    segments: list[Segment[Node | Bend]] = []
    for line, passed in bends.items():
        start, end = at[line.source], at[line.reader]
        for index, bend in enumerate(passed, start=1):
            position[bend] = start + (end - start) * index / (len(passed) + 1)
            order[bend.row].append(bend)
        for lower, upper in pairwise([line.source, *passed, line.reader]):
            weight = _WEIGHTS[isinstance(lower, Bend) + isinstance(upper, Bend)]
            port = port_offset(widths[line.reader], line.slot) if upper == line.reader else 0.0
            segments.append(Segment(lower, upper, weight, port))
    return [sorted(row, key=position.__getitem__) for row in order], segments


def _node_width(node: Node, lines: Sequence[Line]) -> float:
    text = math.ceil(text_width(str(node), NODE_TEXT_SIZE)) + 8.0
    if node not in (INPUT, LOGITS):
        return text
    # The ends of the residual stream are as wide as their lines need.
    n_lines = sum(node in (line.source, line.reader) for line in lines)
    return max(text, min(360.0, 7.0 * n_lines + 12))


def _inner(bounds: tuple[int, int]) -> tuple[float, float]:
    return bounds[0] + _END_ROOM, bounds[1] - _END_ROOM


def _roomiest(
    order: Sequence[Sequence[Node | Bend]], widths: Mapping[Node, float], room: float
) -> tuple[tuple[int, int], int]:
    """The roomiest spacing that fits, or the tightest of all, and the width that it needs."""
    spacing, widest = _SPACINGS[0], 0.0
    for spacing in _SPACINGS:
        separations = _separations(order, widths, spacing)
        widest = max(map(sum, separations)) + 2 * _END_ROOM
        if widest <= 0.95 * room:
            break
    return spacing, math.ceil(widest)


def _separations(
    order: Sequence[Sequence[Node | Bend]],
    widths: Mapping[Node, float],
    spacing: tuple[int, int],
) -> list[list[float]]:
    """The least distance between the middles of neighbours in each row."""
    line_gap, node_gap = spacing
    clearances = (line_gap, max(line_gap, _LINE_TO_NODE), node_gap)
    separations = []
    for row in order:
        halves = [widths[v] / 2 if isinstance(v, Node) else 0.0 for v in row]
        gaps = [clearances[bool(a) + bool(b)] for a, b in pairwise(halves)]
        separations.append(
            [a + b + gap for (a, b), gap in zip(pairwise(halves), gaps, strict=True)]
        )
    return separations
