"""Drawing a graph in rows: an order of each row with few crossings, then positions.

The method of Sugiyama, Tagawa and Toda, in the manner of Graphviz's dot:

1. The caller puts every vertex into a row and gives a line that skips rows a *bend*, a vertex of
   its own, in each row that it passes, so that every segment joins neighbouring rows.
2. Order: sweep up and down, sorting each row by the mean place of its neighbours in the row that
   was sorted before; keep the order with the fewest crossings.
3. Positions: sweep up and down, moving each row to the least-squares positions
   ``min sum_i w_i (x_i - d_i)^2`` under ``x_{i+1} - x_i >= separation``, where d_i is the weighted
   mean of the neighbours' positions. With the separations taken off, this is isotonic regression,
   which pooling adjacent violators solves exactly, and bounds on it merely clip the answer.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_ORDER_SWEEPS = 24
_PLACE_SWEEPS = 16
_ANCHOR_WEIGHT = 1e6


Vertex = TypeVar("Vertex", bound=Hashable)


@dataclass(frozen=True)
class Segment(Generic[Vertex]):
    """A line between neighbouring rows.

    Args:
        lower, upper: vertices.
        weight: how strongly it wants to be vertical.
        port: where it ends on the upper vertex, in pixels from the middle.
    """

    lower: Vertex
    upper: Vertex
    weight: float = 1.0
    port: float = 0.0


def order_rows(
    rows: Sequence[Sequence[Vertex]], segments: Sequence[Segment[Vertex]]
) -> list[list[Vertex]]:
    """The vertices of each row from left to right, so that few segments cross.

    Args:
        rows: from the lowest to the highest, in the order to start from.
        segments: between neighbouring rows.
    """
    order = [list(row) for row in rows]
    links = _Links(rows, segments)
    best, fewest = order, links.crossings(order)
    for sweep in range(_ORDER_SWEEPS):
        upwards = sweep % 2 == 0
        places = range(1, len(order)) if upwards else range(len(order) - 2, -1, -1)
        order = [list(row) for row in order]
        for place in places:
            fixed = order[place - 1] if upwards else order[place + 1]
            order[place] = links.sorted_by_neighbours(order[place], fixed, upwards)
        crossings = links.crossings(order)
        if crossings < fewest:
            best, fewest = order, crossings
    return best


class _Links(Generic[Vertex]):
    """The segments by their ends."""

    def __init__(
        self, rows: Sequence[Sequence[Vertex]], segments: Sequence[Segment[Vertex]]
    ) -> None:
        self.below: dict[Vertex, list[Segment[Vertex]]] = {
            vertex: [] for row in rows for vertex in row
        }
        self.above: dict[Vertex, list[Segment[Vertex]]] = {
            vertex: [] for row in rows for vertex in row
        }
        for segment in segments:
            self.below[segment.upper].append(segment)
            self.above[segment.lower].append(segment)

    def sorted_by_neighbours(
        self, row: list[Vertex], fixed: list[Vertex], upwards: bool
    ) -> list[Vertex]:
        """A row by the mean places of its neighbours; without any, a vertex keeps its place."""
        place = {vertex: index for index, vertex in enumerate(fixed)}
        keys: dict[Vertex, float] = {}
        for index, vertex in enumerate(row):
            if upwards:
                places = [place[s.lower] for s in self.below[vertex]]
            else:
                # Ports are a fraction of a place: they order the lines into one vertex.
                places = [place[s.upper] + s.port / 100 for s in self.above[vertex]]
            own = (index + 0.5) / len(row) * len(fixed)
            keys[vertex] = sum(places) / len(places) if places else own
        return sorted(row, key=keys.__getitem__)

    def crossings(self, order: Sequence[Sequence[Vertex]]) -> int:
        total = 0
        for lower, upper in zip(order[:-1], order[1:], strict=True):
            place = {vertex: index for index, vertex in enumerate(upper)}
            seen: list[tuple[int, float]] = []
            for vertex in lower:
                ends = [(place[s.upper], s.port) for s in self.above[vertex]]
                total += sum(len(seen) - bisect_right(seen, end) for end in ends)
                for end in ends:
                    insort(seen, end)
        return total


def count_crossings(rows: Sequence[Sequence[Vertex]], segments: Sequence[Segment[Vertex]]) -> int:
    """How many pairs of segments cross when the rows have this order."""
    return _Links(rows, segments).crossings(rows)


def place_rows(
    rows: Sequence[Sequence[Vertex]],
    segments: Sequence[Segment[Vertex]],
    separations: Sequence[Sequence[float]],
    bounds: tuple[float, float],
    anchors: Mapping[Vertex, float] | None = None,
) -> dict[Vertex, float]:
    """The position of each vertex.

    Args:
        rows: from the lowest to the highest, each from left to right.
        segments: between neighbouring rows.
        separations: for each row, the least distance from each vertex to the next.
        bounds: the least and the largest position; what does not fit is centred.
        anchors: positions that vertices have already; they leave them only where the separations
            between them are too large.
    """
    anchors = anchors or {}
    links = _Links(rows, segments)
    middle = sum(bounds) / 2
    positions: dict[Vertex, float] = {}
    for row, gaps in zip(rows, separations, strict=True):
        x = middle - sum(gaps) / 2
        for vertex, gap in zip(row, (*gaps, 0.0), strict=True):
            positions[vertex] = x
            x += gap
    positions.update(anchors)
    for sweep in range(_PLACE_SWEEPS):
        turn = range(len(rows)) if sweep % 2 == 0 else range(len(rows) - 1, -1, -1)
        for index in turn:
            _place_row(rows[index], separations[index], bounds, links, positions, anchors)
    return positions


def _place_row(
    row: Sequence[Vertex],
    gaps: Sequence[float],
    bounds: tuple[float, float],
    links: _Links[Vertex],
    positions: dict[Vertex, float],
    anchors: Mapping[Vertex, float],
) -> None:
    offsets = [0.0]
    for gap in gaps:
        offsets.append(offsets[-1] + gap)
    targets, weights = [], []
    for vertex, offset in zip(row, offsets, strict=True):
        wanted = [(positions[s.lower] - s.port, s.weight) for s in links.below[vertex]]
        wanted += [(positions[s.upper] + s.port, s.weight) for s in links.above[vertex]]
        weight = sum(w for _, w in wanted)
        mean = sum(x * w for x, w in wanted) / weight if weight else positions[vertex]
        anchored = vertex in anchors
        targets.append((anchors[vertex] if anchored else mean) - offset)
        weights.append(_ANCHOR_WEIGHT if anchored else weight or 0.1)
    low, high = bounds[0], bounds[1] - offsets[-1]
    if low > high:
        low = high = (low + high) / 2
    for vertex, offset, x in zip(row, offsets, _isotonic(targets, weights), strict=True):
        positions[vertex] = min(max(x, low), high) + offset


def _isotonic(targets: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence that is nearest to the targets in weighted least squares."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for target, weight in zip(targets, weights, strict=True):
        block = (target, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, heavy, length = blocks.pop()
            total = heavy + block[1]
            block = ((mean * heavy + block[0] * block[1]) / total, total, length + block[2])
        blocks.append(block)
    return [mean for mean, _, length in blocks for _ in range(length)]
