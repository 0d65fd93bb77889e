"""Coloured cells, with a colour bar below them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparse_tl.plots.page.palette import MUTED, TICK_SIZE, Colour
from sparse_tl.plots.page.token_text import clip_text, visible_text
from sparse_tl.plots.panels.plotly_panels import plain_text, ticks

BAR_TOP, BAR_ROOM = 50, 50
"""Distance of a bar from cells with an axis title in between, and the room needed below it."""
BAR_BELOW = 52
"""Distance from the top of a bar to the edge of the figure."""
CELLS: dict[str, Any] = {"xgap": 1, "ygap": 1, "hoverinfo": "text", "hoverongaps": False}
"""How plotly draws a heatmap of heads or layers."""
_BAR_HEIGHT = 8
# Distance of a bar's ends from those of its map, so that ticks of two bars do not touch.
_BAR_INSET = 12


def add_cells(
    figure: Any,
    position: tuple[int, int],
    values: Sequence[Sequence[float]],
    tooltips: Sequence[Sequence[str]],
    colours: Sequence[tuple[float, Colour]],
    limits: tuple[float, float],
    label: str,
    bar_top: float = BAR_TOP,
) -> None:
    """Fill a panel with cells, with a colour bar below it.

    Args:
        figure: the figure.
        position: row and column of the panel.
        values: values by row and column; NaN for no cell.
        tooltips: tooltip of each cell.
        colours: colour scale.
        limits: values at the ends of the scale.
        label: label of the colour bar: the quantity and its unit.
        bar_top: top of the colour bar, in pixels below the cells.
    """
    row, column = position
    axes, layout = figure.get_subplot(row, column), figure.layout
    across, upwards = axes.xaxis.domain, axes.yaxis.domain
    inner_width = layout.width - layout.margin.l - layout.margin.r
    inner_height = layout.height - layout.margin.t - layout.margin.b
    width = (across[1] - across[0]) * inner_width
    bar = {
        "orientation": "h",
        "x": across[0] + _BAR_INSET / inner_width,
        "xanchor": "left",
        "xpad": 0,
        "len": width - 2 * _BAR_INSET,
        "lenmode": "pixels",
        "y": upwards[0] - bar_top / inner_height,
        "yanchor": "top",
        "ypad": 0,
        "thickness": _BAR_HEIGHT,
        "outlinewidth": 0,
        "ticks": "",
        "tickfont": {"size": TICK_SIZE, "color": MUTED},
        "tickangle": 0,
        **ticks(*limits, 2),
    }
    figure.add_heatmap(
        z=values,
        zmin=limits[0],
        zmax=limits[1],
        colorscale=colours,
        colorbar=bar,
        text=tooltips,
        **CELLS,
        row=row,
        col=column,
    )
    figure.add_annotation(
        text=plain_text(clip_text(visible_text(label), TICK_SIZE, width)),
        font={"size": TICK_SIZE},
        **{"xref": "x domain", "x": 0.5, "xanchor": "center"},
        **{"yref": "y domain", "y": 0, "yanchor": "middle"},
        yshift=-bar_top - _BAR_HEIGHT - 26,
        row=row,
        col=column,
    )
