"""Colours of a component diagram by meaning, and the texts of its legend."""

from __future__ import annotations

from typing import Any

from sparse_tl.circuits.paths import CROSSING
from sparse_tl.plots.page import palette
from sparse_tl.plots.page.palette import BACKGROUND, INK, Colour

ONLY: tuple[Colour, Colour] = palette.MODEL_PAIRS[0]
"""Links that only the first or only the second of two circuits has."""


def _node(line: Colour, share: float) -> tuple[Colour, Colour, Colour]:
    """Fill, line and text colour of a node: a share of the line's colour fills it."""
    return palette.blend(BACKGROUND, line, share), line, INK


COLOURS: dict[str, Any] = {
    # By the input that a link enters: q, k, v or several of a head; an MLP or the logits.
    "slots": {
        "q": palette.QUERY,
        "k": palette.KEY,
        "v": palette.VALUE,
        "several": palette.SEVERAL,
        CROSSING: palette.CROSSES,
        "": palette.RESIDUAL_READER,
    },
    "words": {
        "q": "q: query",
        "k": "k: key",
        "v": "v: value",
        "several": "several of q, k, v",
        CROSSING: "attention: keys and values to query",
        "": "into MLP or logits",
    },
    "shared": palette.TRUNK,
    "only": ONLY,
    "plain": palette.RESIDUAL_READER,
    "hurts": palette.HURTS,
    "helps": palette.HELPS,
    "open": palette.OPEN_EDGE,
    "band": palette.BAND,
    "ink": INK,
    "muted": palette.MUTED,
    "grid": palette.GRID,
    # Fill, line and text colour of nodes.
    "nodes": {
        "head": (*palette.HEAD_NODE, INK),
        "mlp": (*palette.MLP_NODE, INK),
        "keys": (BACKGROUND, palette.CROSSES, INK),
        "group": (palette.SUPERNODE, palette.SEVERAL, INK),
        "input": (*palette.END_NODE, INK),
        "logits": (*palette.END_NODE, INK),
    },
    "openNode": (*palette.OPEN_NODE, palette.OPEN_NODE_INK),
    "absentNode": (*palette.ABSENT_NODE, palette.ABSENT_NODE_INK),
    "roles": {
        role: _node(line, 0.25) for role, line in (palette.ROLES | palette.KINDS_OF_HEADS).items()
    },
    "sides": [_node(line, 0.15) for line in ONLY],
}
"""Colours and texts for the script."""
