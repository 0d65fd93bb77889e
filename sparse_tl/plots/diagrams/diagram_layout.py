"""Layout of a circuit diagram: all coordinates, in pixels at full size.

Python draws the fixed parts with them, and the script draws the edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, groupby

from jaxtyping import Bool
from torch import Tensor

from sparse_tl.circuits.prompt.attention_graph import AttentionGraph
from sparse_tl.plots.diagrams.diagram_legend import legend_height
from sparse_tl.plots.page.figure_frame import (
    MARGIN,
    PANEL_GAP,
    Frame,
    Surround,
    arrow_head,
)
from sparse_tl.plots.page.palette import LABEL_SIZE
from sparse_tl.plots.page.token_text import SMALLEST_SIZE, text_width, visible_text

Folds = tuple[tuple[int, int], ...]
"""First and last layer of each run of layers that is drawn as one band."""

NARROWEST = 726
"""Width at which text of 11 px is 6 pt high in a column of 5.5 in."""

_MIN_COLUMN_WIDTH = 16
_MAX_COLUMN_WIDTH = 80
# Lines that rise less per column would touch the next node.
_CLEARANCE = 4
_MAX_ROTATED_LABEL = 104.0
_ROOMY_COLUMN_WIDTH = 48
_LOWEST_ROW, _ROOMY_ROW, _HIGHEST_ROW = 8, 25, 45
_MOST_UNFOLDED = 12  # deeper models are folded
_WEB = 2  # lines per node


@dataclass(frozen=True)
class PanelLayout(Frame):
    """The layout of one panel: its frame and contents.

    Args:
        levels: y coordinate of each level, the input first; within a fold, they are not drawn.
        row: height of a layer, and of a fold.
        folds: folded layers.
        node_radius: radius of the node circles.
        output_y, input_y: baselines of the token rows.
    """

    levels: tuple[int, ...]
    row: int
    folds: Folds
    node_radius: float
    output_y: int
    input_y: int

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
        small = self.node_radius / (2 if len(self.levels) > _MOST_UNFOLDED + 1 else 1)
        return small, self.node_radius

    @property
    def hidden(self) -> set[int]:
        """Levels between the layers of a fold."""
        return {level for first, last in self.folds for level in range(first + 1, last + 1)}


@dataclass(frozen=True)
class Layout:
    """Layout of the whole figure.

    Args:
        width, height: size of the figure.
        left, right: horizontal extent of every frame.
        columns: x coordinate of each column.
        token_size: font size of the tokens.
        token_width: width beyond which a token is clipped.
        rotated: whether tokens are written at 45 degrees.
        bow: horizontal distance from the residual line of the control points of an edge from a
            column to itself, whose curve reaches three quarters of it.
        line_scale: line thickness relative to a figure with wide columns.
        hook: horizontal distance from a token's middle to the tip of an arrow that curves round its
            side; ``None`` if columns are too narrow.
        panels: frames from top to bottom.
    """

    width: int
    height: int
    left: int
    right: int
    columns: tuple[int, ...]
    token_size: float
    token_width: float
    rotated: bool
    bow: int
    line_scale: float
    hook: float | None
    panels: tuple[PanelLayout, ...]


def lay_out(
    graphs: Sequence[AttentionGraph],
    surround: Surround,
    drawn: Sequence[Bool[Tensor, "_layer query key"]],
    size: tuple[int, int] | None = None,
) -> Layout:
    """The layout of panels of these graphs, one below the other.

    Args:
        graphs: graph of each panel.
        surround: title and arrows around the panels.
        drawn: which lines each panel has at first.
        size: width and height to fill, as far as columns and rows stay legible.
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
    name = f"Layers {most_layers}–{most_layers}" if any(folds) else f"Layer {most_layers - 1}"
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
    below = legend_height(graphs, left, right)

    def stacked(rows: Sequence[int]) -> Iterator[PanelLayout]:
        y = top
        for graph, folded, row in zip(graphs, folds, rows, strict=True):
            radius = min(4.0 if spacing >= 24 else 3.0, row / 5)
            panel = _lay_out_panel(graph, folded, y, row, radius, label_height)
            yield panel
            y += panel.height + PANEL_GAP

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
    is_deep = graph.n_layers > _MOST_UNFOLDED
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
    if layout.hook is not None and column == read_at:
        tip_x, tip_y = end_x + layout.hook, panel.output_y - 0.35 * layout.token_size
        side = tip_x + 17
        line = (
            f"M{start_x + 5} {node_top + 3:g}C{side:g} {node_top - 4:g} "
            f"{side:g} {tip_y:g} {tip_x + size * 0.6:g} {tip_y:g}"
        )
        return line, arrow_head(tip_x, tip_y, math.pi, size)
    if layout.rotated or column == read_at:
        tip = panel.output_y + 7
        bend = (node_top - tip) * 0.7
        line = (
            f"M{start_x} {node_top:g}C{start_x} {node_top - bend:g} "
            f"{end_x} {tip + size + bend:g} {end_x} {tip + size * 0.6:g}"
        )
        return line, arrow_head(end_x, tip, -math.pi / 2, size)
    base = panel.output_y - 0.8 * layout.token_size - 4
    inset = min(6.0, abs(end_x - start_x) * 0.1)
    sign = 1 if end_x > start_x else -1
    start_x, end_x = start_x + sign * inset, end_x - sign * inset * 0.5
    line = (
        f"M{start_x:g} {base:g}C{start_x:g} {base - 18:g} "
        f"{end_x:g} {base - 22:g} {end_x:g} {base - 4:g}"
    )
    return line, arrow_head(end_x, base + 1, math.pi / 2, size)
