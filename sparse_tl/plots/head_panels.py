"""Maps of a model's heads: layers upwards, heads across, a colour bar below each map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparse_tl.plots.cells import BAR_ROOM
from sparse_tl.plots.panels import fitting_width, in_rows, panel_figure, places, ticks

_GAP, _LEAST_PLOT = 20, 140
_SMALLEST_CELL, _LARGEST_CELL = 6, 26
# A tick label of two digits, and the gap to the next.
_TICK_ROOM = 20


def head_panels(
    titles: Sequence[str], n_layers: int, n_heads: int
) -> tuple[Any, list[tuple[int, int]]]:
    """Empty maps of heads, in rows of at most four; and the row and column of each."""
    rows = in_rows(titles)
    room = fitting_width(len(rows[0]), gap=_GAP, most=_LARGEST_CELL * n_heads)
    cell = int(max(_SMALLEST_CELL, min(room / n_heads, 420 / n_layers)))
    width, height = max(cell * n_heads, _LEAST_PLOT), max(cell * n_layers, 60)
    figure = panel_figure(
        rows, x="Head", y="Layer", width=width, height=height, gap=_GAP, below=BAR_ROOM
    )
    for update, count, length in (
        (figure.update_xaxes, n_heads, width),
        (figure.update_yaxes, n_layers, height),
    ):
        most = max(int(length // _TICK_ROOM), 1)
        update(range=(-0.5, count - 0.5), **ticks(0, count - 1, min(most, 16), whole=True))
    return figure, places(rows)
