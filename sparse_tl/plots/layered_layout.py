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

import math
from bisect import bisect_right, insort
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

_ORDER_SWEEPS = 24
_PLACE_SWEEPS = 16
_ANCHOR_WEIGHT = 1e6


Vertex = TypeVar("Vertex", bound=Hashable)
Numbers = NDArray[np.int_]
Values = NDArray[np.float64]


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
    net = _Net(rows, segments)
    order = net.rows
    best, fewest = order, net.crossings(order)
    for sweep in range(_ORDER_SWEEPS):
        upwards = sweep % 2 == 0
        turn = range(1, len(order)) if upwards else range(len(order) - 2, -1, -1)
        order = list(order)
        for index in turn:
            fixed = order[index - 1] if upwards else order[index + 1]
            order[index] = net.sorted_by_neighbours(index, order[index], fixed, upwards)
        crossings = net.crossings(order)
        if crossings < fewest:
            best, fewest = order, crossings
    return [[net.vertices[number] for number in row] for row in best]


@dataclass(frozen=True, eq=False)
class _Gap:
    """The segments between a row and the next one, their ends by number."""

    lower: Numbers
    upper: Numbers
    weight: Values
    port: Values


class _Net(Generic[Vertex]):
    """The graph in numbers: vertices count from 0, row by row as they are given."""

    def __init__(
        self, rows: Sequence[Sequence[Vertex]], segments: Sequence[Segment[Vertex]]
    ) -> None:
        self.vertices = [vertex for row in rows for vertex in row]
        number = {vertex: index for index, vertex in enumerate(self.vertices)}
        ends = np.cumsum([len(row) for row in rows])
        self.rows = [
            np.arange(end - len(row), end) for row, end in zip(rows, ends.tolist(), strict=True)
        ]
        lower = np.array([number[s.lower] for s in segments], dtype=int)
        upper = np.array([number[s.upper] for s in segments], dtype=int)
        weight = np.array([s.weight for s in segments], dtype=float)
        port = np.array([s.port for s in segments], dtype=float)
        row = np.searchsorted(ends, lower, side="right")
        if not (np.searchsorted(ends, upper, side="right") == row + 1).all():
            raise ValueError("expected segments between neighbouring rows; one skips a row")
        between = [row == index for index in range(len(rows) - 1)]
        self.gaps = [_Gap(lower[at], upper[at], weight[at], port[at]) for at in between]

    def _places(self, rows: Sequence[Numbers]) -> Numbers:
        """By vertex, the place that it has in its row; only for the vertices of these rows."""
        place = np.zeros(len(self.vertices), dtype=int)
        for row in rows:
            place[row] = np.arange(len(row))
        return place

    def sorted_by_neighbours(
        self, index: int, row: Numbers, fixed: Numbers, upwards: bool
    ) -> Numbers:
        """A row by the mean places of its neighbours; without any, a vertex keeps its place."""
        place = self._places([row, fixed])
        if upwards:
            gap = self.gaps[index - 1]
            mine, theirs = place[gap.upper], place[gap.lower].astype(float)
        else:
            gap = self.gaps[index]
            # Ports are a fraction of a place: they order the lines into one vertex.
            mine, theirs = place[gap.lower], place[gap.upper] + gap.port / 100
        count = np.bincount(mine, minlength=len(row))
        total = np.bincount(mine, theirs, minlength=len(row))
        own = (np.arange(len(row)) + 0.5) / len(row) * len(fixed)
        keys = np.where(count > 0, total / np.maximum(count, 1), own)
        return row[np.argsort(keys, kind="stable")]

    def crossings(self, order: Sequence[Numbers]) -> int:
        place, total = self._places(order), 0
        for gap in self.gaps:
            # From left to right by the lower end: how many before it end further right?
            _, ends = np.unique(place[gap.upper] + 1j * gap.port, return_inverse=True)
            seen: list[int] = []
            for end in ends[np.lexsort((ends, place[gap.lower]))].tolist():
                total += len(seen) - bisect_right(seen, end)
                insort(seen, end)
        return total


def count_crossings(rows: Sequence[Sequence[Vertex]], segments: Sequence[Segment[Vertex]]) -> int:
    """How many pairs of segments cross when the rows have this order."""
    net = _Net(rows, segments)
    return net.crossings(net.rows)


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
    net = _Net(rows, segments)
    anchored = np.array([(anchors or {}).get(vertex, math.nan) for vertex in net.vertices])
    offsets = [np.concatenate([[0.0], np.cumsum(gaps)]) for gaps in separations]
    middle = sum(bounds) / 2
    start = np.concatenate([middle - offset[-1] / 2 + offset for offset in offsets])
    positions = np.where(np.isnan(anchored), start, anchored)
    for sweep in range(_PLACE_SWEEPS):
        turn = range(len(rows)) if sweep % 2 == 0 else range(len(rows) - 1, -1, -1)
        for index in turn:
            row = net.rows[index]
            positions[row] = _placed_row(net, index, offsets[index], bounds, positions, anchored)
    return dict(zip(net.vertices, positions.tolist(), strict=True))


def _placed_row(
    net: _Net[Vertex],
    index: int,
    offsets: Values,
    bounds: tuple[float, float],
    positions: Values,
    anchored: Values,
) -> Values:
    """Where the vertices of a row go, given those of its neighbours."""
    row = net.rows[index]
    pulls = []  # which vertex, to where, how strongly
    if index > 0:
        gap = net.gaps[index - 1]
        pulls.append((gap.upper, positions[gap.lower] - gap.port, gap.weight))
    if index < len(net.gaps):
        gap = net.gaps[index]
        pulls.append((gap.lower, positions[gap.upper] + gap.port, gap.weight))
    total, pulled = np.zeros(len(row)), np.zeros(len(row))
    for vertices, wanted, weight in pulls:
        mine = vertices - row[0]
        total += np.bincount(mine, weight, minlength=len(row))
        pulled += np.bincount(mine, weight * wanted, minlength=len(row))
    mean = np.where(total > 0, pulled / np.where(total > 0, total, 1), positions[row])
    fixed = ~np.isnan(anchored[row])
    targets = np.where(fixed, anchored[row], mean) - offsets
    weights = np.where(fixed, _ANCHOR_WEIGHT, np.where(total > 0, total, 0.1))
    low, high = bounds[0], bounds[1] - offsets[-1]
    if low > high:
        low = high = (low + high) / 2
    x = _isotonic(targets.tolist(), weights.tolist())
    return np.clip(x, low, high) + offsets


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
