"""The static circuit diagram: an SVG without script, style sheet or network access.

The script of the interactive figure computes everything that depends on the drawn edges; on a page,
it redraws the groups with a ``data-role``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Literal, get_args

from sparse_tl.circuits.prompt.attention_graph import AttentionGraph, EdgeWeight
from sparse_tl.plots.diagrams.diagram_layout import Layout, PanelLayout, prediction_arrow
from sparse_tl.plots.diagrams.diagram_legend import legend
from sparse_tl.plots.page import palette
from sparse_tl.plots.page.figure_frame import Surround, panel_frame, xml_text
from sparse_tl.plots.page.palette import (
    ACCENT,
    BACKGROUND,
    INK,
    LABEL_SIZE,
    NODE_REACHED,
    NODE_UNREACHED,
    RULE_WEIGHT,
)
from sparse_tl.plots.page.token_text import clip_text, shorten, visible_text

EdgeKind = Literal["open", "path", "main"]

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


def line_styles(scale: float = 1.0) -> list[tuple[EdgeKind, palette.Colour, float, str]]:
    """Kind, colour, width and dashes of all lines, in drawing order: light kinds first, within
    a kind weak grades first, each in blue and in orange. Stronger lines are darker and thicker.

    Args:
        scale: thickness relative to a figure with wide columns; dark lines shrink less.
    """
    styles: list[tuple[EdgeKind, palette.Colour, float, str]] = []
    for kind in get_args(EdgeKind):
        thin, thick = _WIDTHS[kind]
        for grade in range(_N_GRADES):
            share = (grade + 0.5) / _N_GRADES
            width = (thin + (thick - thin) * share) * (max(scale, 0.6) if kind == "main" else scale)
            for weakest, strongest in _COLOURS[kind]:
                # Most attention weights are small: an exponent below 1 separates them.
                stroke = palette.blend(weakest, strongest, share**0.6)
                styles.append((kind, stroke, round(width, 2), palette.dots(width)))
    return styles


def draw_svg(
    panels: Sequence[tuple[AttentionGraph, Mapping[str, Any]]],
    layout: Layout,
    surround: Surround,
    *,
    target: int,
    weight: EdgeWeight,
) -> str:
    """The figure as an SVG element.

    Args:
        panels: graph of each panel, from top to bottom, with its ``firstView`` from
            ``attention_edges.js``.
        layout: layout of the panels.
        surround: title and arrows around the panels.
        target: index of the predicted token.
        weight: weight shown by lines.
    """
    content: list[str] = []
    for index, (graph, view) in enumerate(panels):
        content += _panel(index, surround.names[index], graph, view, layout, target)
    graphs, bottom = [graph for graph, _ in panels], layout.panels[-1].bottom
    estimated = any(view["estimated"] for _, view in panels)
    content += legend(graphs, layout.left, layout.right, bottom, weight, estimated)
    return surround.svg(layout.width, layout.height, layout.panels, content)


def _panel(
    index: int,
    name: str,
    graph: AttentionGraph,
    view: Mapping[str, Any],
    layout: Layout,
    target: int,
) -> Iterator[str]:
    panel = layout.panels[index]
    yield f'<g data-panel="{index}"{_attributes(view["counts"])}>'
    yield from panel_frame(layout.left, layout.right, panel, name, view["caption"], below=True)
    yield from _residual_stream(view["residual"], layout, panel)
    yield from _folds(layout, panel)
    yield '<g data-role="edges" fill="none" stroke-linecap="round">'
    for path in view["edges"]:
        yield f"<path{_attributes(path)}/>"
    yield "</g>"
    yield from _nodes(set(view["reached"]), set(view["ends"]), layout, panel)
    yield from _mlps(graph, layout, panel)
    yield from _layer_names(graph.n_layers, layout, panel)
    column, read_at = graph.targets[target]
    yield from _tokens("input", graph.input_tokens, layout, panel.input_y)
    yield from _tokens("output", graph.output_row(target), layout, panel.output_y, column)
    line, head = prediction_arrow(layout, panel, column, read_at)
    yield (
        f'<path data-role="arrow" d="{line}" fill="none" stroke="{INK}" stroke-width="1.8"/>'
        f'<path data-role="arrow-head" d="{head}" fill="{INK}"/>'
    )
    yield "</g>"


def _attributes(attributes: Mapping[str, Any]) -> str:
    return "".join(f' {name}="{value}"' for name, value in attributes.items())


def _residual_stream(on_path: str, layout: Layout, panel: PanelLayout) -> Iterator[str]:
    every = "".join(f"M{x} {panel.levels[0]}V{panel.levels[-1]}" for x in layout.columns)
    style = f'fill="none" stroke-width="{RULE_WEIGHT}"'
    yield (
        f'<path data-role="residual" d="{every}" {style} stroke="{palette.RESIDUAL}"/>'
        f'<path data-role="residual-path" d="{on_path}" {style} '
        f'stroke="{palette.RESIDUAL_ON_PATH}"/>'
    )


def _layer_names(n_layers: int, layout: Layout, panel: PanelLayout) -> Iterator[str]:
    """Layer names, with an outline, since scrolling pages move them over lines."""
    yield (
        f'<g data-role="layers" text-anchor="end" font-size="{LABEL_SIZE:g}" '
        f'paint-order="stroke" stroke="{BACKGROUND}" stroke-width="5" stroke-linejoin="round">'
    )
    step = math.ceil(LABEL_SIZE / panel.row)  # names of low rows would overlap
    folded = {last: f"Layers {first}–{last}" for first, last in panel.folds}
    for layer in range(n_layers):
        y = panel.levels[layer + 1] + 4.5
        own = f"Layer {layer}" if layer % step == 0 else ""
        hidden = ' display="none"' if layer + 1 in panel.hidden else ""
        yield (
            f'<text x="{layout.columns[0] - 24}" y="{y:g}" data-own="{own}"{hidden}>'
            f"{folded.get(layer, own)}</text>"
        )
    yield "</g>"


def _folds(layout: Layout, panel: PanelLayout) -> Iterator[str]:
    """A band over the residual streams in place of each run of folded layers."""
    left, right = layout.columns[0] - 14, layout.columns[-1] + 14
    yield f'<g data-role="folds" fill="{palette.BAND}" stroke="{palette.BORDER}">'
    for _, last in panel.folds:
        top, room = panel.levels[last + 1], panel.row - 2 * panel.node_radius - 4
        yield (
            f'<rect data-last="{last}" x="{left}" y="{top + (panel.row - room) / 2:g}" '
            f'width="{right - left}" height="{room:g}" rx="3" stroke-dasharray="3 3"/>'
        )
    yield "</g>"


def _nodes(on_path: Set[str], ends: Set[str], layout: Layout, panel: PanelLayout) -> Iterator[str]:
    yield f'<g data-role="nodes" stroke-width="{RULE_WEIGHT}">'
    for level, y in enumerate(panel.levels):
        for column, x in enumerate(layout.columns):
            node = f"{level},{column}"
            reached, radius = node in on_path, panel.radii[node in ends]
            fill, stroke = NODE_REACHED if reached else NODE_UNREACHED
            hidden = ' display="none"' if level in panel.hidden else ""
            yield (
                f'<circle data-level="{level}" data-column="{column}" '
                f'data-reached="{str(reached).lower()}" cx="{x}" cy="{y}" '
                f'r="{radius:g}" fill="{fill}" stroke="{stroke}"{hidden}/>'
            )
    yield "</g>"


def _mlps(graph: AttentionGraph, layout: Layout, panel: PanelLayout) -> Iterator[str]:
    """A square below each node that an open MLP writes to; closed MLPs are not drawn."""
    if graph.mlps is None:
        return
    fill, stroke = palette.MLP_NODE
    side = panel.node_radius * 1.5
    yield f'<g data-role="mlps" fill="{fill}" stroke="{stroke}" stroke-width="{RULE_WEIGHT}">'
    for layer, column in graph.mlps.nonzero().tolist():
        x = layout.columns[column] - side / 2
        y = panel.levels[layer + 1] + panel.node_radius + 2
        yield (
            f'<rect data-level="{layer + 1}" x="{x:g}" y="{y:g}" width="{side:g}" '
            f'height="{side:g}" rx="1">'
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
            at = f'transform="translate({lean} {y}) rotate(-45)"'
        else:
            at = f'x="{x}" y="{y}"'
        emphasis = f' font-weight="bold" fill="{ACCENT}"' if column == predicted else ""
        yield (
            f'<text data-column="{column}" {at}{emphasis}>{xml_text(drawn_token(text, layout))}'
            f"<title>{xml_text(shorten(text))}</title></text>"
        )
    yield "</g>"


def drawn_token(text: str, layout: Layout) -> str:
    """A visible text, clipped to the width of its column."""
    return clip_text(text, layout.token_size, layout.token_width)
