"""Layout and static drawing of circuit diagrams, without script, style sheet or network access.

Coordinates are in pixels at full size. The script of the interactive figure computes everything
that depends on the drawn edges; on a page, it redraws the groups with a ``data-role``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from html import escape
from itertools import compress, groupby
from typing import Any, Literal, get_args

from jaxtyping import Bool
from torch import Tensor

from sparse_tl.circuits.prompt.attention import AttentionGraph, EdgeWeight
from sparse_tl.plots.page import palette
from sparse_tl.plots.page.palette import (
    ACCENT,
    BACKGROUND,
    FRAME_TITLE_SIZE,
    FRAME_WEIGHT,
    INK,
    LABEL_SIZE,
    MUTED,
    NODE_REACHED,
    NODE_UNREACHED,
    RULE_WEIGHT,
    TICK_SIZE,
)
from sparse_tl.plots.page.rendering import MARGIN, Surround, figure_start
from sparse_tl.plots.page.token_text import (
    SMALLEST_SIZE,
    clip_text,
    shorten,
    text_width,
    visible_text,
)

Folds = tuple[tuple[int, int], ...]
"""First and last layer of each run of layers that is drawn as one band."""

NARROWEST = 726
"""Width at which text of 11 px is 6 pt high in a column of 5.5 in."""

MOST_UNFOLDED = 12
"""Maximum number of layers of models whose layers are never folded."""

_MIN_COLUMN_WIDTH, _ROOMY_COLUMN_WIDTH, _MAX_COLUMN_WIDTH = 16, 48, 80
_CLEARANCE = 4  # lines that rise less per column would touch the next node
_MAX_ROTATED_LABEL = 104.0
_LOWEST_ROW, _ROOMY_ROW, _HIGHEST_ROW = 8, 25, 45
_WEB = 2  # lines per node
_PANEL_GAP = 18


@dataclass(frozen=True)
class PanelLayout:
    """The layout of one panel: its frame and contents."""

    top: int
    height: int
    levels: tuple[int, ...]  # y coordinate of each, the input first; within a fold, not drawn
    row: int  # height of a layer, and of a fold
    folds: Folds
    node_radius: float
    output_y: int  # baselines of the token rows
    input_y: int

    @property
    def middle(self) -> float:
        return self.top + self.height / 2

    @property
    def bottom(self) -> int:
        return self.top + self.height

    @property
    def bend(self) -> int:
        """Vertical extent of the bend of the edge from a column to itself."""
        return round(0.3 * self.row)

    @property
    def swing(self) -> int:
        """Vertical extent of each bend of an edge that leaves and enters nodes vertically."""
        return round(0.5 * self.row)

    @property
    def reach(self) -> int:
        """Number of columns that a straight edge may span; longer edges curve round nodes."""
        return int(self.row / (self.node_radius + _CLEARANCE))

    @property
    def radii(self) -> tuple[float, float]:
        """Radius of nodes at which no line ends, which are small in deep models, and of others."""
        small = self.node_radius / (2 if len(self.levels) > MOST_UNFOLDED + 1 else 1)
        return small, self.node_radius

    @property
    def hidden(self) -> set[int]:
        """Levels between the layers of a fold."""
        return {level for first, last in self.folds for level in range(first + 1, last + 1)}


@dataclass(frozen=True)
class Layout:
    """Layout of the whole figure.

    Args:
        bow: horizontal distance from the residual line of the control points of an edge from a
            column to itself, whose curve reaches three quarters of it.
        hook: horizontal distance from a token's middle to the tip of an arrow that curves round its
            side; ``None`` if columns are too narrow.
    """

    width: int
    height: int
    left: int  # extent of every frame
    right: int
    columns: tuple[int, ...]  # x coordinate of each
    token_size: float
    token_width: float  # beyond it, a token is clipped
    rotated: bool  # tokens are written at 45 degrees
    bow: int
    line_scale: float  # thickness relative to a figure with wide columns
    hook: float | None
    panels: tuple[PanelLayout, ...]
    legend: tuple[tuple[str, str, str, float, int], ...]  # role, symbol, text, x, y of each entry


def lay_out(
    graphs: Sequence[AttentionGraph],
    surround: Surround,
    drawn: Sequence[Bool[Tensor, "_layer query key"]],
    size: tuple[int, int] | None = None,
) -> Layout:
    """The layout of panels, one below the other, of graphs with the lines that are drawn first.

    A `size`, in pixels, is filled as far as columns and rows stay legible.
    """
    n_columns = graphs[0].n_columns
    tokens = [
        visible_text(token)
        for graph in graphs
        for token in (*graph.input_tokens, *graph.output_tokens)
    ]
    left, top = surround.left, surround.top
    most_layers = max(graph.n_layers for graph in graphs)
    folds = [_folded(graph, lines) for graph, lines in zip(graphs, drawn, strict=True)]
    is_deep = most_layers > MOST_UNFOLDED
    name = f"Layers {most_layers}–{most_layers}" if is_deep else f"Layer {most_layers - 1}"
    label_width = math.ceil(text_width(name, LABEL_SIZE))
    first_column = left + 14 + label_width + 28

    n_gaps = max(n_columns - 1, 1)
    narrowest = size[0] if size else NARROWEST
    room = narrowest - MARGIN - 34 - first_column
    spacing = min(_MAX_COLUMN_WIDTH, room // n_gaps)
    token_size, rotated = _token_style(tokens, spacing)
    if rotated:
        room -= 40  # the last rotated label extends to the right
        spacing = min(_MAX_COLUMN_WIDTH, room // n_gaps)
    spacing = max(spacing, _MIN_COLUMN_WIDTH)
    width = max(narrowest, narrowest + n_gaps * spacing - room)
    slack = max(0, room - n_gaps * spacing)
    columns = tuple(first_column + slack // 2 + column * spacing for column in range(n_columns))

    token_width = _MAX_ROTATED_LABEL if rotated else spacing - 6.0
    longest = min(token_width, max(text_width(token, token_size) for token in tokens))
    label_height = math.ceil(longest * 0.65) + 6 if rotated else 0
    right = width - MARGIN
    legend = tuple(_placed(graphs, left, right))
    below = _ABOVE + legend[-1][-1] + _BELOW

    def stacked(rows: Sequence[int]) -> Iterator[PanelLayout]:
        y = top
        for graph, folded, row in zip(graphs, folds, rows, strict=True):
            radius = min(4.0 if spacing >= 24 else 3.0, row / 5)
            panel = _lay_out_panel(graph, folded, y, row, radius, label_height)
            yield panel
            y += panel.height + _PANEL_GAP

    n_rows = [g.n_layers - sum(b - a for a, b in f) for g, f in zip(graphs, folds, strict=True)]
    rows = [min(_HIGHEST_ROW, max(_ROOMY_ROW, 5 * (340 // n // 5))) for n in n_rows]
    if size:
        # A web of lines cannot be followed at any height: the other panels get the room.
        webs = [int(lines.sum()) > _WEB * lines[..., 0].numel() for lines in drawn]
        followed = [not is_web or all(webs) for is_web in webs]
        *_, lowest = stacked([_LOWEST_ROW] * len(graphs))
        room = max(0, size[1] - lowest.bottom - below)
        more = room // sum(compress(n_rows, followed))
        rows = [min(_HIGHEST_ROW, _LOWEST_ROW + more * is_followed) for is_followed in followed]
    panels = tuple(stacked(rows))
    return Layout(
        width=width,
        height=panels[-1].bottom + below,
        left=left,
        right=right,
        columns=columns,
        token_size=token_size,
        token_width=token_width,
        rotated=rotated,
        bow=max(8, min(20, round(0.45 * spacing))),
        line_scale=max(0.45, min(1.0, spacing / _ROOMY_COLUMN_WIDTH, max(rows) / _ROOMY_ROW)),
        hook=None if rotated or spacing < longest + 28 else longest / 2 + 5,
        panels=panels,
        legend=legend,
    )


def _token_style(tokens: Sequence[str], spacing: int) -> tuple[float, bool]:
    """The font size of the tokens, and whether they must be rotated to be legible."""
    for size in (15.0, 13.0, 12.0, SMALLEST_SIZE):
        if max(text_width(token, size) for token in tokens) <= spacing - 6:
            return size, False
    return (SMALLEST_SIZE, True) if spacing < 64 else (12.0, False)


def _folded(graph: AttentionGraph, lines: Bool[Tensor, "_layer query key"]) -> Folds:
    """The runs of layers of a deep model in which nothing is drawn."""
    used = lines.flatten(1).any(dim=1).tolist()
    if graph.mlps is not None:
        used = [has_line or bool(row.any()) for has_line, row in zip(used, graph.mlps, strict=True)]
    runs = [[*run] for is_used, run in groupby(range(len(used)), used.__getitem__) if not is_used]
    is_deep = graph.n_layers > MOST_UNFOLDED
    return tuple((run[0], run[-1]) for run in runs if is_deep and len(run) > 1)


def _lay_out_panel(
    graph: AttentionGraph, folds: Folds, top: int, row: int, node_radius: float, label_height: int
) -> PanelLayout:
    rotated = label_height > 0
    # An arrow from one token to the next arches over the output row.
    has_arch = not rotated and any(column != read_at for column, read_at in graph.targets)
    output_y = top + (52 + label_height if rotated else 88 if has_arch else 68)
    heights = [row] * graph.n_layers
    for first, last in folds:
        heights[first : last + 1] = [0] * (last - first) + [row]
    levels = tuple(output_y + 30 + sum(heights[level:]) for level in range(graph.n_layers + 1))
    input_y = levels[0] + (15 if rotated else 26)
    bottom = input_y + (label_height + 8 if rotated else 14)
    return PanelLayout(top, bottom - top, levels, row, folds, node_radius, output_y, input_y)


def prediction_arrow(
    layout: Layout, panel: PanelLayout, column: int, read_at: int
) -> tuple[str, str]:
    """The arrow at a predicted token: line and head, as SVG path data.

    It leads from the column where the token is computed to the predicted column. If both are the
    same, it curves from the last node round the token's side, or is straight in narrow columns.
    """
    end_x, start_x = layout.columns[column], layout.columns[read_at]
    node_top = panel.levels[-1] - panel.node_radius - 3
    size = 8.0
    points: list[tuple[float, float]]  # start, two control points and end of the line
    if layout.hook is not None and column == read_at:
        x, y = end_x + layout.hook, panel.output_y - 0.35 * layout.token_size
        points = [(start_x + 5, node_top + 3), (x + 17, node_top - 4), (x + 17, y)]
        points, angle = [*points, (x + size * 0.6, y)], math.pi
    elif layout.rotated or column == read_at:
        x, y = end_x, panel.output_y + 7
        bend = (node_top - y) * 0.7
        points = [(start_x, node_top), (start_x, node_top - bend), (x, y + size + bend)]
        points, angle = [*points, (x, y + size * 0.6)], -math.pi / 2
    else:
        base = panel.output_y - 0.8 * layout.token_size - 4
        inset = min(6.0, abs(end_x - start_x) * 0.1) * (1 if end_x > start_x else -1)
        start_x, x, y = start_x + inset, end_x - inset * 0.5, base + 1
        points = [(start_x, base), (start_x, base - 18), (x, base - 22), (x, base - 4)]
        angle = math.pi / 2
    start, *others = (f"{px:g} {py:g}" for px, py in points)
    return f"M{start}C{' '.join(others)}", _arrow_head(x, y, angle, size)


# ---- legend ------------------------------------------------------------------------------------

_SYMBOL, _GAP, _LINE = 26, 16, 20
_ABOVE, _BELOW = 22, 12


def _legend(layout: Layout, weight: EdgeWeight, estimated: bool) -> Iterator[str]:
    """The legend, in as many lines as it needs; the script shows and hides entries on effects."""
    hides = {"negative": weight in ("attention", "carried"), "estimate": not estimated}
    top = layout.panels[-1].bottom + _ABOVE
    yield f'<g data-role="legend" font-size="{LABEL_SIZE:g}" fill="{MUTED}">'
    for role, symbol, words, x, y in layout.legend:
        hidden = ' visibility="hidden"' if hides.get(role) else ""
        yield (
            f'<g data-legend="{role}"{hidden} transform="translate({x:g} {top + y})">'
            f'{symbol}<text x="{_SYMBOL + 6}">{words}</text></g>'
        )
    yield "</g>"


def _placed(
    graphs: Sequence[AttentionGraph], left: int, right: int
) -> Iterator[tuple[str, str, str, float, int]]:
    """The entries, each with its position: x, and y below the first line."""
    x, y = float(left), 0
    for role, symbol, words in _entries(graphs):
        width = _SYMBOL + 6 + text_width(words, LABEL_SIZE)
        if x + width > right and x > left:
            x, y = float(left), y + _LINE
        yield role, symbol, words, x, y
        x += width + _GAP


def _entries(graphs: Sequence[AttentionGraph]) -> Iterator[tuple[str, str, str]]:
    """Role, symbol and text; the middle of a symbol is 4 px above y = 0."""
    yield "main", _stroke(palette.MAIN[1], 4), "carries most to the prediction"
    yield "path", _stroke(palette.ON_PATH[1], 2), "leads to it"
    yield "open", _stroke(palette.OFF_PATH[1], 1.6), "does not lead to it"
    yield "reached", _circle(*NODE_REACHED), "feeds the prediction"
    yield "unreached", _circle(*NODE_UNREACHED), "does not feed it"
    bow = f'<path d="M2 3C4 -16 20 -18 21 -6" fill="none" stroke="{INK}" stroke-width="1.8"/>'
    head = f'<path d="{_arrow_head(21.5, -1, 1.5, 8)}" fill="{INK}"/>'
    yield "prediction", bow + head, "predicted token"
    rule = palette.RESIDUAL_ON_PATH
    upright = f'<path d="M13 5V-13" stroke="{rule}" stroke-width="{palette.RULE_WEIGHT}"/>'
    yield "residual", upright, "residual stream"
    if any(graph.mlps is not None for graph in graphs):
        fill, stroke = palette.MLP_NODE
        square = f'<rect x="9" y="-8" width="8" height="8" rx="1" fill="{fill}" stroke="{stroke}"/>'
        yield "mlp", square, "open MLP"
    if any(graph.effect is not None or graph.attribution is not None for graph in graphs):
        yield "negative", _stroke(palette.MAIN_NEGATIVE[0], 3), "orange: hurts"
    if any(graph.attribution is not None for graph in graphs):
        dotted = _stroke(palette.MAIN[1], 3, f' stroke-dasharray="{palette.dots(3)}"')
        yield "estimate", dotted, "dotted: first-order estimate"


def _stroke(colour: palette.Colour, width: float, more: str = "") -> str:
    return (
        f'<path d="M1 -4H{_SYMBOL - 1}" stroke="{colour}" stroke-width="{width:g}" '
        f'stroke-linecap="round"{more}/>'
    )


def _circle(fill: palette.Colour, stroke: palette.Colour) -> str:
    return f'<circle cx="13" cy="-4" r="4.5" fill="{fill}" stroke="{stroke}" stroke-width="1.4"/>'


# ---- drawing -----------------------------------------------------------------------------------

EdgeKind = Literal["open", "path", "main"]

_N_GRADES = 10  # number of steps of edge weight
# Widths of the weakest and the strongest, and their colours for positive and negative weights.
_LINES: dict[EdgeKind, tuple[tuple[float, float], tuple[palette.Scale, palette.Scale]]] = {
    "main": ((1.3, 4.2), (palette.MAIN, palette.MAIN_NEGATIVE)),
    "path": ((0.7, 2.0), (palette.ON_PATH, palette.ON_PATH_NEGATIVE)),
    "open": ((0.7, 1.6), (palette.OFF_PATH, palette.OFF_PATH_NEGATIVE)),
}


def line_styles(scale: float) -> list[tuple[EdgeKind, palette.Colour, float, str]]:
    """Kind, colour, width and dashes of all lines, in drawing order: light kinds first, within
    a kind weak grades first, each in blue and in orange. Stronger lines are darker and thicker; at
    a smaller scale, dark ones shrink less."""
    styles: list[tuple[EdgeKind, palette.Colour, float, str]] = []
    for kind in get_args(EdgeKind):
        (thin, thick), colours = _LINES[kind]
        for grade in range(_N_GRADES):
            share = (grade + 0.5) / _N_GRADES
            width = (thin + (thick - thin) * share) * (max(scale, 0.6) if kind == "main" else scale)
            for weakest, strongest in colours:
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
    """The figure as an SVG element: each panel's graph, with its ``firstView`` from
    ``attention_edges.js``."""
    content: list[str] = []
    for index, (graph, view) in enumerate(panels):
        content += _panel(index, surround.names[index], graph, view, layout, target)
    content += _legend(layout, weight, any(view["estimated"] for _, view in panels))
    start = [*figure_start(layout.width, layout.height, surround.names, surround.title)]
    if surround.transition is not None and len(panels) > 1:
        start += _transition_arrow(layout.left, layout.panels, surround.transition)
    return "\n".join([*start, *content, "</svg>"])


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
    yield from _panel_frame(layout, panel, name, view["caption"])
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


def _panel_frame(layout: Layout, panel: PanelLayout, name: str, caption: str) -> Iterator[str]:
    """The frame of a panel with its name and, below it, a caption for the script."""
    left, right = layout.left, layout.right
    yield (
        f'<rect x="{left}" y="{panel.top}" width="{right - left}" '
        f'height="{panel.height}" rx="7" fill="{BACKGROUND}" stroke="{INK}" '
        f'stroke-width="{FRAME_WEIGHT}"/>'
    )
    clipped = clip_text(visible_text(name), FRAME_TITLE_SIZE, right - left - 2 * 14)
    yield (
        f'<text x="{left + 14}" y="{panel.top + 25}"><tspan font-size="{FRAME_TITLE_SIZE:g}" '
        f'font-weight="bold">{escape(clipped)}</tspan><tspan x="{left + 14}" dy="17" '
        f'font-size="{TICK_SIZE:g}" fill="{MUTED}" data-role="caption">{escape(caption)}'
        "</tspan></text>"
    )


def _transition_arrow(left: int, frames: Sequence[PanelLayout], text: str) -> Iterator[str]:
    """A curved arrow from each panel to the next, left of the frames, with its text."""
    edge = left - 6
    top, bottom = frames[0].top, frames[-1].bottom
    for upper, lower in zip(frames[:-1], frames[1:], strict=True):
        start, end = upper.middle + upper.height * 0.12, lower.middle - lower.height * 0.12
        depth = edge - 52
        yield (
            f'<g data-role="transition"><path d="M{edge} {start:.1f}C{depth} {start + 12:.1f} '
            f'{depth} {end - 12:.1f} {edge - 11} {end - 2:.1f}" fill="none" stroke="{INK}" '
            f'stroke-width="5" stroke-linecap="round"/>'
            f'<path d="{_arrow_head(edge + 2, end, 0.16, 19)}" fill="{INK}"/></g>'
        )
    room = bottom - top - 10
    text = visible_text(text)
    size = max(12.0, min(17.0, 17.0 * room / max(text_width(text, 17.0), 1.0)))
    middle = (top + bottom) / 2
    yield (
        f'<g data-role="transition-name"><text transform="translate(24 {middle:g}) rotate(-90)" '
        f'text-anchor="middle" font-size="{size:.1f}" font-weight="bold">'
        f"{escape(clip_text(text, size, room))}</text></g>"
    )


def _arrow_head(x: float, y: float, angle: float, size: float) -> str:
    """A filled arrow head with its tip at (x, y), as SVG path data; angle in radians."""
    corners = [(x, y)]
    for turn, reach in ((2.7, 1.0), (math.pi, 0.72), (-2.7, 1.0)):
        corners.append(
            (x + size * reach * math.cos(angle + turn), y + size * reach * math.sin(angle + turn))
        )
    return "M" + "L".join(f"{corner_x:.1f} {corner_y:.1f}" for corner_x, corner_y in corners) + "Z"


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
            f'<text data-column="{column}" {at}{emphasis}>{escape(drawn_token(text, layout))}'
            f"<title>{escape(shorten(text))}</title></text>"
        )
    yield "</g>"


def drawn_token(text: str, layout: Layout) -> str:
    """A visible text, clipped to the width of its column."""
    return clip_text(text, layout.token_size, layout.token_width)
