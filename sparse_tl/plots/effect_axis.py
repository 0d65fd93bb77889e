"""The horizontal axis of curves of explained effect: linear or logarithmic numbers of parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparse_tl.circuits.seeds import SeedCurves
from sparse_tl.plots.panels import ticks

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def extent(curves: Sequence[SeedCurves], log: bool) -> tuple[float, float]:
    """The ends of an axis, without margin."""
    measured = sorted({size for seeds in curves for curve in seeds.curves for size in curve.sizes})
    stop = float(axis_places(measured, log)[-1])
    if not log:
        return 0.0, max(stop, 1.0)
    lowest = next((size for size in measured if size > 0), 1)
    start = len(str(lowest)) - 1
    # A size of 0 is drawn at the start, away from the others.
    start -= measured[0] == 0 and lowest == 10**start and start > 0
    return float(start), max(stop, start + 1.0)


def axis_places(sizes: Sequence[float], log: bool) -> np.ndarray:
    """Positions of sizes on an axis, in units of its range."""
    return np.log10(np.maximum(sizes, 1)) if log else np.asarray(sizes, dtype=float)


def axis_ticks(start: float, stop: float, log: bool) -> dict[str, Any]:
    """Ticks at round numbers, or at powers of ten."""
    if not log:
        return ticks(start, stop, 5, whole=True)
    powers = range(round(start), math.floor(stop + 1e-9) + 1)
    texts = ["10" + str(power).translate(_SUPERSCRIPTS) for power in powers]
    return {"tickvals": [10**power for power in powers], "ticktext": texts}
