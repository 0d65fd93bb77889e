"""Maps of a model's heads: layers upwards, heads across, a colour bar below each map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparse_tl.plots.palette import MUTED, TICK_SIZE, Colour
from sparse_tl.plots.panels import fitting_width, in_rows, panel_figure, places, ticks

_GAP, _LEAST_PLOT = 20, 140
_SMALLEST_CELL, _LARGEST_CELL = 6, 26
# A tick label of two digits, and the gap to the next.
_TICK_ROOM = 20
# The colour bar: below the axis title, its ticks and what it shows below it.
_BAR_TOP, _BAR_HEIGHT, _BAR_ROOM = 50, 8, 50
# Distance of its ends from those of the map, so that ticks of two bars do not touch.
_BAR_INSET = 12


def head_panels(
    titles: Sequence[str], n_layers: int, n_heads: int
) -> tuple[Any, list[tuple[int, int]]]:
    """Empty maps of heads, in rows of at most four; and the row and column of each."""
    rows = in_rows(titles)
    room = fitting_width(len(rows[0]), gap=_GAP, most=_LARGEST_CELL * n_heads)
    cell = int(max(_SMALLEST_CELL, min(room / n_heads, 420 / n_layers)))
    width, height = max(cell * n_heads, _LEAST_PLOT), max(cell * n_layers, 60)
    figure = panel_figure(
        rows, x="Head", y="Layer", width=width, height=height, gap=_GAP, below=_BAR_ROOM
    )
    for update, count, length in (
        (figure.update_xaxes, n_heads, width),
        (figure.update_yaxes, n_layers, height),
    ):
        most = max(int(length // _TICK_ROOM), 1)
        update(range=(-0.5, count - 0.5), **ticks(0, count - 1, min(most, 16), whole=True))
    return figure, places(rows)


def add_head_cells(
    figure: Any,
    place: tuple[int, int],
    values: Sequence[Sequence[float]],
    said: Sequence[Sequence[str]],
    colours: Sequence[tuple[float, Colour]],
    limits: tuple[float, float],
    measured: str,
) -> None:
    """Fill one of `head_panels`, with a colour bar below it.

    Args:
        figure: the figure.
        place: row and column of the panel.
        values: values by layer and head.
        said: tooltip of each cell.
        colours: colour scale.
        limits: values at the ends of the scale.
        measured: what the colours show, with its unit.
    """
    row, column = place
    axes, layout = figure.get_subplot(row, column), figure.layout
    across, upwards = axes.xaxis.domain, axes.yaxis.domain
    inner_width = layout.width - layout.margin.l - layout.margin.r
    inner_height = layout.height - layout.margin.t - layout.margin.b
    bar = {
        "orientation": "h",
        "x": across[0] + _BAR_INSET / inner_width,
        "xanchor": "left",
        "xpad": 0,
        "len": (across[1] - across[0]) * inner_width - 2 * _BAR_INSET,
        "lenmode": "pixels",
        "y": upwards[0] - _BAR_TOP / inner_height,
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
        xgap=1,
        ygap=1,
        text=said,
        hoverinfo="text",
        row=row,
        col=column,
    )
    figure.add_annotation(
        text=measured,
        font={"size": TICK_SIZE},
        **{"xref": "x domain", "x": 0.5, "xanchor": "center"},
        **{"yref": "y domain", "y": 0, "yanchor": "middle"},
        yshift=-_BAR_TOP - _BAR_HEIGHT - 26,
        row=row,
        col=column,
    )
