"""The static circuit diagram: an SVG without script, style sheet or network access.

Groups that the script of the interactive figure takes over carry ``data-role``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from sparse_tl.circuits.attention_graph import AttentionGraph, EdgeWeight
from sparse_tl.plots import palette
from sparse_tl.plots.diagram_layout import (
    Layout,
    PanelLayout,
    edge_path,
    prediction_arrow,
)
from sparse_tl.plots.diagram_legend import legend
from sparse_tl.plots.drawn_edges import STEPS, EdgeKind, EdgeSelection, RoundedGraph
from sparse_tl.plots.figure_frame import Surround, panel_frame, xml_text
from sparse_tl.plots.palette import (
    ACCENT,
    INK,
    LABEL_SIZE,
    NODE_REACHED,
    NODE_UNREACHED,
    RULE_WEIGHT,
)
from sparse_tl.plots.token_text import clip_text, shorten, visible_text

_N_GRADES = 10  # number of steps of edge weight

# (weakest, strongest); blue for positive and orange for negative weights.
_COLOURS: dict[EdgeKind, tuple[palette.Scale, palette.Scale]] = {
    "main": (palette.MAIN, palette.MAIN_NEGATIVE),
    "path": (palette.ON_PATH, palette.ON_PATH_NEGATIVE),
    "open": (palette.OFF_PATH, palette.OFF_PATH_NEGATIVE),
}
_WIDTHS: dict[EdgeKind, tuple[float, float]] = {
    "main": (1.3, 4.2),
    "path": (0.7, 2.0),
    "open": (0.7, 1.6),
}
_SCORE_NAMES = {"effect": "effect", "first-order": "first-order attribution"}


def line_styles(scale: float = 1.0) -> list[tuple[EdgeKind, palette.Colour, float]]:
    """Kind, colour and width of all lines, in drawing order: light kinds first, and within each
    kind weak grades first, in blue and in orange. Darker and thicker means more weight.

    Args:
        scale: thickness relative to a figure with wide columns; dark lines shrink less.
    """
    styles: list[tuple[EdgeKind, palette.Colour, float]] = []
    for kind in get_args(EdgeKind):
        thin, thick = _WIDTHS[kind]
        for grade in range(_N_GRADES):
            share = (grade + 0.5) / _N_GRADES
            width = (thin + (thick - thin) * share) * (max(scale, 0.6) if kind == "main" else scale)
            for weakest, strongest in _COLOURS[kind]:
                # Most attention weights are small: an exponent below 1 separates them.
                stroke = palette.blend(weakest, strongest, share**0.6)
                styles.append((kind, stroke, round(width, 2)))
    return styles


def draw_svg(
    panels: Sequence[tuple[RoundedGraph, EdgeSelection]],
    layout: Layout,
    surround: Surround,
    *,
    target: int,
    weight: EdgeWeight,
    limit: int,
) -> str:
    """The figure as an SVG element.

    Args:
        panels: graph and selected edges of each panel, from top to bottom.
        layout: layout of the panels.
        surround: title and arrows around the panels.
        target: index of the predicted token.
        weight: weight that lines show.
        limit: threshold in thousandths.
    """
    content: list[str] = []
    for index, (rounded, selection) in enumerate(panels):
        words = _caption(rounded, selection, weight, limit)
        content += _panel(index, rounded, selection, layout, target, words)
    graphs, bottom = [rounded.graph for rounded, _ in panels], layout.panels[-1].bottom
    content += legend(graphs, layout.left, layout.right, bottom, weight)
    return surround.svg(layout.width, layout.height, layout.panels, content)


def _caption(
    rounded: RoundedGraph, selection: EdgeSelection, weight: EdgeWeight, limit: int
) -> str:
    graph, shown = rounded.graph, rounded.shown(weight)
    n_possible = graph.n_layers * graph.n_heads * graph.n_pairs
    words = (
        f"{selection.n_attention_edges:,} of {n_possible:,} attention edges "
        f"\N{GREATER-THAN OR EQUAL TO} {limit / STEPS:.{3 if limit % 10 else 2}f}"
    )
    if shown != "attention":
        words += f" of the largest {_SCORE_NAMES[shown]}"
    return words + mlp_caption(graph)


def mlp_caption(graph: AttentionGraph) -> str:
    """Caption text about MLPs; empty without MLP gates."""
    if graph.mlps is None:
        return ""
    return f"; {int(graph.mlps.sum()):,} of {graph.mlps.numel():,} MLPs"


def _panel(
    index: int,
    rounded: RoundedGraph,
    selection: EdgeSelection,
    layout: Layout,
    target: int,
    caption: str,
) -> Iterator[str]:
    place, graph = layout.panels[index], rounded.graph
    yield (
        f'<g data-panel="{index}" data-edges-shown="{len(selection.edges)}" '
        f'data-edges-on-path="{selection.n_on_path}" '
        f'data-attention-edges="{selection.n_attention_edges}">'
    )
    yield from panel_frame(layout.left, layout.right, place, rounded.name, caption, below=True)
    for layer in range(graph.n_layers):
        yield (
            f'<text x="{layout.columns[0] - 24}" y="{place.levels[layer + 1] + 4.5:g}" '
            f'text-anchor="end" font-size="{LABEL_SIZE:g}">Layer {layer}</text>'
        )
    yield from _residual_stream(selection, layout, place)
    yield '<g data-role="edges" fill="none" stroke-linecap="round">'
    yield from _edges(selection, layout, place)
    yield "</g>"
    yield from _nodes(selection, layout, place)
    yield from _mlps(graph, layout, place)
    column, read_at = graph.targets[target]
    yield from _tokens("input", graph.input_tokens, layout, place.input_y)
    yield from _tokens("output", graph.output_row(target), layout, place.output_y, column)
    line, head = prediction_arrow(layout, place, column, read_at)
    yield (
        f'<path data-role="arrow" d="{line}" fill="none" stroke="{INK}" stroke-width="1.8"/>'
        f'<path data-role="arrow-head" d="{head}" fill="{INK}"/>'
    )
    yield "</g>"


def _residual_stream(selection: EdgeSelection, layout: Layout, place: PanelLayout) -> Iterator[str]:
    bottom, top = place.levels[0], place.levels[-1]
    every = "".join(f"M{x} {bottom}V{top}" for x in layout.columns)
    on_path = "".join(
        f"M{layout.columns[column]} {place.levels[below]}V{place.levels[below + 1]}"
        for below, column in selection.reached[1:].nonzero().tolist()
    )
    style = f'fill="none" stroke-width="{RULE_WEIGHT}"'
    yield (
        f'<path d="{every}" {style} stroke="{palette.RESIDUAL}"/>'
        f'<path data-role="residual-path" d="{on_path}" {style} '
        f'stroke="{palette.RESIDUAL_ON_PATH}"/>'
    )


def _edges(selection: EdgeSelection, layout: Layout, place: PanelLayout) -> Iterator[str]:
    """One path for all lines of a style, which keeps thousands of lines in a small file."""
    styles = line_styles(layout.line_scale)
    curves = [""] * len(styles)
    for edge in selection.edges:
        grade = (abs(edge.value) - 1) * _N_GRADES // STEPS
        kind = get_args(EdgeKind).index(edge.kind)
        style = 2 * (kind * _N_GRADES + grade) + (edge.value < 0)
        curves[style] += edge_path(layout, place, edge.layer, edge.query, edge.key)
    for (kind, stroke, width), data in zip(styles, curves, strict=True):
        if data:
            yield (
                f'<path data-kind="{kind}" d="{data}" stroke="{stroke}" stroke-width="{width:g}"/>'
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


def _mlps(graph: AttentionGraph, layout: Layout, place: PanelLayout) -> Iterator[str]:
    """A square below each node that an open MLP writes to; closed MLPs are not drawn."""
    if graph.mlps is None:
        return
    fill, stroke = palette.MLP_NODE
    side = layout.node_radius * 1.5
    yield f'<g data-role="mlps" fill="{fill}" stroke="{stroke}" stroke-width="{RULE_WEIGHT}">'
    for layer, column in graph.mlps.nonzero().tolist():
        x = layout.columns[column] - side / 2
        y = place.levels[layer + 1] + layout.node_radius + 2
        yield (
            f'<rect x="{x:g}" y="{y:g}" width="{side:g}" height="{side:g}" rx="1">'
            f"<title>MLP of layer {layer}, open</title></rect>"
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
        yield (
            f'<text data-column="{column}" {place}{emphasis}>{xml_text(drawn_token(text, layout))}'
            f"<title>{xml_text(shorten(text))}</title></text>"
        )
    yield "</g>"


def drawn_token(text: str, layout: Layout) -> str:
    """A visible text as far as it fits above or below its column."""
    return clip_text(text, layout.token_size, layout.token_width)
