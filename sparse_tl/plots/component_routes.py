"""Links of a component diagram as curves: trunks that leave nodes, and what branches off them.

A curve leaves and enters a row vertically and turns between rows, so it runs through no node. Links
that leave or enter the same side of a box are spread over it, in the order of their other ends. A
line that leads downwards, as one to an early node in a supernode may, has an arrowhead half-way.
`component_routes.js` does the same in the browser.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparse_tl.plots.component_layout import NODE_HEIGHT, ComponentLayout, Ends, port_offset
from sparse_tl.plots.drawn_circuit import Link
from sparse_tl.plots.palette import Colour

_HALF = NODE_HEIGHT / 2
_STEP = 7.0


@dataclass(frozen=True)
class Shape:
    """A curve.

    Args:
        path: SVG path data.
        links: indices of the links in it: one, or all that the piece of a trunk carries.
        stroke: its colour.
        strength: strength of its strongest link.
    """

    path: str
    links: tuple[int, ...]
    stroke: Colour
    strength: float


class Routes:
    """Where links and trunks run, the same in all panels.

    Args:
        layout: the layout.
        links: links of all panels.
    """

    def __init__(self, layout: ComponentLayout, links: Sequence[Ends]) -> None:
        self.layout = layout
        self._starts = dict[object, float]()
        self._ends = dict[Ends, float]()
        leaving = defaultdict[int, dict[object, float]](dict)
        entering = defaultdict[int, list[Ends]](list)
        for ends in links:
            lower, upper = self._upwards(ends)
            if self.turn(ends) is None:
                port = port_offset(layout.boxes[upper].width, ends[2])
                leaving[lower][ends] = layout.boxes[upper].x + port
            else:
                leaving[lower][lower] = layout.bends[lower, layout.rows[lower] + 1]
            if ends[2] in ("q", "k", "v"):
                box = layout.boxes[upper]
                self._ends[ends] = box.x + port_offset(box.width, ends[2])
            else:
                entering[upper].append(ends)
        for node, nexts in leaving.items():
            found = sorted(nexts, key=lambda key: nexts[key])
            self._starts |= self._spread(found, node)
        for node, inside in entering.items():
            inside.sort(key=self._last)
            self._ends |= self._spread(inside, node)

    def _upwards(self, ends: Ends) -> tuple[int, int]:
        a, b, _ = ends
        return (a, b) if self.layout.rows[a] < self.layout.rows[b] else (b, a)

    def turn(self, ends: Ends) -> int | None:
        """The row in which a link leaves its trunk; ``None`` if it has none."""
        lower, upper = self._upwards(ends)
        below = self.layout.rows[upper] - 1
        return below if below > self.layout.rows[lower] else None

    def _last(self, ends: Ends) -> float:
        lower, _ = self._upwards(ends)
        row = self.turn(ends)
        return self.layout.boxes[lower].x if row is None else self.layout.bends[lower, row]

    def _spread(self, keys: Sequence, node: int) -> dict:
        box = self.layout.boxes[node]
        step = min(_STEP, (box.width - 12) / max(len(keys) - 1, 1))
        first = box.x - step * (len(keys) - 1) / 2
        return {key: first + step * place for place, key in enumerate(keys)}

    def branch(self, ends: Ends) -> str:
        """The last piece of a link."""
        lower, upper = self._upwards(ends)
        row, heights = self.turn(ends), self.layout.heights
        x = self._starts[ends] if row is None else self.layout.bends[lower, row]
        y = heights[self.layout.rows[lower] if row is None else row]
        x1, y1 = self._ends[ends], heights[self.layout.rows[upper]]
        return _piece(x, y, x1, y1) + (_arrowhead(x, y, x1, y1) if upper == ends[0] else "")

    def trunk(self, node: int, start: int, stop: int) -> str:
        """A trunk from one row to another, through the latter."""
        heights, bends = self.layout.heights, self.layout.bends
        path = ""
        for row in range(start, stop):
            x = self._starts[node] if row == self.layout.rows[node] else bends[node, row]
            path += _piece(x, heights[row], bends[node, row + 1], heights[row + 1])
            path += f"V{heights[row + 1] - _HALF:.1f}"
        return path

    def shapes(
        self,
        links: Sequence[Link],
        ends: Sequence[Ends],
        stroke: Callable[[Link], Colour],
        shared: Colour,
    ) -> list[Shape]:
        """The curves of a panel, those on top last.

        Args:
            links: links of the panel.
            ends: ends of each link.
            stroke: the colour of a link.
            shared: colour of the piece of a trunk whose links have several.
        """
        trunks = defaultdict[int, list[tuple[int, int]]](list)
        branches = list[Shape]()
        strokes = [stroke(link) for link in links]
        for k, end in enumerate(ends):
            row = self.turn(end)
            if row is not None:
                trunks[self._upwards(end)[0]].append((row, k))
            branches.append(Shape(self.branch(end), (k,), strokes[k], links[k].strength))
        found = list[Shape]()
        for node in sorted(trunks):
            start = self.layout.rows[node]
            for row in sorted({row for row, _ in trunks[node]}):
                carried = tuple(k for turn, k in trunks[node] if turn >= row)
                colours = {strokes[k] for k in carried}
                colour = colours.pop() if len(colours) == 1 else shared
                strength = max(links[k].strength for k in carried)
                found.append(Shape(self.trunk(node, start, row), carried, colour, strength))
                start = row
        branches.sort(key=lambda s: (links[s.links[0]].on_path, s.strength, -s.links[0]))
        return found + branches


def _piece(x0: float, y0: float, x1: float, y1: float) -> str:
    middle = (y0 + y1) / 2
    return (
        f"M{x0:.1f} {y0 - _HALF:.1f}C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} "
        f"{x1:.1f} {y1 + _HALF:.1f}"
    )


def _arrowhead(x0: float, y0: float, x1: float, y1: float) -> str:
    """An arrowhead half-way on a piece, towards its lower end."""
    dx, dy = 2 * (x0 - x1), y0 - y1 - 2 * _HALF
    length = math.hypot(dx, dy)
    along, across = 6 * dx / length, 6 * dy / length
    x, y = (x0 + x1 + along) / 2, (y0 + y1 + across) / 2
    left = f"M{x - along - across / 2:.1f} {y - across + along / 2:.1f}L{x:.1f} {y:.1f}"
    return f"{left}L{x - along + across / 2:.1f} {y - across - along / 2:.1f}"


def ends_of(links: Sequence[Link], slots: bool) -> list[Ends]:
    """The ends of links; which slot a merged link enters makes no difference."""
    return [(k.source, k.reader, k.slot if slots else None) for k in links]


def all_ends(panels: Mapping[int, Sequence[Ends]]) -> list[Ends]:
    """The ends of the links of all panels, each once, in order."""
    every = {ends for some in panels.values() for ends in some}
    return sorted(every, key=lambda ends: (ends[0], ends[1], ends[2] or ""))
