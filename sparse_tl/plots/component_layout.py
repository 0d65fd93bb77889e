"""Layout of a component diagram: all coordinates of one panel, in pixels.

1. Rows, upwards: the input; each layer's heads with its MLP beside them, or above them if the MLP
   reads from one of these heads; the logits. A layer without nodes has no row; nodes that do not
   fit side by side take several rows. With positions, every position has a column.
2. Trunks: a node that is read further up has one *trunk*, with a bend in every row that it passes,
   and links branch off below their readers. So a row is passed by as many lines as there are nodes
   below it, not by all links: 2,000 links need 150 bends a row, not 1,000.
3. Order and place nodes and bends (`layered_layout`), each column by itself.

The whole layout is as wide as the figure, so its text is never scaled down.
`component_layout.js` does the same in the browser, for every view.

Libraries were tried on 2,000 circuit edges of GPT-2 small's shape: dagre 3.1 takes 13 s for a
picture 38,500 pixels wide, ELK 0.12 (1.6 MB of script) 21 s and 18,900 pixels; d3-dag 1.2 takes
4.5 s for 500 edges. All three route every edge by itself, so that at the width of a page the text
would be smaller than a pixel. None bundles the edges of a source.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sparse_tl.plots.drawn_circuit import DrawnNode
from sparse_tl.plots.layered_layout import Segment, order_rows, place_rows
from sparse_tl.plots.token_text import clip_text, text_width, visible_text

NODE_TEXT_SIZE = 11.5
NODE_HEIGHT = 19
LAYER_TEXT_SIZE = 12.5
MOST_LABEL = 150.0
"""Width at which the text of a node is clipped, in pixels."""

_END_ROOM = 5.0
_WIDE = 200.0
_SHARE_OF_NODES = 0.72
_SPACINGS = (1.0, 0.8, 0.6, 0.45, 0.3, 0.2, 0.1, 0.05, 0.0)
_TRUNK_WEIGHT, _TURN_WEIGHT, _DIRECT_WEIGHT = 8.0, 2.0, 1.0

Ends = tuple[int, int, "str | None"]
"""Source, reader and slot of a link."""
Bend = tuple[int, int]
"""A node and a row that its trunk passes."""


@dataclass(frozen=True)
class Box:
    """A node: centre and width of its box, in pixels from the corner of the panel's content."""

    x: float
    y: float
    width: float


@dataclass(frozen=True)
class ComponentLayout:
    """Layout of one panel.

    Args:
        height: height of the content.
        boxes: boxes by index of the node.
        rows: row of every node.
        bends: x of every trunk in the rows that it passes.
        heights: y of every row.
        columns: left and right end of every column.
        bands: label, top and bottom of every layer's background.
    """

    height: float
    boxes: dict[int, Box]
    rows: dict[int, int]
    bends: dict[Bend, float]
    heights: list[float]
    columns: list[tuple[float, float]]
    bands: list[tuple[str, float, float]]


def node_text(node: DrawnNode, labels: Mapping[str, str]) -> str:
    """The text of a node, clipped."""
    name = labels.get(node.name) or (
        node.name if node.position is None or node.kind == "group" else node.name.split("@")[0]
    )
    name = name.replace("<kv>", " kv") if node.kind == "keys" else name
    text = visible_text(name[:200]) + (f" ({node.size})" if node.kind == "group" else "")
    return clip_text(text, NODE_TEXT_SIZE, MOST_LABEL)


def lay_out(
    nodes: Sequence[DrawnNode],
    links: Sequence[Ends],
    labels: Mapping[str, str],
    bounds: tuple[float, float],
    n_columns: int,
) -> ComponentLayout:
    """Place the nodes that links connect.

    Args:
        nodes: all nodes.
        links: links of all panels; each end is drawn, and with no link, the input and the logits.
        labels: texts in place of names.
        bounds: left and right end of the content.
        n_columns: number of positions; 1 without any.
    """
    used = sorted({end for link in links for end in link[:2]}) or [
        i for i, node in enumerate(nodes) if node.kind in ("input", "logits")
    ]
    widths = _widths(nodes, used, links, labels, bounds[1] - bounds[0])
    column = {i: (nodes[i].position or 0) if n_columns > 1 else 0 for i in used}
    columns = _columns(used, column, widths, bounds, n_columns)
    level = _levels(nodes, used, links)
    rows = _rows(used, level, column, widths, columns)
    n_rows = max(rows.values(), default=0) + 1
    upwards = [(a, b, slot) if rows[a] <= rows[b] else (b, a, slot) for a, b, slot in links]
    top = {i: rows[i] for i in used}
    for a, b, _ in upwards:
        top[a] = max(top[a], rows[b] - 1)
    x = dict[Any, float]()
    for c, (left, right) in enumerate(columns):
        inside = [i for i in used if column[i] == c]
        segments, net = _net(inside, rows, top, upwards, column, widths, n_rows)
        order = order_rows(net, segments)
        end = max((widths[i] / 2 for i in inside if widths[i] < _WIDE), default=0.0) + _END_ROOM
        separations = _roomiest(order, widths, right - left - 2 * end)
        x |= place_rows(order, segments, separations, (left + end, right - end))
    bends = {vertex: at for vertex, at in x.items() if isinstance(vertex, tuple)}
    heights = _heights(used, level, rows, n_rows)
    boxes = {i: Box(x[i], heights[rows[i]], widths[i]) for i in used}
    bottom = heights[0] + NODE_HEIGHT / 2 + 12
    return ComponentLayout(
        bottom, boxes, rows, bends, heights, columns, _bands(nodes, used, rows, heights)
    )


def _widths(
    nodes: Sequence[DrawnNode],
    used: Sequence[int],
    links: Sequence[Ends],
    labels: Mapping[str, str],
    room: float,
) -> dict[int, float]:
    number = defaultdict[int, int](int)
    for a, b, _ in links:
        number[a] += 1
        number[b] += 1
    widths = dict[int, float]()
    for i in used:
        text = math.ceil(text_width(node_text(nodes[i], labels), NODE_TEXT_SIZE)) + 8.0
        plain = nodes[i].kind in ("input", "logits") and nodes[i].position is None
        # The input and logits boxes are as wide as their links need.
        widths[i] = max(text, min(0.5 * room, 6.0 * number[i] + 12)) if plain else text
    return widths


def _columns(
    used: Sequence[int],
    column: Mapping[int, int],
    widths: Mapping[int, float],
    bounds: tuple[float, float],
    n_columns: int,
) -> list[tuple[float, float]]:
    """Columns by what their nodes need; wider than the bounds where these do not have the room."""
    total, widest = [0.0] * n_columns, [0.0] * n_columns
    for i in used:
        total[column[i]] += widths[i]
        widest[column[i]] = max(widest[column[i]], widths[i])
    least = [width + 26 if width else 26.0 for width in widest]
    spare = max(0.0, bounds[1] - bounds[0] - sum(least))
    shares = [math.sqrt(some) for some in total]
    whole = sum(shares) or 1.0
    ends = [bounds[0]]
    for need, share in zip(least, shares, strict=True):
        ends.append(ends[-1] + need + spare * share / whole)
    return list(pairwise(ends))


def _levels(
    nodes: Sequence[DrawnNode], used: Sequence[int], links: Sequence[Ends]
) -> dict[int, float]:
    """The step of every node; that of the heads for an MLP that reads none of its layer."""
    raised = {
        b for a, b, _ in links if nodes[b].kind == "mlp" and nodes[a].step == nodes[b].step - 1
    }
    return {
        i: nodes[i].step - (1 if nodes[i].kind == "mlp" and i not in raised else 0) for i in used
    }


def _rows(
    used: Sequence[int],
    level: Mapping[int, float],
    column: Mapping[int, int],
    widths: Mapping[int, float],
    columns: Sequence[tuple[float, float]],
) -> dict[int, int]:
    """The row of every node; the nodes of a level take as many rows as they need."""
    rows, first = dict[int, int](), 0
    for step in sorted(set(level.values())):
        n_rows = 1
        for c, (left, right) in enumerate(columns):
            row, taken = 0, 0.0
            for i in used:
                if level[i] != step or column[i] != c:
                    continue
                if taken and taken + widths[i] + 8 > _SHARE_OF_NODES * (right - left):
                    row, taken = row + 1, 0.0
                rows[i] = first + row
                taken += widths[i] + 8
            n_rows = max(n_rows, row + 1)
        first += n_rows
    return rows


def _heights(
    used: Sequence[int], level: Mapping[int, float], rows: Mapping[int, int], n_rows: int
) -> list[float]:
    """The y coordinate of each row, upwards; rows of one level are closer together."""
    at = {rows[i]: level[i] for i in used}
    pitch = min(62, max(40, 900 // n_rows))
    heights = [10 + NODE_HEIGHT / 2]
    for row in range(n_rows - 1, 0, -1):
        heights.append(heights[-1] + (34 if at[row] == at[row - 1] else pitch))
    return heights[::-1]


def _bands(
    nodes: Sequence[DrawnNode],
    used: Sequence[int],
    rows: Mapping[int, int],
    heights: Sequence[float],
) -> list[tuple[str, float, float]]:
    """The background of each layer, from bottom to top."""
    spans = dict[int, tuple[float, float]]()
    for i in used:
        layer = nodes[i].layer
        if layer is not None:
            y = heights[rows[i]]
            low, high = spans.get(layer, (y, y))
            spans[layer] = min(low, y), max(high, y)
    reach = NODE_HEIGHT / 2 + 6
    found = sorted(spans.items())
    return [(f"Layer {layer}", low - reach, high + reach) for layer, (low, high) in found]


def _net(
    inside: Sequence[int],
    rows: Mapping[int, int],
    top: Mapping[int, int],
    upwards: Sequence[Ends],
    column: Mapping[int, int],
    widths: Mapping[int, float],
    n_rows: int,
) -> tuple[list[Segment], list[list[Any]]]:
    """The segments between neighbouring rows of one column, and the vertices of each row."""
    net: list[list[tuple[float, Any]]] = [[] for _ in range(n_rows)]
    number = defaultdict[int, int](int)
    size = defaultdict[int, int](int)
    for i in inside:
        size[rows[i]] += 1
    segments, members = list[Segment](), set(inside)
    for i in inside:
        at = (number[rows[i]] + 0.5) / size[rows[i]]
        number[rows[i]] += 1
        net[rows[i]].append((at, i))
        for row in range(rows[i] + 1, top[i] + 1):
            net[row].append((at, (i, row)))
            lower = i if row == rows[i] + 1 else (i, row - 1)
            weight = _TURN_WEIGHT if row == rows[i] + 1 else _TRUNK_WEIGHT
            segments.append(Segment(lower, (i, row), weight))
    for a, b, slot in upwards:
        if column[a] == column[b] and a in members:
            below = rows[b] - 1
            lower = a if below == rows[a] else (a, below)
            segments.append(Segment(lower, b, _DIRECT_WEIGHT, port_offset(widths[b], slot)))
    return segments, [[vertex for _, vertex in sorted(row, key=lambda v: v[0])] for row in net]


def port_offset(width: float, slot: str | None) -> float:
    """Offset of a slot's input from the box centre, in pixels: q, k and v from left to right."""
    return {"q": -0.3, "v": 0.3}.get(slot or "", 0.0) * width


def _roomiest(
    order: Sequence[Sequence[Any]], widths: Mapping[int, float], room: float
) -> list[list[float]]:
    """The widest minimum distances between neighbours that fit."""
    separations: list[list[float]] = []
    for f in _SPACINGS:
        gaps = (9 * f, 2 + 7 * f, 4 + 22 * f)  # bend to bend, bend to node, node to node
        separations = []
        for row in order:
            halves = [widths[v] / 2 if isinstance(v, int) else 0.0 for v in row]
            separations.append([a + b + gaps[bool(a) + bool(b)] for a, b in pairwise(halves)])
        if max(map(sum, separations), default=0.0) <= room:
            break
    return separations
