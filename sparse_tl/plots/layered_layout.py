"""Layered graph drawing: order each row to reduce crossings, then compute positions.

The method of Sugiyama, Tagawa and Toda, as in Graphviz's dot:

1. The caller assigns every vertex to a row. A line that skips rows gets a *bend*, a vertex of its
   own, in each row that it passes, so that every segment joins neighbouring rows.
2. Order: sweep up and down, sorting each row by the mean position of its neighbours in the row
   sorted before; keep the order with the fewest crossings.
3. Positions: sweep up and down, moving each row to the least-squares positions
   ``min sum_i w_i (x_i - d_i)^2`` under ``x_{i+1} - x_i >= separation``, where d_i is the weighted
   mean of the neighbours' positions. After subtracting the separations this is isotonic regression,
   solved exactly by pooling adjacent violators; bounds only clip the solution.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

_ORDER_SWEEPS = 8
_PLACE_SWEEPS = 10
_FREE_WEIGHT = 0.1
# Weight of a port offset, per pixel, when ordering the lines into one vertex.
_PORT_SHARE = 0.01

Vertex = Any
"""Any hashable value."""


@dataclass(frozen=True)
class Segment:
    """A line between neighbouring rows.

    Args:
        lower, upper: vertices at its ends.
        weight: strength of its preference for being vertical.
        port: offset of its end on the upper vertex, in pixels from the centre.
    """

    lower: Vertex
    upper: Vertex
    weight: float = 1.0
    port: float = 0.0


Rows = Sequence[Sequence[Vertex]]
"""Rows from bottom to top, each from left to right."""
Pulls = dict[Vertex, list[tuple[Vertex, float, float]]]
"""For each vertex its neighbours in the next row, with offset and weight."""


def order_rows(rows: Rows, segments: Sequence[Segment]) -> list[list[Vertex]]:
    """The vertices of each row from left to right, ordered so that few segments cross.

    Args:
        rows: initial order.
        segments: segments between neighbouring rows.
    """
    below, above = _pulls(segments)
    order = [list(row) for row in rows]
    best, fewest = list(order), count_crossings(order, segments)
    for sweep in range(_ORDER_SWEEPS):
        upwards = sweep % 2 == 0
        for index in range(1, len(order)) if upwards else range(len(order) - 2, -1, -1):
            fixed = order[index - 1] if upwards else order[index + 1]
            order[index] = _sorted(order[index], fixed, below if upwards else above)
        crossings = count_crossings(order, segments)
        if crossings < fewest:
            best, fewest = list(order), crossings
    return best


def _pulls(segments: Sequence[Segment]) -> tuple[Pulls, Pulls]:
    """The pulls on each vertex from the row below, and from the row above."""
    below: Pulls = defaultdict(list)
    above: Pulls = defaultdict(list)
    for segment in segments:
        below[segment.upper].append((segment.lower, -segment.port, segment.weight))
        above[segment.lower].append((segment.upper, segment.port, segment.weight))
    return below, above


def _sorted(row: list[Vertex], fixed: Sequence[Vertex], pulls: Pulls) -> list[Vertex]:
    """Sort a row by the mean positions of neighbours; a vertex without any keeps its place."""
    place = {vertex: index for index, vertex in enumerate(fixed)}
    keys: dict[Vertex, float] = {}
    for index, vertex in enumerate(row):
        places = [place[other] + _PORT_SHARE * shift for other, shift, _ in pulls[vertex]]
        own = (index + 0.5) / len(row) * len(fixed)
        key = sum(places) / len(places) if places else own
        # The script rounds alike, so that both order nearly equal means in the same way.
        keys[vertex] = math.floor(key * 1e6 + 0.5)
    return sorted(row, key=keys.__getitem__)


def count_crossings(rows: Rows, segments: Sequence[Segment]) -> int:
    """Number of pairs of segments that cross in this order of the rows."""
    place = {vertex: index for row in rows for index, vertex in enumerate(row)}
    height = {vertex: index for index, row in enumerate(rows) for vertex in row}
    gaps: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for segment in segments:
        ends = place[segment.lower], place[segment.upper] + _PORT_SHARE * segment.port
        gaps[height[segment.lower]].append(ends)
    total = 0
    for gap in map(np.array, gaps.values()):
        apart = gap[:, None] - gap  # at the lower and the upper end
        total += int(np.count_nonzero(apart.prod(axis=-1) < 0)) // 2
    return total


def place_rows(
    rows: Rows,
    segments: Sequence[Segment],
    separations: Sequence[Sequence[float]],
    bounds: tuple[float, float],
) -> dict[Vertex, float]:
    """The position of each vertex.

    Args:
        rows: rows in drawing order.
        segments: segments between neighbouring rows.
        separations: minimum distances between neighbours in each row.
        bounds: smallest and largest position; rows that do not fit are centred.
    """
    below, above = _pulls(segments)
    offsets = [list(accumulate(gaps, initial=0.0)) for gaps in separations]
    middle = sum(bounds) / 2
    x: dict[Vertex, float] = {}
    for row, offset in zip(rows, offsets, strict=True):
        x |= {vertex: middle - offset[-1] / 2 + o for vertex, o in zip(row, offset, strict=False)}
    for sweep in range(_PLACE_SWEEPS):
        for row, offset in list(zip(rows, offsets, strict=True))[:: 1 if sweep % 2 == 0 else -1]:
            targets, weights = [], []
            for vertex, o in zip(row, offset, strict=False):
                pulls = below[vertex] + above[vertex]
                total = sum(weight for _, _, weight in pulls)
                wanted = sum(weight * (x[other] + shift) for other, shift, weight in pulls)
                targets.append((wanted / total if pulls else x[vertex]) - o)
                weights.append(total if pulls else _FREE_WEIGHT)
            low, high = bounds[0], bounds[1] - offset[-1]
            if low > high:
                low = high = (low + high) / 2
            placed = isotonic(targets, weights)
            x |= {
                vertex: min(max(at, low), high) + o
                for vertex, at, o in zip(row, placed, offset, strict=False)
            }
    return x


def isotonic(targets: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to the targets in weighted least squares."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for target, weight in zip(targets, weights, strict=True):
        block = (target, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, heavy, length = blocks.pop()
            total = heavy + block[1]
            block = ((mean * heavy + block[0] * block[1]) / total, total, length + block[2])
        blocks.append(block)
    return [mean for mean, _, length in blocks for _ in range(length)]
