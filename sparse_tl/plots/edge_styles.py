"""The colour and thickness of a line by its weight, in ten grades."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

STEPS = 1000
"""Weights are whole numbers: the steps between a weight of 0 and a weight of 1."""

N_GRADES = 10

EdgeKind = Literal["open", "path", "main"]

Colour = tuple[int, int, int]

# (weakest, strongest); blue for positive and orange for negative weights.
_COLOURS: dict[tuple[EdgeKind, bool], tuple[Colour, Colour]] = {
    ("main", False): ((88, 138, 204), (6, 36, 98)),
    ("main", True): ((228, 142, 92), (138, 44, 6)),
    ("path", False): ((199, 217, 240), (134, 172, 220)),
    ("path", True): ((244, 212, 193), (232, 164, 124)),
    ("open", False): ((226, 235, 246), (200, 217, 238)),
    ("open", True): ((250, 234, 225), (245, 215, 196)),
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
    return LineStyle(blend(weakest, strongest, tint), round(width, 2))


def blend(start: Colour, end: Colour, share: float) -> str:
    """The colour that is so far on the way from one to the other, as ``#rrggbb``."""
    channels = (round(a + (b - a) * share) for a, b in zip(start, end, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in channels)
