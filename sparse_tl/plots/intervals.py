"""The shaded area between the lower and the upper ends of intervals along a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def interval_area(
    x: Sequence[float], low: Sequence[float], high: Sequence[float], colour: str
) -> dict[str, Any]:
    """What makes a plotly line the area: it goes along the upper ends and back along the lower."""
    return {
        "x": [*x, *reversed(x)],
        "y": [*high, *reversed(low)],
        "mode": "lines",
        "line": {"width": 0},
        "fill": "toself",
        "fillcolor": colour,
        "showlegend": False,
        "hoverinfo": "skip",
    }
