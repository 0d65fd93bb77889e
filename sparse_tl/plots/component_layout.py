"""Where everything in a component diagram lies: all coordinates, in pixels at full size.

1. Put the nodes into rows, and into places for the lines of all panels (`component_rows`): a node
   is at the same place in every panel.
2. Lead the lines of each panel past the nodes, and make them smooth curves (`component_curves`).

Nodes, bands and curves are given relative to the top of their panel's frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sparse_tl.nodes import Node
from sparse_tl.plots.component_curves import Line, NodeBox, line_curves
from sparse_tl.plots.component_rows import NodePlaces, Row, node_rows, place_nodes, route_lines
from sparse_tl.plots.drawn_circuit import INPUT, LOGITS, DrawnCircuit, DrawnEdge
from sparse_tl.plots.figure_frame import (
    FIGURE_WIDTH,
    MARGIN,
    PANEL_GAP,
    Frame,
    Surround,
)
from sparse_tl.plots.token_text import text_width

LAYER_TEXT_SIZE = 12.5
NODE_HEIGHT = 19
LEGEND_HEIGHT = 30

_HEADING_HEIGHT, _FOOT, _SIDE = 42, 14, 16


@dataclass(frozen=True)
class Band:
    """The ground of one layer."""

    label: str
    top: float
    bottom: float


@dataclass(frozen=True)
class ComponentLayout:
    """The whole figure.

    Args:
        width, height: of the figure.
        left, right: of every frame.
        frames: from top to bottom, all of one height.
        boxes: every node that is drawn in some panel.
        curves: for each panel, its lines as SVG path data.
        bands: one per layer.
        legend_y: the middle of the legend, from the top of the figure.
    """

    width: int
    height: int
    left: int
    right: int
    frames: tuple[Frame, ...]
    boxes: dict[Node, NodeBox]
    curves: tuple[dict[Line, str], ...]
    bands: tuple[Band, ...]
    legend_y: float

    def path_data(self, panel: int, edge: DrawnEdge, reader: Node) -> str:
        """The line of an edge to one of its readers as SVG path data."""
        return self.curves[panel][Line(edge.source, reader, edge.slot)]


def lay_out(panels: Sequence[DrawnCircuit], surround: Surround) -> ComponentLayout:
    """Place the nodes and lines of these panels."""
    own_lines = [[line for edge in panel.edges for line in _lines(edge)] for panel in panels]
    lines = list(dict.fromkeys(line for own in own_lines for line in own))
    rows = node_rows({INPUT, LOGITS}.union(*(panel.nodes for panel in panels)), lines)
    heights = _row_heights(rows)

    left, top = surround.left, surround.top
    label_width = max(text_width(row.label, LAYER_TEXT_SIZE) for row in rows)
    bounds = left + 14 + math.ceil(label_width) + _SIDE, FIGURE_WIDTH - MARGIN - _SIDE
    places = place_nodes(rows, lines, bounds)
    boxes = {
        node: NodeBox(places.x[node], y, places.widths[node])
        for row, y in zip(rows, heights, strict=True)
        for node in row.nodes
    }
    height = round(heights[0] + NODE_HEIGHT / 2 + _FOOT)
    frames = tuple(Frame(top + i * (height + PANEL_GAP), height) for i in range(len(panels)))
    bottom = frames[-1].top + height
    right = places.bounds[1] + _SIDE
    return ComponentLayout(
        width=right + MARGIN,
        height=bottom + LEGEND_HEIGHT + MARGIN,
        left=left,
        right=right,
        frames=frames,
        boxes=boxes,
        curves=tuple(_curves(rows, heights, own, places, boxes) for own in own_lines),
        bands=_bands(rows, heights),
        legend_y=bottom + 4 + LEGEND_HEIGHT / 2,
    )


def _lines(edge: DrawnEdge) -> list[Line]:
    return [Line(edge.source, reader, edge.slot) for reader in edge.readers]


def _curves(
    rows: Sequence[Row],
    heights: Sequence[float],
    lines: Sequence[Line],
    places: NodePlaces,
    boxes: dict[Node, NodeBox],
) -> dict[Line, str]:
    # Rows are numbered from the input, so a line's bends are in the rows after its source's.
    row_of = {node: index for index, row in enumerate(rows) for node in row.nodes}
    bends = {
        line: list(zip(xs, heights[row_of[line.source] + 1 :], strict=False))
        for line, xs in route_lines(rows, lines, places).items()
    }
    return line_curves(bends, boxes, NODE_HEIGHT)


def _row_heights(rows: Sequence[Row]) -> list[float]:
    """The y coordinate of each row; the rows of one layer are closer together."""
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
