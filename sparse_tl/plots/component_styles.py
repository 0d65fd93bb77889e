"""Colours and thickness in a component diagram: what a line or a node looks like by what it is."""

from __future__ import annotations

from typing import Literal

from sparse_tl.nodes import Slot
from sparse_tl.plots.drawn_circuit import DrawnEdge
from sparse_tl.plots.edge_styles import Colour, blend
from sparse_tl.plots.figure_frame import BLUE, INK

LineColour = Literal["slot", "sign"]
NodeState = Literal["path", "open", "absent"]
"""On a path from the input to the logits; only at the end of a drawn edge; neither."""

OPEN_STROKE, OPEN_PORT = "#cdd2da", "#aab1bc"

SLOTS: tuple[Slot, ...] = ("q", "k", "v")

# Distinct for colour-blind readers too: vermilion, green, blue and grey, after Okabe and Ito.
_SLOT_COLOURS: dict[Slot | None, Colour] = {
    "q": (200, 82, 0),
    "k": (0, 136, 100),
    "v": (0, 98, 172),
    None: (72, 78, 90),
}
_HELPS, _HURTS, _UNSCORED = (10, 62, 140), (194, 84, 12), (72, 78, 90)
_WHITE: Colour = (255, 255, 255)
_THIN, _THICK = 0.8, 4.6

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
    return blend(_WHITE, _SLOT_COLOURS[slot], 1.0)


def sign_colour(hurts: bool) -> str:
    """The full colour of lines of edges that help or hurt."""
    return blend(_WHITE, _HURTS if hurts else _HELPS, 1.0)


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
        full = _UNSCORED
    else:
        full = _HURTS if edge.score > 0 else _HELPS
    return blend(_WHITE, full, 0.5 + 0.5 * edge.strength**0.5)


def node_paint(kind: str, state: NodeState) -> dict[str, str]:
    """SVG attributes of a node's box (fill, stroke) and of its text (ink)."""
    if state == "absent":
        return {"fill": "#ffffff", "stroke": "#e3e6eb", "ink": "#b4bac4"}
    if state == "open":
        return {"fill": "#ffffff", "stroke": "#b9c0ca", "ink": "#6b7380"}
    if kind == "head":
        return {"fill": "#dfeafa", "stroke": BLUE, "ink": INK}
    if kind == "mlp":
        return {"fill": "#efe9dc", "stroke": "#6d5a2e", "ink": INK}
    return {"fill": "#ffffff", "stroke": INK, "ink": INK}
