"""The static circuit diagram: an SVG that needs no script, no style sheet and no network.

Every group that the script of the interactive figure takes over carries ``data-role``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparse_tl.circuits.attention_graph import AttentionGraph, EdgeWeight
from sparse_tl.plots.diagram_layout import (
    LABEL_SIZE,
    Layout,
    PanelLayout,
    edge_path,
    prediction_arrow,
)
from sparse_tl.plots.diagram_styles import STEPS, EdgeKind, grade, line_style
from sparse_tl.plots.drawn_edges import EdgeSelection
from sparse_tl.plots.figure_frame import Surround, panel_frame, xml_text
from sparse_tl.plots.palette import (
    ACCENT,
    INK,
    NODE_REACHED,
    NODE_UNREACHED,
    RESIDUAL,
    RESIDUAL_ON_PATH,
    RULE_WEIGHT,
)
from sparse_tl.plots.token_text import clip_text, visible_text

SCORE_NAMES = {"effect": "effect", "first-order": "first-order attribution"}


@dataclass(frozen=True, eq=False)
class Panel:
    """One frame with what it shows."""

    name: str
    flow: AttentionGraph
    selection: EdgeSelection
    weight: EdgeWeight


def draw_svg(
    panels: Sequence[Panel], layout: Layout, surround: Surround, *, target: int, limit: int
) -> str:
    """The figure as an SVG element.

    Args:
        panels: from top to bottom.
        layout: of these panels.
        surround: of the panels.
        target: index of the predicted character.
        limit: the threshold in thousandths, for the caption of each panel.
    """
    content = (
        part
        for index, panel in enumerate(panels)
        for part in _panel(index, panel, layout, target, limit)
    )
    return surround.svg(layout.width, layout.height, layout.panels, content)


def caption(selection: EdgeSelection, weight: EdgeWeight, limit: int) -> str:
    """How many attention edges a panel shows, in words."""
    shown = f"{selection.n_attention_edges:,} of {selection.n_possible_edges:,} attention edges"
    threshold = f"\N{GREATER-THAN OR EQUAL TO} {limit / STEPS:.{3 if limit % 10 else 2}f}"
    if weight == "attention":
        return f"{shown} {threshold}"
    return f"{shown} {threshold} of the largest {SCORE_NAMES[weight]}; orange: hurts"


def _panel(index: int, panel: Panel, layout: Layout, target: int, limit: int) -> Iterator[str]:
    place, selection = layout.panels[index], panel.selection
    yield (
        f'<g data-panel="{index}" data-edges-shown="{len(selection.edges)}" '
        f'data-edges-on-path="{selection.n_on_path}" '
        f'data-attention-edges="{selection.n_attention_edges}">'
    )
    words = caption(selection, panel.weight, limit)
    yield from panel_frame(layout.left, layout.right, place, panel.name, words)
    for layer in range(panel.flow.n_layers):
        yield (
            f'<text x="{layout.columns[0] - 30}" y="{place.levels[layer + 1] + 4.5:g}" '
            f'text-anchor="end" font-size="{LABEL_SIZE:g}">Layer {layer}</text>'
        )
    yield from _residual_stream(panel, layout, place)
    yield '<g data-role="edges" fill="none" stroke-linecap="round">'
    yield from _edges(selection, layout, place)
    yield "</g>"
    yield from _nodes(selection, layout, place)
    column, read_at = panel.flow.targets[target]
    yield from _tokens("input", panel.flow.input_tokens, layout, place.input_y)
    yield from _tokens("output", panel.flow.output_tokens, layout, place.output_y, column)
    line, head = prediction_arrow(layout, place, column, read_at)
    yield (
        f'<path data-role="arrow" d="{line}" fill="none" stroke="{INK}" stroke-width="1.8"/>'
        f'<path data-role="arrow-head" d="{head}" fill="{INK}"/>'
    )
    yield "</g>"


def _residual_stream(panel: Panel, layout: Layout, place: PanelLayout) -> Iterator[str]:
    bottom, top = place.levels[0], place.levels[-1]
    every = "".join(f"M{x} {bottom}V{top}" for x in layout.columns)
    yield f'<path d="{every}" fill="none" stroke="{RESIDUAL}" stroke-width="{RULE_WEIGHT}"/>'
    on_path = "".join(
        f"M{layout.columns[column]} {place.levels[level - 1]}V{place.levels[level]}"
        for level, column in panel.selection.reached.nonzero().tolist()
        if level > 0
    )
    yield (
        f'<path data-role="residual-path" d="{on_path}" fill="none" '
        f'stroke="{RESIDUAL_ON_PATH}" stroke-width="{RULE_WEIGHT}"/>'
    )


def _edges(selection: EdgeSelection, layout: Layout, place: PanelLayout) -> Iterator[str]:
    """One path for all the lines of a style: thousands of lines stay a small file."""
    curves: dict[tuple[EdgeKind, int, bool], list[str]] = defaultdict(list)
    for edge in selection.edges:
        curves[edge.kind, grade(edge.value), edge.value < 0].append(
            edge_path(layout, place, edge.layer, edge.query, edge.key)
        )
    # Light lines first, then from the weakest to the strongest.
    order: dict[EdgeKind, int] = {"open": 0, "path": 1, "main": 2}
    for kind, strength, negative in sorted(curves, key=lambda style: (order[style[0]], *style[1:])):
        style = line_style(kind, strength, negative, layout.line_scale)
        yield (
            f'<path data-kind="{kind}" d="{"".join(curves[kind, strength, negative])}" '
            f'stroke="{style.stroke}" stroke-width="{style.width:g}"/>'
        )


def _nodes(selection: EdgeSelection, layout: Layout, place: PanelLayout) -> Iterator[str]:
    yield f'<g data-role="nodes" stroke-width="{RULE_WEIGHT}">'
    for level, y in enumerate(place.levels):
        for column, x in enumerate(layout.columns):
            reached = bool(selection.reached[level, column])
            fill, stroke = NODE_REACHED if reached else NODE_UNREACHED
            yield (
                f'<circle data-level="{level}" data-column="{column}" '
                f'data-reached="{str(reached).lower()}" cx="{x}" cy="{y}" '
                f'r="{layout.node_radius:g}" fill="{fill}" stroke="{stroke}"/>'
            )
    yield "</g>"


def _tokens(
    role: str, tokens: Sequence[str], layout: Layout, y: int, predicted: int | None = None
) -> Iterator[str]:
    anchor = "middle" if not layout.rotated else "end" if role == "input" else "start"
    yield f'<g data-role="{role}" font-size="{layout.token_size:g}" text-anchor="{anchor}">'
    for column, token in enumerate(tokens):
        x = layout.columns[column]
        text = visible_text(token)
        if layout.rotated:
            lean = x + (4 if role == "input" else 2)
            place = f'transform="translate({lean} {y}) rotate(-45)"'
        else:
            place = f'x="{x}" y="{y}"'
        emphasis = f' font-weight="bold" fill="{ACCENT}"' if column == predicted else ""
        clipped = clip_text(text, layout.token_size, layout.token_width)
        yield (
            f'<text data-column="{column}" {place}{emphasis}>{xml_text(clipped)}'
            f"<title>{xml_text(text)}</title></text>"
        )
    yield "</g>"
