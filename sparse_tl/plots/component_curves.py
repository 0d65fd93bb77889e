"""Lines of a component diagram: smooth curves that leave and enter nodes vertically.

A curve is a piecewise cubic x(y) through the bends of its line. Its slopes at the bends follow
Fritsch and Carlson, so that x never overshoots between two bends: a line stays in the gap that the
layout assigned to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sparse_tl.nodes import Node, Slot
from sparse_tl.plots.drawn_circuit import Line

_MAX_SPREAD_STEP = 7.0

Point = tuple[float, float]
"""x and y in pixels."""


@dataclass(frozen=True)
class NodeBox:
    """A node: centre and width of its box, in pixels."""

    x: float
    y: float
    width: float

    def port(self, slot: Slot | None) -> float:
        """The x coordinate of a slot's input."""
        return self.x + port_offset(self.width, slot)


def port_offset(width: float, slot: Slot | None) -> float:
    """Offset of a slot's input from the box centre, in pixels: q, k and v from left to right."""
    return {"q": -0.3, "k": 0.0, "v": 0.3, None: 0.0}[slot] * width


def line_curves(
    bends: Mapping[Line, Sequence[Point]], boxes: Mapping[Node, NodeBox], node_height: float
) -> dict[Line, str]:
    """Each line as SVG path data, from the top of one box to the bottom of another.

    Lines that leave a node, or enter an MLP or the logits, are spread over the side of the box, in
    the order of their other ends, so that they do not cross there.

    Args:
        bends: intermediate points of each line, upwards.
        boxes: boxes of all sources and readers.
        node_height: height of the boxes.
    """
    outgoing: dict[Node, list[Line]] = defaultdict(list)
    incoming: dict[Node, list[Line]] = defaultdict(list)
    for line in bends:
        outgoing[line.source].append(line)
        if line.slot is None:
            incoming[line.reader].append(line)

    def next_x(line: Line) -> float:
        return bends[line][0][0] if bends[line] else boxes[line.reader].port(line.slot)

    def last_x(line: Line) -> float:
        return bends[line][-1][0] if bends[line] else boxes[line.source].x

    starts: dict[Line, float] = {}
    ends = {line: boxes[line.reader].port(line.slot) for line in bends}
    for node, lines in outgoing.items():
        starts.update(_spread(sorted(lines, key=next_x), boxes[node]))
    for node, lines in incoming.items():
        ends.update(_spread(sorted(lines, key=last_x), boxes[node]))
    half = node_height / 2
    return {
        line: _curve(
            [
                (starts[line], boxes[line.source].y - half),
                *points,
                (ends[line], boxes[line.reader].y + half),
            ]
        )
        for line, points in bends.items()
    }


def _spread(lines: Sequence[Line], box: NodeBox) -> dict[Line, float]:
    """The x coordinates of line ends along the side of a box."""
    n_gaps = max(len(lines) - 1, 1)
    step = min(_MAX_SPREAD_STEP, (box.width - 12) / n_gaps)
    first = box.x - step * (len(lines) - 1) / 2
    return {line: first + step * place for place, line in enumerate(lines)}


def _curve(points: Sequence[Point]) -> str:
    """A monotone piecewise cubic x(y) through points of decreasing y, as SVG path data."""
    secants = [(x1 - x0) / (y1 - y0) for (x0, y0), (x1, y1) in pairwise(points)]
    slopes = [0.0]
    for before, after in pairwise(secants):
        turns = before * after <= 0
        slopes.append(0.0 if turns else 2 * before * after / (before + after))
    slopes.append(0.0)
    data = f"M{points[0][0]:.1f} {points[0][1]:g}"
    for index, ((x0, y0), (x1, y1)) in enumerate(pairwise(points)):
        third = (y1 - y0) / 3
        data += (
            f"C{x0 + third * slopes[index]:.1f} {y0 + third:.1f} "
            f"{x1 - third * slopes[index + 1]:.1f} {y1 - third:.1f} {x1:.1f} {y1:g}"
        )
    return data
