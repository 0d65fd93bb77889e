"""Maps of a model's heads: layers upwards, heads across, a colour bar below each map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparse_tl.plots.panels.cells import BAR_ROOM
from sparse_tl.plots.panels.plotly_panels import (
    fitting_width,
    in_rows,
    panel_figure,
    panel_positions,
    ticks,
)

_GAP, _LEAST_PLOT = 20, 140
_SMALLEST_CELL, _LARGEST_CELL = 6, 26
_HIGHEST = 420
# A tick label of two digits, and the gap to the next.
_TICK_ROOM = 20


def head_panels(
    titles: Sequence[str], n_layers: int, n_heads: int, *, label_width: float = 0
) -> tuple[Any, list[tuple[int, int]]]:
    """Empty maps of heads, in rows of at most four, and the row and column of each.

    Args:
        titles: titles of the maps.
        n_layers, n_heads: size of each.
        label_width: width in pixels of the labels in cells; 0 for square cells without labels and
            with a colour bar below.
    """
    rows = in_rows(titles)
    most = max(label_width, _LARGEST_CELL)
    across = max(
        _SMALLEST_CELL, fitting_width(len(rows[0]), gap=_GAP, most=most * n_heads) / n_heads
    )
    upwards = int(max(_SMALLEST_CELL, min(across, _LARGEST_CELL, _HIGHEST / n_layers)))
    across = int(across) if label_width else upwards
    width, height = max(across * n_heads, _LEAST_PLOT), max(upwards * n_layers, 60)
    below = 0 if label_width else BAR_ROOM
    figure = panel_figure(
        rows, x="Head", y="Layer", width=width, height=height, gap=_GAP, below=below
    )
    for update, count, length in (
        (figure.update_xaxes, n_heads, width),
        (figure.update_yaxes, n_layers, height),
    ):
        most = max(int(length // _TICK_ROOM), 1)
        update(range=(-0.5, count - 0.5), **ticks(0, count - 1, min(most, 16), whole=True))
    return figure, panel_positions(rows)
