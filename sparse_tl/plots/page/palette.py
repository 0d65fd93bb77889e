"""Visual style of all figures: colours by meaning, type sizes, line weights, dark theme.

Colours are for a white background. A dark figure is the light one with every colour inverted: mixed
92 % of the way to its negative, then its hue rotated by 180 degrees. Light and dark swap, and blue
stays blue. Both steps are linear in sRGB and equal the CSS filters ``invert`` and ``hue-rotate``:
one CSS rule inverts a page with everything that its scripts draw, and `dark_colour` and `dark_svg`
invert images consistently.

Reference: Filter Effects Module Level 1 (W3C), 8.5 and 8.6, for the matrix of the hue rotation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

Colour = str
"""``#rrggbb``."""

# ---- type ----------------------------------------------------------------------------------

FONT_FAMILY = "Helvetica Neue, Helvetica, Arial, Liberation Sans, DejaVu Sans, sans-serif"

TITLE_SIZE = 18.0
"""Font size of a figure's title in pixels, like all sizes here."""
PANEL_TITLE_SIZE = 14.0
"""Title of one plot among several, as in curves."""
LABEL_SIZE = 12.0
"""Axis titles, captions and tooltips."""
TICK_SIZE = 11.0
LEGEND_SIZE = 11.5

# ---- weights of lines, in pixels ---------------------------------------------------------------

RULE_WEIGHT = 1.4
"""Lines that encode no number: residual streams, levels, node outlines."""
CURVE_WEIGHT = 2.0
THIN_CURVE_WEIGHT = 1.3
"""For panels with one curve per head."""
DASHES = (4, 3)
"""Lengths of the strokes and gaps of a dashed line."""
INTERVAL_ALPHA = 0.18
"""Opacity of the shading around a mean."""

# ---- background and text -----------------------------------------------------------------------

BACKGROUND: Colour = "#ffffff"
CLEAR = "rgba(0,0,0,0)"
"""Background of a legend inside a plot: transparent, in light and dark."""
BAND: Colour = "#f6f7f9"
"""Background of one layer's nodes."""
INK: Colour = "#16181d"
MUTED: Colour = "#5c6470"
"""Captions, legends and ticks."""
ACCENT: Colour = "#0b3a86"
"""Selected items: the predicted token, nodes on its path, heads."""

# ---- rules: unobtrusive lines -----------------------------

GRID: Colour = "#e6e8ec"
AXIS: Colour = "#7d8590"
BORDER: Colour = "#aeb5c0"
RESIDUAL, RESIDUAL_ON_PATH = "#d3d7de", "#868e9b"
OPEN_EDGE = "#cdd2da"
"""Circuit edges on no path from the input to the logits."""
EMPTY_CELL: Colour = "#f2f3f5"

# ---- models ------------------------------------------------------------------------------------

DENSE, SPARSE = "#0072b2", "#d97400"
MODEL_PAIRS: tuple[tuple[Colour, Colour], ...] = ((DENSE, SPARSE), ("#004f3a", "#d070a8"))
"""(dense, sparse) for the first and the second pair of models in a figure."""

# ---- roles of heads ----------------------------------------------------------------------------

ROLES: dict[str, Colour] = {
    "facilitation": "#005f43",
    "irrelevance": "#0072b2",
    "interference": "#d94a2b",
    "random": "#868e9b",
}

# ---- kinds of heads, by behaviour ---------------------------------------------------------

KINDS_OF_HEADS: dict[str, Colour] = {
    "mover": "#0062ac",
    "negative mover": "#d94a2b",
    "suppression": "#a0522d",
    "inhibition": "#7b3294",
    "previous token": "#2c9aaf",
    "duplicate token": "#b87a00",
    "induction": "#005f43",
    "sink": "#868e9b",
    "copying": "#5aa02c",
    "negative copying": "#d070a8",
}

# ---- attention edges: from the weakest to the strongest weight ---------------------------------

Scale = tuple[Colour, Colour]

MAIN: Scale = ("#588acc", "#062462")
MAIN_NEGATIVE: Scale = ("#d5783c", "#8a2c06")
ON_PATH: Scale = ("#c7d9f0", "#86acdc")
ON_PATH_NEGATIVE: Scale = ("#f4d4c1", "#e8a47c")
OFF_PATH: Scale = ("#e2ebf6", "#c8d9ee")
OFF_PATH_NEGATIVE: Scale = ("#faeae1", "#f5d7c4")

ATTENTION: Scale = ("#f7fafe", "#08307a")
"""Cells of attention patterns."""
MASKED: Colour = "#cdd2da"
"""Hatching of cells that the causal mask excludes."""

# ---- circuit edges -----------------------------------------------------------------------------

QUERY, KEY, VALUE = "#c85200", "#008f6a", "#0062ac"
RESIDUAL_READER: Colour = "#2a2e37"
"""Edges into an MLP or the logits, and edges without a score."""
SEVERAL: Colour = "#7b3294"
"""Edges into several of q, k and v of a head."""
CROSSES: Colour = "#7a6a00"
"""Links between positions, through attention."""
TRUNK: Colour = "#8a92a0"
"""Trunks shared by edges of several colours."""
SUPERNODE: Colour = "#eadff0"
HELPS, HURTS = "#0a3e8c", "#c2540c"

# ---- frames of marked heads --------------------------------------------

MARKS: tuple[Colour, ...] = (
    "#290000",
    "#2c9aaf",
    "#9933cc",
    "#3c7c5c",
    "#70004b",
    "#b87a00",
    "#4c4c00",
)
"""Distinct from the colours of heads that help or hurt."""
MARK_WEIGHT = 2.2


# ---- nodes: (fill, line) -----------------------------------------------------------------------

NODE_REACHED = ("#bcd2f0", ACCENT)
NODE_UNREACHED = (BACKGROUND, BORDER)
HEAD_NODE = ("#dfeafa", ACCENT)
MLP_NODE = ("#efe9dc", "#6d5a2e")
END_NODE = (BACKGROUND, INK)
OPEN_NODE = (BACKGROUND, "#b9c0ca")
ABSENT_NODE = (BACKGROUND, "#e3e6eb")
OPEN_NODE_INK, ABSENT_NODE_INK = "#3d434d", "#6b7380"

# ---- mixing ------------------------------------------------------------------------------------


def channels(colour: Colour) -> tuple[int, int, int]:
    """Red, green and blue, 0..255."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return red, green, blue


def blend(start: Colour, end: Colour, share: float) -> Colour:
    """The colour at a given share of the way from `start` to `end`."""
    ends = zip(channels(start), channels(end), strict=True)
    return _hex(round(a + (b - a) * share) for a, b in ends)


# ---- dark --------------------------------------------------------------------------------------

_INVERTED = 0.92
DARK_FILTER = f"invert({_INVERTED}) hue-rotate(180deg)"
"""CSS filter that makes a page dark."""
_HALF_CIRCLE = ((-0.574, 1.43, 0.144), (0.426, 0.43, 0.144), (0.426, 1.43, -0.856))
_SVG_PAINT = re.compile(r'\b(fill|stroke)(="|: )(#[0-9a-fA-F]{6})(?=["; ])')


def dark_colour(colour: Colour) -> Colour:
    """The dark version of a colour."""
    negative = [255 * _INVERTED + part * (1 - 2 * _INVERTED) for part in channels(colour)]
    rotated = (sum(w * part for w, part in zip(row, negative, strict=True)) for row in _HALF_CIRCLE)
    return _hex(min(max(round(part), 0), 255) for part in rotated)


def dark_svg(svg: str) -> str:
    """An SVG document with its colours made dark, and its texts unchanged.

    Quotation marks in texts are escaped, so no text can look like an attribute.
    """
    return _SVG_PAINT.sub(lambda found: found[1] + found[2] + dark_colour(found[3]), svg)


def _hex(parts: Iterable[int]) -> Colour:
    return "#" + "".join(f"{part:02x}" for part in parts)
