"""Layout of a component diagram: all coordinates, in pixels at full size.

1. Rows, upwards: the input; each layer's heads with its MLP beside them, or above them if the MLP
   reads from one of these heads; the logits. A layer without drawn edges has no row.
2. Order and place the nodes, and the bends where lines pass a row (`layered_layout`), for the
   lines of all panels together: nodes and lines have the same position in every panel.
3. Turn the lines into smooth curves (`component_curves`).

Nodes, bands and curves are relative to the top of their panel's frame.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sparse_tl.nodes import Node
from sparse_tl.plots.component_curves import NodeBox, line_curves, port_offset
from sparse_tl.plots.drawn_circuit import INPUT, LOGITS, DrawnCircuit, Line
from sparse_tl.plots.figure_frame import (
    FIGURE_WIDTH,
    MARGIN,
    PANEL_GAP,
    Frame,
    Surround,
)
from sparse_tl.plots.layered_layout import Segment, order_rows, place_rows
from sparse_tl.plots.token_text import text_width

LAYER_TEXT_SIZE = 12.5
NODE_TEXT_SIZE = 11.5
NODE_HEIGHT = 19
LEGEND_HEIGHT, MARK_HEIGHT = 30, 22

_HEADING_HEIGHT, _FOOT, _SIDE = 42, 14, 16
# (gap between parallel lines, gap between nodes): the widest spacing that fits is used.
_SPACINGS = ((10, 56), (10, 40), (9, 28), (8, 20), (7, 15), (6, 12), (5, 10), (4, 8), (3, 7))
_LINE_TO_NODE = 5
# Segment weights by the number of bends at the ends (0, 1, 2), as in Graphviz.
_WEIGHTS = (1.0, 2.0, 8.0)
_END_ROOM = 24.0


@dataclass(frozen=True)
class Row:
    """The nodes at one height; the label names their layer."""

    label: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Bend:
    """Where a line passes a row; compared by identity, for fast look-up."""

    row: int


@dataclass(frozen=True)
class Band:
    """The background of one layer."""

    label: str
    top: float
    bottom: float


@dataclass(frozen=True)
class ComponentLayout:
    """Layout of the whole figure.

    Args:
        width, height: size of the figure.
        left, right: horizontal extent of every frame.
        frames: frames from top to bottom, all of one height.
        boxes: boxes of all nodes drawn in some panel.
        curves: SVG path data of every line.
        bands: backgrounds, one per layer.
        legend_y: middle of the legend, from the top of the figure; the legend of marks is on the
            line below.
    """

    width: int
    height: int
    left: int
    right: int
    frames: tuple[Frame, ...]
    boxes: dict[Node, NodeBox]
    curves: dict[Line, str]
    bands: tuple[Band, ...]
    legend_y: float


def lay_out(
    panels: Sequence[DrawnCircuit], surround: Surround, *, marks: bool = False
) -> ComponentLayout:
    """Place the nodes and lines of these panels, with room for a legend of marks if needed."""
    lines = list(dict.fromkeys(line for panel in panels for line in panel.lines))
    rows = node_rows(lines)
    heights = _row_heights(rows)
    widths = {node: _node_width(node, lines) for row in rows for node in row.nodes}

    left, top = surround.left, surround.top
    label_width = max(text_width(row.label, LAYER_TEXT_SIZE) for row in rows)
    start = left + 14 + math.ceil(label_width) + _SIDE
    bends, x, end = _place(rows, lines, widths, (start, FIGURE_WIDTH - MARGIN - _SIDE))
    boxes = {
        node: NodeBox(round(x[node], 1), y, widths[node])
        for row, y in zip(rows, heights, strict=True)
        for node in row.nodes
    }
    points = {
        line: [(x[bend], heights[bend.row]) for bend in passed] for line, passed in bends.items()
    }
    height = round(heights[0] + NODE_HEIGHT / 2 + _FOOT)
    frames = tuple(Frame(top + i * (height + PANEL_GAP), height) for i in range(len(panels)))
    bottom = frames[-1].top + height
    return ComponentLayout(
        width=end + _SIDE + MARGIN,
        height=bottom + LEGEND_HEIGHT + marks * MARK_HEIGHT + MARGIN,
        left=left,
        right=end + _SIDE,
        frames=frames,
        boxes=boxes,
        curves=line_curves(points, boxes, NODE_HEIGHT),
        bands=_bands(rows, heights),
        legend_y=bottom + 4 + LEGEND_HEIGHT / 2,
    )


def node_rows(lines: Sequence[Line]) -> list[Row]:
    """The rows of the nodes that these lines connect, from bottom to top."""
    # An MLP that reads from a head of its own layer must be above it.
    raised = {
        line.reader
        for line in lines
        if line.reader.kind == "mlp"
        and line.source.kind == "head"
        and line.source.layer == line.reader.layer
    }
    inner = {node for line in lines for node in (line.source, line.reader)} - {INPUT, LOGITS}
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


def _row_heights(rows: Sequence[Row]) -> list[float]:
    """The y coordinate of each row; rows of one layer are closer together."""
    pitch = min(62, max(38, 760 // len(rows)))
    heights = [float(_HEADING_HEIGHT + NODE_HEIGHT / 2)]
    for above, below in pairwise(reversed(rows)):
        step = 0.85 * pitch if above.label == below.label else pitch
        heights.append(heights[-1] + round(step))
    return heights[::-1]


def _bands(rows: Sequence[Row], heights: Sequence[float]) -> tuple[Band, ...]:
    spans: dict[str, tuple[float, float]] = {}
    reach = NODE_HEIGHT / 2 + 6
    for row, y in zip(rows, heights, strict=True):
        if row.label:
            _, bottom = spans.get(row.label, (y, y + reach))
            spans[row.label] = (y - reach, bottom)
    return tuple(Band(label, top, bottom) for label, (top, bottom) in spans.items())


def _node_width(node: Node, lines: Sequence[Line]) -> float:
    text = math.ceil(text_width(str(node), NODE_TEXT_SIZE)) + 8.0
    if node not in (INPUT, LOGITS):
        return text
    # The input and logits boxes are as wide as their lines need.
    n_lines = sum(node in (line.source, line.reader) for line in lines)
    return max(text, min(360.0, 7.0 * n_lines + 12))


def _place(
    rows: Sequence[Row],
    lines: Sequence[Line],
    widths: Mapping[Node, float],
    bounds: tuple[int, int],
) -> tuple[dict[Line, list[Bend]], dict[Node | Bend, float], int]:
    """The bends of each line, the x coordinates of nodes and bends, and the right end."""
    height = {node: index for index, row in enumerate(rows) for node in row.nodes}
    # Each line starts out straight, between evenly spread nodes.
    at: dict[Node | Bend, float] = {
        node: (index + 0.5) / len(row.nodes) for row in rows for index, node in enumerate(row.nodes)
    }
    net: list[list[Node | Bend]] = [list(row.nodes) for row in rows]
    bends: dict[Line, list[Bend]] = {}
    segments = []
    for line in lines:
        start, end = at[line.source], at[line.reader]
        passed = [Bend(row) for row in range(height[line.source] + 1, height[line.reader])]
        for index, bend in enumerate(passed, start=1):
            at[bend] = start + (end - start) * index / (len(passed) + 1)
            net[bend.row].append(bend)
        for lower, upper in pairwise([line.source, *passed, line.reader]):
            weight = _WEIGHTS[isinstance(lower, Bend) + isinstance(upper, Bend)]
            port = port_offset(widths[line.reader], line.slot) if upper == line.reader else 0.0
            segments.append(Segment(lower, upper, weight, port))
        bends[line] = passed
    order = order_rows([sorted(row, key=at.__getitem__) for row in net], segments)
    separations, widest = _roomiest(order, widths, bounds[1] - bounds[0])
    left, right = bounds[0], max(bounds[1], bounds[0] + widest)
    x = place_rows(order, segments, separations, (left + _END_ROOM, right - _END_ROOM))
    return bends, x, right


def _roomiest(
    order: Sequence[Sequence[Node | Bend]], widths: Mapping[Node, float], room: float
) -> tuple[list[list[float]], int]:
    """The widest minimum distances between neighbours that fit, and the width that they need."""
    separations: list[list[float]] = []
    widest = 0.0
    for line_gap, node_gap in _SPACINGS:
        clearances = (line_gap, max(line_gap, _LINE_TO_NODE), node_gap)
        separations = []
        for row in order:
            halves = [widths[v] / 2 if isinstance(v, Node) else 0.0 for v in row]
            separations.append([a + b + clearances[bool(a) + bool(b)] for a, b in pairwise(halves)])
        widest = max(map(sum, separations)) + 2 * _END_ROOM
        if widest <= 0.95 * room:
            break
    return separations, math.ceil(widest)
