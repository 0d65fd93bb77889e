"""The static component diagram: an SVG without script, style sheet or network access.

Groups that the script of the interactive figure takes over carry ``data-role``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from sparse_tl.nodes import Node, Slot
from sparse_tl.plots import palette
from sparse_tl.plots.component_curves import NodeBox, port_offset
from sparse_tl.plots.component_layout import (
    LAYER_TEXT_SIZE,
    MARK_HEIGHT,
    NODE_HEIGHT,
    NODE_TEXT_SIZE,
    ComponentLayout,
)
from sparse_tl.plots.drawn_circuit import DrawnCircuit, DrawnEdge, LineState
from sparse_tl.plots.figure_frame import MARGIN, Surround, panel_frame, xml_text
from sparse_tl.plots.palette import LEGEND_SIZE, MUTED, OPEN_EDGE
from sparse_tl.plots.token_text import text_width

LineColour = Literal["slot", "sign"]

SLOT_COLOURS: dict[Slot | None, palette.Colour] = {
    "q": palette.QUERY,
    "k": palette.KEY,
    "v": palette.VALUE,
    None: palette.RESIDUAL_READER,
}
_THIN, _THICK = 0.8, 4.6
_MARK_GAP = 2.0
# Share of the full colour: the lightest at which the weakest line can still be followed.
_WEAKEST = 0.8

_Entry = tuple[palette.Colour, float, str]
"""A legend entry: colour and width of a line, and its meaning."""
_LEGENDS: dict[LineColour, list[_Entry]] = {
    "slot": [
        (palette.QUERY, 3.0, "q: query"),
        (palette.KEY, 3.0, "k: key"),
        (palette.VALUE, 3.0, "v: value"),
        (palette.RESIDUAL_READER, 3.0, "into MLP or logits"),
    ],
    "sign": [
        (palette.HELPS, 3.0, "helps (score < 0)"),
        (palette.HURTS, 3.0, "hurts (score > 0)"),
    ],
}


def draw_svg(
    panels: Sequence[DrawnCircuit],
    layout: ComponentLayout,
    surround: Surround,
    *,
    colour: LineColour,
    unit: str,
    marked: Mapping[str, Sequence[Node]],
) -> str:
    """The figure as an SVG element.

    Args:
        panels: drawn circuits, from top to bottom.
        layout: layout of the panels.
        surround: title and arrows around the panels.
        colour: what the colour of a line encodes.
        unit: unit written after scores.
        marked: nodes to frame in every panel, by legend entry.
    """
    content = [
        part
        for index, panel in enumerate(panels)
        for part in _panel(index, panel, layout, colour, unit, marked)
    ]
    with_scores = any(panel.has_scores for panel in panels)
    content.extend(_legends(layout, colour, with_scores))
    content.extend(_mark_legend(layout, marked))
    return surround.svg(layout.width, layout.height, layout.frames, content)


def score_text(score: float, unit: str) -> str:
    """A score with three significant digits and its unit."""
    return f"{score:.3g}".replace("-", "\N{MINUS SIGN}") + (f" {unit}" if unit else "")


def line_stroke(edge: DrawnEdge, colour: LineColour) -> palette.Colour:
    """The colour of a line on a path, lighter for weaker edges."""
    if colour == "slot":
        full = SLOT_COLOURS[edge.edge.destination.slot]
    elif edge.score is None:
        full = palette.RESIDUAL_READER
    else:
        full = palette.HURTS if edge.score > 0 else palette.HELPS
    return palette.blend(palette.GROUND, full, _WEAKEST + (1 - _WEAKEST) * edge.strength**0.5)


def node_paint(kind: str, state: LineState) -> dict[str, palette.Colour]:
    """SVG colours of a node's box (fill, stroke) and text (ink)."""
    if state == "absent":
        (fill, stroke), ink = palette.ABSENT_NODE, palette.ABSENT_NODE_INK
    elif state == "open":
        (fill, stroke), ink = palette.OPEN_NODE, palette.OPEN_NODE_INK
    else:
        own = {"head": palette.HEAD_NODE, "mlp": palette.MLP_NODE}
        (fill, stroke), ink = own.get(kind, palette.END_NODE), palette.INK
    return {"fill": fill, "stroke": stroke, "ink": ink}


def _caption(panel: DrawnCircuit, unit: str) -> str:
    words = (
        f"{len(panel.edges):,} of {panel.n_kept:,} kept circuit edges (model: "
        f"{panel.n_existing:,}); {panel.n_on_path:,} on a path from input to logits"
    )
    if not panel.has_scores:
        return words
    smallest = score_text(abs(panel.edges[-1].score or 0.0), unit)
    return f"{words}; |score| \N{GREATER-THAN OR EQUAL TO} {smallest}"


def _panel(
    index: int,
    panel: DrawnCircuit,
    layout: ComponentLayout,
    colour: LineColour,
    unit: str,
    marked: Mapping[str, Sequence[Node]],
) -> Iterator[str]:
    frame = layout.frames[index]
    yield (
        f'<g data-panel="{index}" data-edges-shown="{len(panel.edges)}" '
        f'data-edges-on-path="{panel.n_on_path}">'
    )
    yield from panel_frame(layout.left, layout.right, frame, panel.name, _caption(panel, unit))
    yield f'<g data-role="content" transform="translate(0 {frame.top})">'
    for band in layout.bands:
        yield (
            f'<rect x="{layout.left + 8}" y="{band.top:g}" rx="4" fill="{palette.BAND}" '
            f'width="{layout.right - layout.left - 16}" height="{band.bottom - band.top:g}"/>'
            f'<text x="{layout.left + 16}" y="{(band.top + band.bottom) / 2 + 4.5:g}" '
            f'font-size="{LAYER_TEXT_SIZE:g}" fill="{MUTED}">{band.label}</text>'
        )
    yield '<g data-role="edges" fill="none" stroke-linecap="round">'
    yield from _lines(panel, layout, colour)
    yield "</g>"
    yield (
        f'<g data-role="nodes" font-size="{NODE_TEXT_SIZE:g}" text-anchor="middle" '
        f'stroke-width="{palette.FRAME_WEIGHT}">'
    )
    for node, box in layout.boxes.items():
        yield from _node(node, box, panel)
    yield "</g>"
    yield from _marks(layout, marked)
    yield "</g></g>"


def _lines(panel: DrawnCircuit, layout: ComponentLayout, colour: LineColour) -> Iterator[str]:
    ranked = [(edge, rank, line) for rank, edge in enumerate(panel.edges) for line in edge.lines]
    # Strong lines above weak ones, and lines on a path above all others.
    ranked.sort(key=lambda drawn: (drawn[2] in panel.on_path, -drawn[1]))
    for edge, rank, line in ranked:
        state = panel.state([line])
        stroke = line_stroke(edge, colour) if state == "path" else OPEN_EDGE
        yield (
            f'<path data-edge="{rank}" data-source="{line.source}" data-reader="{line.reader}" '
            f'data-slot="{line.slot or ""}" data-kind="{state}" d="{layout.curves[line]}" '
            f'stroke="{stroke}" stroke-width="{_line_width(edge.strength):g}"/>'
        )


def _line_width(strength: float) -> float:
    """Width in pixels. Scores span orders of magnitude, so the square root separates weak ones."""
    return round(_THIN + (_THICK - _THIN) * strength**0.5, 2)


def _node(node: Node, box: NodeBox, panel: DrawnCircuit) -> Iterator[str]:
    """A node's box, with a dot for each slot that a drawn line enters."""
    entering = [line for line in panel.lines if line.reader == node]
    state = panel.state([*entering, *(line for line in panel.lines if line.source == node)])
    paint = node_paint(node.kind, state)
    yield (
        f'<g data-node="{node}" data-kind="{node.kind}" data-state="{state}" '
        f'transform="translate({box.x:g} {box.y:g})">'
        f'<rect x="{-box.width / 2:g}" y="{-NODE_HEIGHT / 2:g}" width="{box.width:g}" '
        f'height="{NODE_HEIGHT}" rx="{4 if node.kind == "mlp" else 9}" '
        f'fill="{paint["fill"]}" stroke="{paint["stroke"]}"/>'
        f'<text y="4.1" fill="{paint["ink"]}">{node}</text>'
    )
    for slot, colour in SLOT_COLOURS.items():
        state = panel.state([line for line in entering if line.slot == slot])
        if slot and state != "absent":
            yield (
                f'<circle data-slot="{slot}" cx="{port_offset(box.width, slot):.1f}" '
                f'cy="{NODE_HEIGHT / 2:g}" r="2.6" stroke="{palette.GROUND}" stroke-width="0.8" '
                f'fill="{colour if state == "path" else palette.OPEN_PORT}"/>'
            )
    yield "</g>"


def _marks(layout: ComponentLayout, marked: Mapping[str, Sequence[Node]]) -> Iterator[str]:
    """A frame around every marked node; for nodes with several marks, the last mark is on top."""
    yield '<g data-role="marks" fill="none" pointer-events="none">'
    for nodes, colour in zip(marked.values(), palette.MARKS, strict=False):
        for node in nodes:
            if box := layout.boxes.get(node):
                width, height = box.width + 2 * _MARK_GAP, NODE_HEIGHT + 2 * _MARK_GAP
                yield (
                    f'<rect data-mark="{node}" x="{box.x - width / 2:g}" '
                    f'y="{box.y - height / 2:g}" width="{width:g}" height="{height:g}" rx="11" '
                    f'stroke="{colour}" stroke-width="{palette.MARK_WEIGHT:g}"/>'
                )
    yield "</g>"


# ---- legends -------------------------------------------------------------------------------------

_SAMPLE, _SAMPLE_GAP, _ENTRY_GAP = 20, 5, 14


def _legends(layout: ComponentLayout, colour: LineColour, with_scores: bool) -> Iterator[str]:
    """The legends of both colourings, one of them visible, and the legend of thickness."""
    yield f'<g data-role="legends" font-size="{LEGEND_SIZE:g}" fill="{MUTED}">'
    for name, entries in _LEGENDS.items():
        if name == colour or with_scores:
            hidden = "" if name == colour else ' display="none"'
            yield f'<g data-legend="{name}"{hidden}>'
            off_path = OPEN_EDGE, 2.0, "on no path from input to logits"
            yield from _samples([*entries, off_path], MARGIN + 4, layout.legend_y)
            yield "</g>"
    if with_scores:
        shares = ((1.0, "1"), (0.25, "\N{VULGAR FRACTION ONE QUARTER}"), (0.01, "0.01"))
        sizes = [(palette.RESIDUAL_READER, _line_width(share), text) for share, text in shares]
        heading = "|score| / largest:"
        widths = [_entry_width(text) for *_, text in sizes]
        samples = layout.right - sum(widths) + _ENTRY_GAP
        start = samples - text_width(heading, LEGEND_SIZE) - 4
        yield f'<text x="{start:.1f}" y="{layout.legend_y + 4:g}">{xml_text(heading)}</text>'
        yield from _samples(sizes, samples, layout.legend_y)
    yield "</g>"


def _mark_legend(layout: ComponentLayout, marked: Mapping[str, Sequence[Node]]) -> Iterator[str]:
    """Legend of the marks that some drawn node has."""
    entries = [
        (colour, palette.MARK_WEIGHT, name)
        for (name, nodes), colour in zip(marked.items(), palette.MARKS, strict=False)
        if not layout.boxes.keys().isdisjoint(nodes)
    ]
    if entries:
        yield f'<g data-role="mark-legend" font-size="{LEGEND_SIZE:g}" fill="{MUTED}">'
        yield from _samples(entries, MARGIN + 4, layout.legend_y + MARK_HEIGHT)
        yield "</g>"


def _samples(entries: Sequence[_Entry], x: float, y: float) -> Iterator[str]:
    """Line samples in a row, each with its meaning."""
    for stroke, width, text in entries:
        yield (
            f'<path d="M{x:.1f} {y:g}h{_SAMPLE}" stroke="{stroke}" stroke-width="{width:g}"/>'
            f'<text x="{x + _SAMPLE + _SAMPLE_GAP:.1f}" y="{y + 4:g}">{xml_text(text)}</text>'
        )
        x += _entry_width(text)


def _entry_width(text: str) -> float:
    return _SAMPLE + _SAMPLE_GAP + text_width(text, LEGEND_SIZE) + _ENTRY_GAP
