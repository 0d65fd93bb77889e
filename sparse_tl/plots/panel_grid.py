"""A grid of panels: rows that share their vertical axis, columns, titles, one legend at the right.

Every range, tick and place is explicit, so that plotly and the static drawing agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from sparse_tl.plots.curves_layout import axis_names, escaped
from sparse_tl.plots.curves_svg import layout_of
from sparse_tl.plots.palette import (
    AXIS,
    GRID,
    INK,
    LABEL_SIZE,
    LEGEND_SIZE,
    MUTED,
    PANEL_TITLE_SIZE,
    TICK_SIZE,
)
from sparse_tl.plots.plotly_figure import CLEAR, PlotlyFigure, base_layout
from sparse_tl.plots.token_text import fit_text, text_width, visible_text

_LEFT, _GAP, _RIGHT, _TOP, _BOTTOM = 66, 18, 12, 34, 50
_ROW_TITLE, _TWO_LINES = 26, 36
_SMALLEST_TITLE = 11.0
_LEGEND_SAMPLE = 40


@dataclass(frozen=True)
class PanelGrid:
    """Sizes and titles of a grid.

    Args:
        rows: titles at the right of the rows; empty ones take no room.
        columns: titles above the columns.
        legend: what the legend says, for its room.
        width, height: of one panel's plot, in pixels.
        row_gap: between two rows, in pixels.
    """

    rows: Sequence[str]
    columns: Sequence[str]
    legend: Sequence[str] = ()
    width: int = 200
    height: int = 140
    row_gap: int = 20

    def figure(self) -> PlotlyFigure:
        """The empty figure, with titles and a place for the legend."""
        widths = [text_width(text, LEGEND_SIZE) for text in self.legend]
        titles = self._row_title_room if any(self.rows) else 0
        legend = max(widths) + _LEGEND_SAMPLE + 12 if widths else 0
        plots = len(self.columns) * (self.width + _GAP) - _GAP
        full = round(_LEFT + plots + titles + legend + _RIGHT)
        figure = PlotlyFigure(
            layout={
                **base_layout(full, _TOP + self._inner_height + _BOTTOM, _TOP, _BOTTOM),
                "legend": {
                    "x": (full - _RIGHT) / full,
                    "xanchor": "right",
                    "y": 1 - (len(widths) * 19 + 8) / self._inner_height,
                    "yanchor": "bottom",
                    "bgcolor": CLEAR,
                    "font": {"size": LEGEND_SIZE, "color": INK},
                    "itemwidth": 30,
                    "tracegroupgap": 0,
                },
            }
        )
        for column, title in enumerate(self.columns):
            self._title(figure, 0, column, title, top=True)
        for row, title in enumerate(self.rows):
            self._title(figure, row, len(self.columns) - 1, title, top=False)
        return figure

    def add_axes(
        self,
        figure: go.Figure,
        row: int,
        column: int,
        *,
        x: Mapping[str, Any],
        y: Mapping[str, Any],
        x_title: str,
        y_title: str,
    ) -> dict[str, str]:
        """The axes of one panel; returns them as a trace names them.

        Ticks and titles stand at the left and the lower edge of the grid alone.

        Args:
            figure: made by `figure`.
            row, column: of the panel.
            x, y: range, tickvals and ticktext of each axis.
            x_title, y_title: of the axes.
        """
        names = axis_names(row * len(self.columns) + column)
        number = names["xaxis"][1:]
        left = _LEFT + column * (self.width + _GAP)
        top = row * (self.height + self.row_gap)
        lowest, first = row == len(self.rows) - 1, column == 0
        shared = {"showgrid": False, "zeroline": False, "type": "linear", "linecolor": AXIS}
        shared |= {"tickangle": 0, "tickfont": {"size": TICK_SIZE, "color": MUTED}}
        font = {"size": LABEL_SIZE, "color": INK}
        height, full = self._inner_height, layout_of(figure).width
        figure.update_layout(
            {
                f"xaxis{number}": {
                    **shared,
                    **x,
                    "ticktext": list(x["ticktext"]) if lowest else [""] * len(x["ticktext"]),
                    "domain": [left / full, (left + self.width) / full],
                    "anchor": names["yaxis"],
                    "title": {"text": x_title if lowest else "", "font": font, "standoff": 8},
                    "showline": True,
                    "ticks": "outside",
                    "ticklen": 4,
                    "tickcolor": AXIS,
                },
                f"yaxis{number}": {
                    **shared,
                    **y,
                    "ticktext": list(y["ticktext"]) if first else [""] * len(y["ticktext"]),
                    "domain": [1 - (top + self.height) / height, 1 - top / height],
                    "anchor": names["xaxis"],
                    "title": {"text": y_title if first else "", "font": font, "standoff": 6},
                    "showgrid": True,
                    "gridcolor": GRID,
                    "showline": False,  # else a colour of the line would bring the line
                    "ticks": "",
                },
            }
        )
        return names

    @property
    def _inner_height(self) -> int:
        return len(self.rows) * (self.height + self.row_gap) - self.row_gap

    @property
    def _row_title_room(self) -> int:
        return _TWO_LINES if any(len(self._fitted(row)[0]) > 1 for row in self.rows) else _ROW_TITLE

    def _fitted(self, title: str, *, top: bool = False) -> tuple[list[str], float]:
        room = self.width + _GAP if top else self.height + self.row_gap
        text, n_lines = visible_text(title), 1 if top else 2
        return fit_text(text, PANEL_TITLE_SIZE, room, smallest=_SMALLEST_TITLE, lines=n_lines)

    def _title(self, figure: go.Figure, row: int, column: int, title: str, *, top: bool) -> None:
        if not title:
            return
        names = axis_names(row * len(self.columns) + column)
        lines, size = self._fitted(title, top=top)
        middle = round(0.6 * self._row_title_room)
        place = {"x": 0.5, "y": 1, "yshift": 8} if top else {"x": 1, "y": 0.5, "xshift": middle}
        figure.add_annotation(
            text="<br>".join(map(escaped, lines)),
            xref=f"{names['xaxis']} domain",
            yref=f"{names['yaxis']} domain",
            xanchor="center",
            yanchor="bottom" if top else "middle",
            textangle=0 if top else 90,
            showarrow=False,
            font={"size": size, "color": INK},
            **place,
        )


def round_ticks(low: float, high: float, most: int = 4) -> dict[str, list[Any]]:
    """Ticks at round numbers within a range: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    values = [
        place * step for place in range(math.ceil(low / step - 1e-9), math.floor(high / step) + 1)
    ]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return {
        "tickvals": values,
        "ticktext": [f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}") for value in values],
    }
