"""Colours, widths and legend of a component diagram."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparse_tl.circuits.wiring import CROSSING
from sparse_tl.nodes import Node
from sparse_tl.plots import palette
from sparse_tl.plots.drawn_circuit import MERGED, DrawnCircuit, Link, View
from sparse_tl.plots.figure_frame import xml_text
from sparse_tl.plots.palette import LEGEND_SIZE, MUTED, OPEN_EDGE
from sparse_tl.plots.token_text import clip_text, text_width, visible_text

ONLY: tuple[palette.Colour, palette.Colour] = palette.MODEL_PAIRS[0]
"""Links of the first, and of the second of two circuits alone."""
SLOT_COLOURS: dict[str | None, palette.Colour] = {
    "q": palette.QUERY,
    "k": palette.KEY,
    "v": palette.VALUE,
    MERGED: palette.SEVERAL,
    CROSSING: palette.CROSSES,
    None: palette.RESIDUAL_READER,
}
SLOT_WORDS = {
    "q": "q: query",
    "k": "k: key",
    "v": "v: value",
    MERGED: "several of q, k, v",
    CROSSING: "attention: keys and values to query",
    None: "into MLP or logits",
}
_THIN, _THICK = 0.9, 4.6
# Share of the full colour: the lightest at which the weakest link can still be followed.
_WEAKEST = 0.8
_Entry = tuple[palette.Colour, float, str]


@dataclass(frozen=True)
class Style:
    """What a diagram says besides its circuits.

    Args:
        unit: unit of the scores.
        scored: whether there are scores.
        marked: nodes to frame, by legend entry.
        roles: role of nodes, by panel.
        columns: texts above the columns of positions.
        names: names of the circuits.
        captions: what is said below the name of each panel.
    """

    unit: str
    scored: bool
    marked: Mapping[str, Sequence[Node]]
    roles: Sequence[Mapping[str, str]]
    columns: Sequence[str]
    names: Sequence[str]
    captions: Sequence[str] = field(default=())


def full_colour(link: Link, view: View) -> palette.Colour:
    """The colour of a link on a path, at full strength."""
    if link.slot == CROSSING:
        return palette.CROSSES
    if view.difference:
        return palette.RESIDUAL_READER if link.only is None else ONLY[link.only]
    if view.colour == "sign":
        return (palette.RESIDUAL_READER, palette.HURTS, palette.HELPS)[link.sign]
    return SLOT_COLOURS[link.slot]


def link_stroke(link: Link, view: View) -> palette.Colour:
    """The colour of a link: lighter for a weaker one, and grey on no path."""
    if not link.on_path:
        return OPEN_EDGE
    share = _WEAKEST + (1 - _WEAKEST) * link.strength**0.5
    return palette.blend(palette.GROUND, full_colour(link, view), share)


def line_width(strength: float) -> float:
    """Width in pixels. Scores span orders of magnitude, so the square root separates weak ones."""
    return round(_THIN + (_THICK - _THIN) * strength**0.5, 2)


def node_paint(
    kind: str, state: str, role: str | None, only: int | None
) -> tuple[palette.Colour, palette.Colour, palette.Colour]:
    """Fill, line and text colour of a node."""
    if state == "absent":
        return (*palette.ABSENT_NODE, palette.ABSENT_NODE_INK)
    if only is not None:
        return palette.blend(palette.GROUND, ONLY[only], 0.15), ONLY[only], palette.INK
    if role is not None:
        colour = palette.ROLES[role]
        return palette.blend(palette.GROUND, colour, 0.25), colour, palette.INK
    if state == "open":
        return (*palette.OPEN_NODE, palette.OPEN_NODE_INK)
    own = {
        "head": palette.HEAD_NODE,
        "mlp": palette.MLP_NODE,
        "keys": (palette.GROUND, palette.CROSSES),
        "group": (palette.SUPERNODE, palette.SEVERAL),
    }
    return (*own.get(kind, palette.END_NODE), palette.INK)


def legend(panels: Sequence[DrawnCircuit], view: View, style: Style) -> list[_Entry]:
    """What the colours and widths in these panels mean."""
    links = [link for panel in panels for link in panel.links]
    used = {full_colour(link, view) for link in links if link.on_path}
    words: dict[Any, str]
    if view.difference:
        said = dict(
            zip(ONLY, (f"only {visible_text(name[:60])}" for name in style.names), strict=True)
        )
        words = {**said, palette.RESIDUAL_READER: "both", palette.CROSSES: SLOT_WORDS[CROSSING]}
    elif view.colour == "sign":
        words = {palette.HELPS: "helps (score < 0)", palette.HURTS: "hurts (score > 0)"}
        words[palette.CROSSES] = SLOT_WORDS[CROSSING]
    else:
        words = {SLOT_COLOURS[slot]: text for slot, text in SLOT_WORDS.items()}
    entries = [(colour, 3.0, text) for colour, text in words.items() if colour in used]
    if len(entries) > 1:
        entries.append((palette.TRUNK, 2.0, "trunk of several"))
    if any(not link.on_path for link in links):
        entries.append((OPEN_EDGE, 2.0, "on no path from input to logits"))
    if style.scored and links:
        shares = ((1.0, "largest |score|"), (0.25, "\N{VULGAR FRACTION ONE QUARTER} of it"))
        entries += [(palette.RESIDUAL_READER, line_width(share), text) for share, text in shares]
    roles = {role for panel in style.roles for role in panel.values()}
    entries += [(palette.ROLES[role], 9.0, role) for role in palette.ROLES if role in roles]
    names = {node for panel in style.marked.values() for node in panel}
    if names:
        marks = zip(style.marked, palette.MARKS, strict=False)
        entries += [(colour, palette.MARK_WEIGHT, name) for name, colour in marks]
    return entries


def legend_lines(entries: Sequence[_Entry], left: float, top: float, right: float) -> Iterator[str]:
    """The entries of the legend, in as many lines as they need."""
    x, y = left, top + 8
    for colour, width, text in entries:
        text = clip_text(text[:200], LEGEND_SIZE, right - left - 30)
        need = 25 + text_width(text, LEGEND_SIZE)
        if x > left and x + need > right:
            x, y = left, y + 19
        yield (
            f'<g font-size="{LEGEND_SIZE:g}" fill="{MUTED}"><path d="M{x:.1f} {y:g}h20" '
            f'stroke="{colour}" stroke-width="{width:g}"/><text x="{x + 25:.1f}" y="{y + 4:g}">'
            f"{xml_text(text)}</text></g>"
        )
        x += need + 14
