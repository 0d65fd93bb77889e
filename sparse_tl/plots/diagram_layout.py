"""Layout of a circuit diagram: all coordinates, in pixels at full size.

The same numbers are drawn by Python and sent to the script of the interactive figure. Coordinates
of edges are integers, which both sides format identically.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparse_tl.circuits.attention_graph import AttentionGraph
from sparse_tl.plots.figure_frame import (
    FIGURE_WIDTH,
    MARGIN,
    PANEL_GAP,
    Frame,
    Surround,
    arrow_head,
)
from sparse_tl.plots.token_text import text_width, visible_text

MIN_FONT_SIZE = 12.0
LABEL_SIZE = 13.0
LEGEND_HEIGHT = 54

_MIN_COLUMN_WIDTH = 20
_MAX_COLUMN_WIDTH = 110
_MAX_ROTATED_LABEL = 104.0
_ROOMY_COLUMN_WIDTH = 60


@dataclass(frozen=True)
class PanelLayout(Frame):
    """One frame and its contents.

    Args:
        levels: y coordinate of each level, the input first.
        output_y, input_y: baselines of the token rows.
    """

    levels: tuple[int, ...]
    output_y: int
    input_y: int

    @property
    def bend(self) -> int:
        """Vertical extent of the bend of the edge from a column to itself."""
        return round(0.3 * (self.levels[0] - self.levels[1]))


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
        bow: horizontal distance of the edge from a column to itself from the residual line.
        node_radius: radius of the node circles.
        line_scale: line thickness relative to a figure with wide columns.
        hook: horizontal distance from a token's middle to the tip of the arrow that curves round
            its side; ``None`` where columns are too narrow for it.
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
    node_radius: float
    line_scale: float
    hook: float | None
    panels: tuple[PanelLayout, ...]

    @property
    def legend_y(self) -> int:
        """Baseline of the first line of the legend."""
        last = self.panels[-1]
        return last.top + last.height + 22


def lay_out(flows: Sequence[AttentionGraph], surround: Surround) -> Layout:
    """Place the panels of these graphs below one another."""
    n_columns = flows[0].n_columns
    tokens = [
        visible_text(token) for flow in flows for token in (*flow.input_tokens, *flow.output_tokens)
    ]
    left, top = surround.left, surround.top
    most_layers = max(flow.n_layers for flow in flows)
    label_width = math.ceil(text_width(f"Layer {most_layers - 1}", LABEL_SIZE))
    first_column = left + 14 + label_width + 34

    n_gaps = max(n_columns - 1, 1)
    room = FIGURE_WIDTH - MARGIN - 38 - first_column
    spacing = min(_MAX_COLUMN_WIDTH, room // n_gaps)
    token_size, rotated = _token_style(tokens, spacing)
    if rotated:
        room -= 40  # the last rotated label extends to the right
        spacing = min(_MAX_COLUMN_WIDTH, room // n_gaps)
    spacing = max(spacing, _MIN_COLUMN_WIDTH)
    width = max(FIGURE_WIDTH, FIGURE_WIDTH + n_gaps * spacing - room)
    slack = max(0, room - n_gaps * spacing)
    columns = tuple(first_column + slack // 2 + column * spacing for column in range(n_columns))

    token_width = _MAX_ROTATED_LABEL if rotated else spacing - 6.0
    longest = min(token_width, max(text_width(token, token_size) for token in tokens))
    label_height = math.ceil(longest * 0.65) + 6 if rotated else 0
    panels = []
    for flow in flows:
        panel = _lay_out_panel(flow, top, rotated, label_height)
        panels.append(panel)
        top += panel.height + PANEL_GAP
    return Layout(
        width=width,
        height=top - PANEL_GAP + LEGEND_HEIGHT,
        left=left,
        right=width - MARGIN,
        columns=columns,
        token_size=token_size,
        token_width=token_width,
        rotated=rotated,
        bow=max(5, min(14, spacing // 5)),
        node_radius=4.5 if spacing >= 30 else 3.5,
        line_scale=max(0.45, min(1.0, spacing / _ROOMY_COLUMN_WIDTH)),
        hook=None if rotated or spacing < longest + 46 else longest / 2 + 6,
        panels=tuple(panels),
    )


def _token_style(tokens: Sequence[str], spacing: int) -> tuple[float, bool]:
    """The font size of the tokens, and whether they must be rotated to be legible."""
    for size in (17.0, 15.0, 13.0, MIN_FONT_SIZE):
        if max(text_width(token, size) for token in tokens) <= spacing - 6:
            return size, False
    return (MIN_FONT_SIZE, True) if spacing < 84 else (13.0, False)


def _lay_out_panel(flow: AttentionGraph, top: int, rotated: bool, label_height: int) -> PanelLayout:
    row_height = min(55, max(30, 5 * (420 // flow.n_layers // 5)))
    # An arrow from one token to the next arches over the output row.
    has_arch = not rotated and any(column != read_at for column, read_at in flow.targets)
    output_y = top + (34 + label_height if rotated else 72 if has_arch else 56)
    top_level = output_y + 34
    levels = tuple(
        top_level + (flow.n_layers - level) * row_height for level in range(flow.n_layers + 1)
    )
    input_y = levels[0] + (16 if rotated else 30)
    bottom = input_y + (label_height + 8 if rotated else 16)
    return PanelLayout(top, bottom - top, levels, output_y, input_y)


def edge_path(layout: Layout, panel: PanelLayout, layer: int, query: int, key: int) -> str:
    """The line of a layer's attention edge from key to query, as SVG path data."""
    start_x, start_y = layout.columns[key], panel.levels[layer]
    end_x, end_y = layout.columns[query], panel.levels[layer + 1]
    if query != key:
        return f"M{start_x} {start_y}L{end_x} {end_y}"
    side, bend = start_x + layout.bow, panel.bend
    return f"M{start_x} {start_y}C{side} {start_y - bend} {side} {end_y + bend} {end_x} {end_y}"


def prediction_arrow(
    layout: Layout, panel: PanelLayout, column: int, read_at: int
) -> tuple[str, str]:
    """The arrow at a predicted token: line and head, as SVG path data.

    It runs from the column where the token is computed to the predicted one. If both are the same,
    it curves from the last node round the side of the token, or, in narrow columns, straight up.
    """
    end_x, start_x = layout.columns[column], layout.columns[read_at]
    node_top = panel.levels[-1] - layout.node_radius - 3
    size = 8.0
    if layout.hook is not None and column == read_at:
        tip_x, tip_y = end_x + layout.hook, panel.output_y - 0.35 * layout.token_size
        side = tip_x + 20
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
