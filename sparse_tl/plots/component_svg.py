"""The static component diagram: an SVG without script, style sheet or network access.

It is 720 pixels wide: printed at 5.5 inches, its smallest text has 6 points. Above about 60 links
a printed picture shows where a circuit is busy; to follow single links, use the interactive page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparse_tl.circuits.wiring import CROSSING
from sparse_tl.nodes import Node
from sparse_tl.plots import palette
from sparse_tl.plots.component_layout import (
    LAYER_TEXT_SIZE,
    NODE_HEIGHT,
    NODE_TEXT_SIZE,
    ComponentLayout,
    Ends,
    lay_out,
    node_text,
)
from sparse_tl.plots.component_routes import Routes, Shape, all_ends, ends_of
from sparse_tl.plots.drawn_circuit import MERGED, DrawnCircuit, DrawnNode, Link, View
from sparse_tl.plots.figure_frame import MARGIN, PANEL_GAP, Frame, Surround, xml_text
from sparse_tl.plots.palette import FRAME_TITLE_SIZE, LABEL_SIZE, LEGEND_SIZE, MUTED, OPEN_EDGE
from sparse_tl.plots.token_text import clip_text, text_width, visible_text

WIDTH = 720
HEADING, COLUMN_HEADING = 54, 22

SHARED: palette.Colour = "#8a92a0"
"""Trunks whose links have several colours."""
ONLY: tuple[palette.Colour, palette.Colour] = palette.MODEL_PAIRS[0]
"""Links of the first, and of the second of two circuits alone."""
SEVERAL: palette.Colour = "#7b3294"
CROSSES: palette.Colour = "#7a6a00"
SLOT_COLOURS: dict[str | None, palette.Colour] = {
    "q": palette.QUERY,
    "k": palette.KEY,
    "v": palette.VALUE,
    MERGED: SEVERAL,
    CROSSING: CROSSES,
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


def draw_svg(
    nodes: Sequence[DrawnNode],
    panels: Sequence[DrawnCircuit],
    view: View,
    style: Style,
    surround: Surround,
) -> str:
    """The figure as an SVG element."""
    ends = [ends_of(panel.links, view.slots) for panel in panels]
    every = all_ends(dict(enumerate(ends)))
    left = surround.left
    label = max(
        (text_width(f"Layer {n.layer}", LAYER_TEXT_SIZE) for n in nodes if n.layer is not None),
        default=0.0,
    )
    bounds = (left + 14 + label, WIDTH - MARGIN - 8.0)
    layout = lay_out(nodes, every, view.labels, bounds, len(style.columns) or 1)
    routes = Routes(layout, every)
    above = HEADING + (COLUMN_HEADING if style.columns else 0)
    height = round(above + layout.height)
    frames = [Frame(surround.top + i * (height + PANEL_GAP), height) for i in range(len(panels))]
    content = [
        part
        for i, panel in enumerate(panels)
        for part in _panel(
            i, panel, ends[i], nodes, layout, routes, view, style, frames[i], left, above
        )
    ]
    bottom = frames[-1].top + height + 10
    entries = _legend(panels, view, style)
    lines = list(_legend_lines(entries, left + 6, bottom, WIDTH - MARGIN))
    content += lines
    total = bottom + 19 * len({line.split(' y="')[1].split('"')[0] for line in lines}) + MARGIN
    return surround.svg(WIDTH, round(total), frames, content)


def score_text(score: float, unit: str) -> str:
    """A score with three significant digits and its unit."""
    return f"{score:.3g}".replace("-", "\N{MINUS SIGN}") + (f" {unit}" if unit else "")


def full_colour(link: Link, view: View) -> palette.Colour:
    """The colour of a link on a path, at full strength."""
    if link.slot == CROSSING:
        return CROSSES
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
        "keys": (palette.GROUND, CROSSES),
        "group": ("#eadff0", SEVERAL),
    }
    return (*own.get(kind, palette.END_NODE), palette.INK)


def _panel(
    index: int,
    panel: DrawnCircuit,
    ends: Sequence[Ends],
    nodes: Sequence[DrawnNode],
    layout: ComponentLayout,
    routes: Routes,
    view: View,
    style: Style,
    frame: Frame,
    left: int,
    above: int,
) -> Iterator[str]:
    right = WIDTH - MARGIN
    room = right - left - 28
    name = clip_text(visible_text(panel.name[:200]), FRAME_TITLE_SIZE, room)
    caption = clip_text(style.captions[index], LABEL_SIZE, room)
    yield f'<g data-panel="{index}" data-edges-shown="{panel.n_edges}">'
    yield (
        f'<rect x="{left}" y="{frame.top}" width="{right - left}" height="{frame.height}" rx="7" '
        f'fill="{palette.GROUND}" stroke="{palette.INK}" stroke-width="{palette.FRAME_WEIGHT}"/>'
        f'<text x="{left + 14}" y="{frame.top + 24}" font-size="{FRAME_TITLE_SIZE:g}" '
        f'font-weight="bold">{xml_text(name)}</text>'
        f'<text x="{left + 14}" y="{frame.top + 43}" font-size="{LABEL_SIZE:g}" fill="{MUTED}" '
        f'data-role="caption">{xml_text(caption)}</text>'
        f'<g transform="translate(0 {frame.top + above})">'
    )
    yield from _grounds(layout, style.columns, left, right)
    yield '<g data-role="links" fill="none" stroke-linecap="round">'
    for shape in routes.shapes(panel.links, ends, lambda link: link_stroke(link, view), SHARED):
        yield _curve(shape, panel.links, nodes)
    yield f'</g><g font-size="{NODE_TEXT_SIZE:g}" text-anchor="middle">'
    roles = style.roles[0 if view.difference else index] if style.roles else {}
    for i, box in layout.boxes.items():
        near = [link for link in panel.links if i in (link.source, link.reader)]
        state = "path" if any(k.on_path for k in near) else "open" if near else "absent"
        sides = {link.only for link in near}
        only = sides.pop() if view.difference and len(sides) == 1 else None
        fill, line, ink = node_paint(nodes[i].kind, state, roles.get(nodes[i].name), only)
        top, start = box.y - NODE_HEIGHT / 2, box.x - box.width / 2
        yield (
            f'<g data-node="{xml_text(visible_text(nodes[i].name[:200]))}" data-state="{state}">'
            f'<rect x="{start:.1f}" y="{top:g}" width="{box.width:g}" height="{NODE_HEIGHT}" '
            f'rx="{3 if nodes[i].kind == "mlp" else 9}" fill="{fill}" stroke="{line}" '
            f'stroke-width="{palette.FRAME_WEIGHT}"/><text x="{box.x:.1f}" y="{box.y + 4:g}" '
            f'fill="{ink}">{xml_text(node_text(nodes[i], view.labels))}</text></g>'
        )
    yield "</g>"
    yield from _marks(nodes, layout, style.marked)
    yield "</g></g>"


def _grounds(
    layout: ComponentLayout, columns: Sequence[str], left: int, right: int
) -> Iterator[str]:
    """The backgrounds of layers, and the columns of positions."""
    for label, top, bottom in layout.bands:
        yield (
            f'<rect x="{left + 6}" y="{top:g}" rx="4" fill="{palette.BAND}" '
            f'width="{right - left - 12}" height="{bottom - top:g}"/>'
            f'<text x="{left + 12}" y="{(top + bottom) / 2 + 4.5:g}" '
            f'font-size="{LAYER_TEXT_SIZE:g}" fill="{MUTED}">{label}</text>'
        )
    for text, (start, end) in zip(columns, layout.columns, strict=False):
        said = clip_text(visible_text(text[:200]), LABEL_SIZE, end - start - 4)
        yield (
            f'<path d="M{end:.1f} -12V{layout.height - 6:g}" stroke="{palette.GRID}"/>'
            f'<text x="{(start + end) / 2:.1f}" y="-4" text-anchor="middle" '
            f'font-size="{LABEL_SIZE:g}" font-weight="bold">{xml_text(said)}</text>'
        )


def _curve(shape: Shape, links: Sequence[Link], nodes: Sequence[DrawnNode]) -> str:
    first = links[shape.links[0]]
    dashed = ' stroke-dasharray="5 3"' if first.slot == CROSSING and len(shape.links) == 1 else ""
    named = ""
    if len(shape.links) == 1:
        ends = f"{nodes[first.source].name}->{nodes[first.reader].name}"
        named = f' data-link="{xml_text(visible_text(ends[:200]))}"'
    return (
        f'<path{named} d="{shape.path}" stroke="{shape.stroke}" '
        f'stroke-width="{line_width(shape.strength):g}"{dashed}/>'
    )


def _marks(
    nodes: Sequence[DrawnNode], layout: ComponentLayout, marked: Mapping[str, Sequence[Node]]
) -> Iterator[str]:
    """A frame around every marked node; for nodes with several marks, the last mark is on top."""
    named = {nodes[i].name.split("@")[0]: box for i, box in layout.boxes.items()}
    for heads, colour in zip(marked.values(), palette.MARKS, strict=False):
        for head in heads:
            if box := named.get(str(head)):
                yield (
                    f'<rect data-mark="{head}" x="{box.x - box.width / 2 - 2:.1f}" '
                    f'y="{box.y - NODE_HEIGHT / 2 - 2:g}" width="{box.width + 4:g}" '
                    f'height="{NODE_HEIGHT + 4}" rx="11" stroke="{colour}" fill="none" '
                    f'stroke-width="{palette.MARK_WEIGHT:g}"/>'
                )


def _legend(panels: Sequence[DrawnCircuit], view: View, style: Style) -> list[_Entry]:
    """What the colours and widths in these panels mean."""
    links = [link for panel in panels for link in panel.links]
    used = {full_colour(link, view) for link in links if link.on_path}
    words: dict[Any, str]
    if view.difference:
        said = dict(zip(ONLY, (f"only {visible_text(name[:60])}" for name in style.names), strict=True))
        words = {**said, palette.RESIDUAL_READER: "both", CROSSES: SLOT_WORDS[CROSSING]}
    elif view.colour == "sign":
        words = {palette.HELPS: "helps (score < 0)", palette.HURTS: "hurts (score > 0)"}
        words[CROSSES] = SLOT_WORDS[CROSSING]
    else:
        words = {SLOT_COLOURS[slot]: text for slot, text in SLOT_WORDS.items()}
    entries = [(colour, 3.0, text) for colour, text in words.items() if colour in used]
    if len(entries) > 1:
        entries.append((SHARED, 2.0, "trunk of several"))
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


def _legend_lines(
    entries: Sequence[_Entry], left: float, top: float, right: float
) -> Iterator[str]:
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
