"""The static component diagram: an SVG that needs no script, no style sheet and no network.

Every group that the script of the interactive figure takes over carries ``data-role``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce

from sparse_tl.nodes import Node
from sparse_tl.plots.component_curves import NodeBox, port_offset
from sparse_tl.plots.component_layout import (
    LAYER_TEXT_SIZE,
    NODE_HEIGHT,
    NODE_TEXT_SIZE,
    ComponentLayout,
)
from sparse_tl.plots.diagram_styles import (
    SIGN_LEGEND,
    SLOT_LEGEND,
    SLOTS,
    LineColour,
    NodeState,
    line_stroke,
    line_width,
    node_paint,
    sign_colour,
    slot_colour,
)
from sparse_tl.plots.drawn_circuit import DrawnCircuit, Seen
from sparse_tl.plots.figure_frame import MARGIN, Surround, panel_frame, xml_text
from sparse_tl.plots.palette import (
    BAND,
    FRAME_WEIGHT,
    GROUND,
    LEGEND_SIZE,
    MUTED,
    OPEN_EDGE,
    OPEN_PORT,
    RESIDUAL_READER,
)
from sparse_tl.plots.token_text import text_width

MINUS = "\N{MINUS SIGN}"


def draw_svg(
    panels: Sequence[DrawnCircuit],
    layout: ComponentLayout,
    surround: Surround,
    *,
    colour: LineColour,
    unit: str,
) -> str:
    """The figure as an SVG element.

    Args:
        panels: from top to bottom.
        layout: of these panels.
        surround: of the panels.
        colour: what the colour of a line shows.
        unit: of the scores, as it is written behind a number.
    """
    content = [
        part
        for index, panel in enumerate(panels)
        for part in _panel(index, panel, layout, colour, unit)
    ]
    with_scores = any(panel.has_scores for panel in panels)
    content.extend(_legends(layout, colour, with_scores))
    return surround.svg(layout.width, layout.height, layout.frames, content)


def score_text(score: float, unit: str) -> str:
    """A score with three digits and its unit."""
    return f"{score:.3g}".replace("-", MINUS) + (f" {unit}" if unit else "")


def caption(panel: DrawnCircuit, unit: str) -> str:
    """How many edges a panel shows, in words."""
    shown = len(panel.edges)
    words = (
        f"{shown:,} of {panel.n_kept:,} kept circuit edges (model: {panel.n_existing:,}); "
        f"{panel.n_on_path:,} on a path from input to logits"
    )
    scores = [abs(edge.score) for edge in panel.edges if edge.score is not None]
    if not scores:
        return words
    return f"{words}; |score| \N{GREATER-THAN OR EQUAL TO} {score_text(scores[-1], unit)}"


def _panel(
    index: int, panel: DrawnCircuit, layout: ComponentLayout, colour: LineColour, unit: str
) -> Iterator[str]:
    frame = layout.frames[index]
    yield (
        f'<g data-panel="{index}" data-edges-shown="{len(panel.edges)}" '
        f'data-edges-on-path="{panel.n_on_path}">'
    )
    yield from panel_frame(layout.left, layout.right, frame, panel.name, caption(panel, unit))
    yield f'<g data-role="content" transform="translate(0 {frame.top})">'
    for band in layout.bands:
        yield (
            f'<rect x="{layout.left + 8}" y="{band.top:g}" rx="4" fill="{BAND}" '
            f'width="{layout.right - layout.left - 16}" height="{band.bottom - band.top:g}"/>'
            f'<text x="{layout.left + 16}" y="{(band.top + band.bottom) / 2 + 4.5:g}" '
            f'font-size="{LAYER_TEXT_SIZE:g}" fill="{MUTED}">{band.label}</text>'
        )
    yield '<g data-role="edges" fill="none" stroke-linecap="round">'
    # Strong lines over weak ones, and lines on a path over all others.
    lines = sorted(panel.lines.items(), key=lambda ln: (ln[1].on_path < math.inf, -ln[0][0]))
    for (rank, reader), seen in lines:
        edge = panel.edges[rank]
        state = _state(seen)
        stroke = line_stroke(edge, colour) if state == "path" else OPEN_EDGE
        yield (
            f'<path data-edge="{rank}" data-source="{edge.source}" data-reader="{reader}" '
            f'{_seen_data(seen)} data-kind="{state}" d="{layout.path_data(edge, reader)}" '
            f'stroke="{stroke}" stroke-width="{line_width(edge.strength):g}"/>'
        )
    yield "</g>"
    yield from _nodes(panel, layout)
    yield "</g></g>"


def _state(seen: Seen) -> NodeState:
    if seen.on_path < math.inf:
        return "path"
    return "open" if seen.drawn < math.inf else "absent"


def _seen_data(seen: Seen) -> str:
    """How many edges have to be drawn for this to be drawn, and on a path: for the script."""
    return f'data-drawn="{seen.drawn}" data-on-path="{seen.on_path}"'.replace("inf", "Infinity")


def _nodes(panel: DrawnCircuit, layout: ComponentLayout) -> Iterator[str]:
    yield (
        f'<g data-role="nodes" font-size="{NODE_TEXT_SIZE:g}" text-anchor="middle" '
        f'stroke-width="{FRAME_WEIGHT}">'
    )
    for node, box in layout.boxes.items():
        seen = panel.nodes.get(node, Seen())
        paint = node_paint(node.kind, _state(seen))
        yield (
            f'<g data-node="{node}" data-kind="{node.kind}" data-state="{_state(seen)}" '
            f'{_seen_data(seen)} transform="translate({box.x:g} {box.y:g})">'
            f'<rect x="{-box.width / 2:g}" y="{-NODE_HEIGHT / 2:g}" width="{box.width:g}" '
            f'height="{NODE_HEIGHT}" rx="{4 if node.kind == "mlp" else 9}" '
            f'fill="{paint["fill"]}" stroke="{paint["stroke"]}"/>'
            f'<text y="4.1" fill="{paint["ink"]}">{node}</text>'
        )
        yield from _ports(node, panel, box)
        yield "</g>"
    yield "</g>"


def _ports(node: Node, panel: DrawnCircuit, box: NodeBox) -> Iterator[str]:
    """A dot for each slot that a drawn line enters, in colour where that line is on a path."""
    for slot in SLOTS:
        lines = [
            seen
            for (rank, reader), seen in panel.lines.items()
            if reader == node and panel.edges[rank].slot == slot
        ]
        if lines:
            seen = reduce(Seen.or_with, lines)
            yield (
                f'<circle data-slot="{slot}" {_seen_data(seen)} '
                f'cx="{port_offset(box.width, slot):.1f}" cy="{NODE_HEIGHT / 2:g}" r="2.6" '
                f'stroke="{GROUND}" stroke-width="0.8" '
                f'fill="{slot_colour(slot) if _state(seen) == "path" else OPEN_PORT}"/>'
            )


def _legends(layout: ComponentLayout, colour: LineColour, with_scores: bool) -> Iterator[str]:
    """The legend of each colouring, of which one is visible, and that of thickness."""
    slots = [
        (slot_colour(slot), 3.0, f"{slot}: {text}" if slot else text)
        for slot, text in SLOT_LEGEND.items()
    ]
    signs = [(sign_colour(hurts), 3.0, text) for hurts, text in SIGN_LEGEND.items()]
    yield f'<g data-role="legends" font-size="{LEGEND_SIZE:g}" fill="{MUTED}">'
    for name, entries in (("slot", slots), ("sign", signs)):
        if name == colour or with_scores:
            hidden = "" if name == colour else ' display="none"'
            entries = [*entries, (OPEN_EDGE, 2.0, "on no path from input to logits")]
            yield f'<g data-legend="{name}"{hidden}>'
            yield from _samples(entries, MARGIN + 4, layout.legend_y)
            yield "</g>"
    if with_scores:
        shares = ((1.0, "1"), (0.25, "\N{VULGAR FRACTION ONE QUARTER}"), (0.01, "0.01"))
        sizes = [(RESIDUAL_READER, line_width(share), text) for share, text in shares]
        heading = "|score| / largest:"
        start = layout.right - _samples_width(sizes) - text_width(heading, LEGEND_SIZE) - 4
        yield f'<text x="{start:.1f}" y="{layout.legend_y + 4:g}">{xml_text(heading)}</text>'
        start += text_width(heading, LEGEND_SIZE) + 4
        yield from _samples(sizes, start, layout.legend_y)
    yield "</g>"


_SAMPLE, _SAMPLE_GAP, _ENTRY_GAP = 20, 5, 14
_Entry = tuple[str, float, str]


def _samples(entries: Sequence[_Entry], x: float, y: float) -> Iterator[str]:
    """Pieces of line in a row, each with its stroke, its width and what it means."""
    for stroke, width, text in entries:
        yield (
            f'<path d="M{x:.1f} {y:g}h{_SAMPLE}" stroke="{stroke}" stroke-width="{width:g}"/>'
            f'<text x="{x + _SAMPLE + _SAMPLE_GAP:.1f}" y="{y + 4:g}">{xml_text(text)}</text>'
        )
        x += _entry_width(text)


def _entry_width(text: str) -> float:
    return _SAMPLE + _SAMPLE_GAP + text_width(text, LEGEND_SIZE) + _ENTRY_GAP


def _samples_width(entries: Sequence[_Entry]) -> float:
    return sum(_entry_width(text) for _, _, text in entries) - _ENTRY_GAP
