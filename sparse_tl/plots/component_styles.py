"""Colours and thickness in a component diagram: what a line or a node looks like by what it is."""

from __future__ import annotations

from typing import Literal

from sparse_tl.nodes import Slot
from sparse_tl.plots import palette
from sparse_tl.plots.drawn_circuit import DrawnEdge
from sparse_tl.plots.palette import Colour, blend

LineColour = Literal["slot", "sign"]
NodeState = Literal["path", "open", "absent"]
"""On a path from the input to the logits; only at the end of a drawn edge; neither."""

SLOTS: tuple[Slot, ...] = ("q", "k", "v")

_SLOT_COLOURS: dict[Slot | None, Colour] = {
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
    return blend(palette.GROUND, full, _WEAKEST + (1 - _WEAKEST) * edge.strength**0.5)


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
