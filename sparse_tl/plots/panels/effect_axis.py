"""The horizontal axis of explained-effect curves: numbers of parts, linear or logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparse_tl.circuits.effect import SeedCurves
from sparse_tl.plots.panels.plotly_panels import ticks

_ASIDE = 0.5
"""Least distance of 0 from the first power of ten, in powers of ten."""
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def extent(curves: Sequence[SeedCurves], log: bool) -> tuple[float, float]:
    """The ends of an axis, without margin. A logarithmic axis starts at the largest power of ten up
    to the smallest size above 0 or, if 0 was measured, at a position for 0 below that power."""
    measured = sorted({size for seeds in curves for curve in seeds.curves for size in curve.sizes})
    if not log:
        return 0.0, max(float(measured[-1]), 1.0)
    first = len(str(next((size for size in measured if size > 0), 1))) - 1
    stop = max(math.log10(max(measured[-1], 1)), first + 1.0)
    aside = min(max(_ASIDE, (stop - first) / 6), 0.9)
    return first - aside * (measured[0] == 0), stop


def axis_positions(sizes: Sequence[float], start: float, log: bool) -> np.ndarray:
    """Positions of sizes on an axis, in units of its range; 0 is at its start."""
    return np.log10(np.maximum(sizes, 10**start)) if log else np.asarray(sizes, dtype=float)


def axis_ticks(start: float, stop: float, log: bool) -> dict[str, Any]:
    """Ticks at round numbers, or at 0 and powers of ten."""
    if not log:
        return ticks(start, stop, 5, whole=True)
    powers = range(math.ceil(start), math.floor(stop + 1e-9) + 1)
    labels = {10.0**power: "10" + str(power).translate(_SUPERSCRIPTS) for power in powers}
    if start < powers[0]:
        labels = {10.0**start: "0", **labels}
    return {"tickvals": list(labels), "ticktext": list(labels.values())}
