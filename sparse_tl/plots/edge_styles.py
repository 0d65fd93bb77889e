"""The colour and thickness of a line by its weight, in ten grades."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparse_tl.plots import palette

STEPS = 1000
"""Weights are whole numbers: the steps between a weight of 0 and a weight of 1."""

N_GRADES = 10

EdgeKind = Literal["open", "path", "main"]

# (weakest, strongest); blue for positive and orange for negative weights.
_COLOURS: dict[tuple[EdgeKind, bool], palette.Scale] = {
    ("main", False): palette.MAIN,
    ("main", True): palette.MAIN_NEGATIVE,
    ("path", False): palette.ON_PATH,
    ("path", True): palette.ON_PATH_NEGATIVE,
    ("open", False): palette.OFF_PATH,
    ("open", True): palette.OFF_PATH_NEGATIVE,
}
_WIDTHS: dict[EdgeKind, tuple[float, float]] = {
    "main": (1.3, 4.2),
    "path": (0.7, 2.0),
    "open": (0.7, 1.6),
}


@dataclass(frozen=True)
class LineStyle:
    """Stroke colour and width of a line, in pixels at full size."""

    stroke: str
    width: float


def grade(value: int) -> int:
    """The grade, 0..9, of a weight in thousandths."""
    return min(N_GRADES - 1, (abs(value) - 1) * N_GRADES // STEPS)


def line_style(kind: EdgeKind, grade: int, negative: bool, scale: float = 1.0) -> LineStyle:
    """How lines of a grade are drawn: darker and thicker with weight.

    Args:
        kind: of the edge.
        grade: of its weight, 0..9.
        negative: whether the weight is below 0.
        scale: thickness relative to a figure with wide columns; what is dark stays thicker.
    """
    share = (grade + 0.5) / N_GRADES
    weakest, strongest = _COLOURS[kind, negative]
    thin, thick = _WIDTHS[kind]
    # Most attention weights are small: the root keeps them apart from one another.
    tint = share**0.6
    width = (thin + (thick - thin) * share) * (max(scale, 0.6) if kind == "main" else scale)
    return LineStyle(palette.blend(weakest, strongest, tint), round(width, 2))
