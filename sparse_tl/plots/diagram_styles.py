"""What lines and nodes of circuit diagrams look like, by what they are and how strong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparse_tl.nodes import Slot
from sparse_tl.plots import palette
from sparse_tl.plots.drawn_circuit import DrawnEdge

# ---- attention edges: ten grades of weight -------------------------------------------------------

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


# ---- component diagrams --------------------------------------------------------------------------

LineColour = Literal["slot", "sign"]
NodeState = Literal["path", "open", "absent"]
"""On a path from the input to the logits; only at the end of a drawn edge; neither."""

SLOTS: tuple[Slot, ...] = ("q", "k", "v")

_SLOT_COLOURS: dict[Slot | None, palette.Colour] = {
    "q": palette.QUERY,
    "k": palette.KEY,
    "v": palette.VALUE,
    None: palette.RESIDUAL_READER,
}
_THIN, _THICK = 0.8, 4.6
# Of the full colour; as light as the weakest line may be and still be followed.
_WEAKEST = 0.8

SLOT_LEGEND: dict[Slot | None, str] = {
    "q": "query",
    "k": "key",
    "v": "value",
    None: "into MLP or logits",
}
SIGN_LEGEND = {
    False: "helps (score < 0)",
    True: "hurts (score > 0)",
}


def slot_colour(slot: Slot | None) -> str:
    """The full colour of lines into this slot; ``None`` is an MLP or the logits."""
    return _SLOT_COLOURS[slot]


def sign_colour(hurts: bool) -> str:
    """The full colour of lines of edges that help or hurt."""
    return palette.HURTS if hurts else palette.HELPS


def line_width(strength: float) -> float:
    """Pixels at full size.

    Scores are spread over orders of magnitude: the root keeps the weaker ones apart.
    """
    return round(_THIN + (_THICK - _THIN) * strength**0.5, 2)


def line_stroke(edge: DrawnEdge, colour: LineColour) -> str:
    """The colour of a line on a path, lighter for weaker edges."""
    if colour == "slot":
        full = _SLOT_COLOURS[edge.slot]
    elif edge.score is None:
        full = palette.RESIDUAL_READER
    else:
        full = sign_colour(edge.score > 0)
    return palette.blend(palette.GROUND, full, _WEAKEST + (1 - _WEAKEST) * edge.strength**0.5)


def node_paint(kind: str, state: NodeState) -> dict[str, str]:
    """SVG attributes of a node's box (fill, stroke) and of its text (ink)."""
    if state == "absent":
        (fill, stroke), ink = palette.ABSENT_NODE, palette.ABSENT_NODE_INK
    elif state == "open":
        (fill, stroke), ink = palette.OPEN_NODE, palette.OPEN_NODE_INK
    else:
        own = {"head": palette.HEAD_NODE, "mlp": palette.MLP_NODE}
        (fill, stroke), ink = own.get(kind, palette.END_NODE), palette.INK
    return {"fill": fill, "stroke": stroke, "ink": ink}
