"""Plotly figures of panels in rows and columns, in this package's style.

Lengths are in pixels. Every range, tick and position is explicit, so that `static_drawing` agrees.
Rows and columns are counted from 1, as in plotly.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import chain
from typing import Any, TypeVar

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sparse_tl.plots.page.palette import (
    AXIS,
    BACKGROUND,
    CURVE_WEIGHT,
    DASHES,
    FONT_FAMILY,
    GRID,
    INK,
    INTERVAL_ALPHA,
    LABEL_SIZE,
    LEGEND_SIZE,
    MUTED,
    PANEL_TITLE_SIZE,
    TICK_SIZE,
    Colour,
)
from sparse_tl.plots.page.token_text import clip_text, fit_text, text_width, visible_text

MAX_WIDTH = 724
"""Maximum width of a figure: printed at 5.5 inches, its smallest text has 6 points."""
_TOP, _BOTTOM, _LEFT, _RIGHT = 34, 52, 60, 12
_LEAST_WIDTH = 56
_ROW_GAP, ROW_TITLE_WIDTH = 36, 26
_TITLE_HEIGHT, _AXIS_TITLE_HEIGHT = 28, 18
LEFT_LINE, _X_TITLE = 16, 20
"""Width of a line of a vertical axis title; height of the middle of a horizontal one."""
LONGEST_NAME = 144
"""Maximum width of a name in a legend."""

Panel = TypeVar("Panel")

_AXIS: dict[str, Any] = {
    "zeroline": False,
    "tickangle": 0,
    "tickfont": {"size": TICK_SIZE, "color": MUTED},
}
_AXIS_TITLE = {"size": LABEL_SIZE, "color": INK}
_TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": FONT_FAMILY, "color": INK, "size": TICK_SIZE},
        "paper_bgcolor": BACKGROUND,
        "plot_bgcolor": BACKGROUND,
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": BACKGROUND, "font": {"size": LABEL_SIZE, "color": INK}},
        "xaxis": _AXIS
        | {
            "title": {"font": _AXIS_TITLE, "standoff": 8},
            "showgrid": False,
            "showline": True,
            "linecolor": AXIS,
            "ticks": "outside",
            "ticklen": 4,
            "tickcolor": AXIS,
        },
        "yaxis": _AXIS
        | {
            "title": {"font": _AXIS_TITLE, "standoff": 6},
            "gridcolor": GRID,
            "ticks": "",
        },
        "annotationdefaults": {"showarrow": False, "font": {"color": INK}},
    }
)


def in_rows(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Panels in rows of similar length, with at most four each."""
    n_rows = -(-len(panels) // 4)
    per_row = -(-len(panels) // n_rows)
    return [list(panels[start : start + per_row]) for start in range(0, len(panels), per_row)]


def panel_positions(rows: Sequence[Sequence[Any]]) -> list[tuple[int, int]]:
    """Row and column of each panel, counted from 1."""
    return [(r, c) for r, row in enumerate(rows, 1) for c, _ in enumerate(row, 1)]


def fitting_width(n_columns: int, *, gap: float, most: float, beside: float = 0) -> float:
    """Width of each of several plots in a row, so that the figure has at most `MAX_WIDTH`.

    Args:
        n_columns: plots in the row.
        gap: gap between two plots.
        most: maximum width of a plot.
        beside: width needed beside the plots, for a legend and the titles of rows.
    """
    room = MAX_WIDTH - _LEFT - _RIGHT - beside
    return max(min((room + gap) / n_columns - gap, most), _LEAST_WIDTH)


def panel_figure(
    titles: Sequence[Sequence[str]],
    row_titles: Sequence[str] = (),
    *,
    x: str,
    y: str,
    width: float = 200,
    height: float = 140,
    gap: float = 18,
    below: float = 0,
    shared: bool = True,
) -> Any:
    """An empty figure of panels.

    Args:
        titles: titles above the panels of each row; the last row may have fewer panels.
        row_titles: titles at the right of the rows; empty ones take no space.
        x, y: axis titles.
        width, height: size of one plot.
        gap: gap between two plots of a row.
        below: additional space below every row, for a colour bar.
        shared: whether the panels of a row share a vertical axis, labelled at the first one.
    """
    n_rows, n_columns = len(titles), len(titles[0])
    inner_width = n_columns * (width + gap) - gap
    # If every row has panel titles, it also has horizontal axis titles.
    is_wrapped = any(map(any, titles[1:]))
    row_gap = _ROW_GAP + below + (_TITLE_HEIGHT + _AXIS_TITLE_HEIGHT if is_wrapped else 0)
    inner_height = n_rows * (height + row_gap) - row_gap
    figure: Any = make_subplots(
        n_rows,
        n_columns,
        specs=[[{} if c < len(row) else None for c in range(n_columns)] for row in titles],
        shared_yaxes=shared,
        horizontal_spacing=gap / inner_width,
        vertical_spacing=row_gap / inner_height if n_rows > 1 else 0,
    )
    right = _RIGHT + (ROW_TITLE_WIDTH if any(row_titles) else 0)
    figure.layout.template = _TEMPLATE
    figure.update_layout(
        width=round(_LEFT + inner_width + right),
        height=round(_TOP + inner_height + below + _BOTTOM),
        margin={"l": _LEFT, "r": right, "t": _TOP, "b": _BOTTOM + below, "autoexpand": False},
    )
    figure.update_xaxes(title_text=x, row=None if is_wrapped else n_rows)
    figure.update_yaxes(title_text=y, col=1 if shared else None)
    for (row, column), title in zip(panel_positions(titles), chain(*titles), strict=True):
        position = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "yshift": 5}
        _add_title(figure, row, column, title, width + min(12, gap), position)
    for row, title in enumerate(row_titles, start=1):
        position = {"x": 1, "xanchor": "center", "xshift": 0.6 * ROW_TITLE_WIDTH}
        position |= {"y": 0.5, "yanchor": "middle", "textangle": 90}
        _add_title(figure, row, n_columns, title, height, position)
    return figure


def add_outer_titles(figure: Any, x: str, y: str) -> None:
    """Add axis titles for all panels together, the vertical one in two lines if necessary."""
    layout, n_lines = figure.layout, 1
    if text_width(y, LABEL_SIZE) > layout.height - layout.margin.t - layout.margin.b:
        spaces = (i for i, character in enumerate(y) if character == " ")
        middle = min(spaces, key=lambda i: abs(i - len(y) / 2))
        y, n_lines = f"{y[:middle]}<br>{y[middle + 1 :]}", 2
        wider = {"width": layout.width + LEFT_LINE, "margin_l": layout.margin.l + LEFT_LINE}
        figure.update_layout(**wider)
    title = {"font": {"size": LABEL_SIZE}, "xref": "paper", "yref": "paper"}
    title |= {"xanchor": "center", "yanchor": "middle"}
    below = {"x": 0.5, "y": 0, "yshift": _X_TITLE - layout.margin.b}
    aside = {"x": 0, "y": 0.5, "xshift": n_lines * LEFT_LINE / 2 + 4 - layout.margin.l}
    figure.add_annotation(text=x, **title, **below)
    figure.add_annotation(text=y, textangle=-90, **title, **aside)


def _add_title(
    figure: go.Figure, row: int, column: int, title: str, room: float, position: dict[str, Any]
) -> None:
    """Add a title, as large as fits, at a position in panel units."""
    if not title:
        return
    shown, size = fit_text(visible_text(title), PANEL_TITLE_SIZE, room)
    position = position | {"xref": "x domain", "yref": "y domain", "font": {"size": size}}
    figure.add_annotation(text=plain_text(shown), row=row, col=column, **position)


def add_points(
    figure: go.Figure,
    row: int,
    column: int,
    *,
    x: Sequence[float],
    y: Sequence[float],
    colour: Colour,
    name: str,
    hover: Sequence[str],
    opacity: float = 1.0,
    size: float = 7,
) -> None:
    """Add points to a panel, each with a tooltip; `add_legend_below` lists their name once."""
    figure.add_scatter(
        x=x,
        y=y,
        mode="markers",
        marker={"color": colour, "size": size},
        opacity=opacity,
        name=name,
        legendgroup=name,
        showlegend=False,
        hoverinfo="text",
        hovertext=hover,
        row=row,
        col=column,
    )


def add_line(
    figure: go.Figure,
    row: int,
    column: int,
    *,
    x: Sequence[float | None],
    y: Sequence[float | None],
    colour: Colour,
    name: str = "",
    group: str = "",
    low: Sequence[float] = (),
    high: Sequence[float] = (),
    hover: Sequence[Sequence[str]] = (),
    width: float = CURVE_WEIGHT,
    opacity: float = 1.0,
    dashed: bool = False,
) -> None:
    """Add a line, optionally with intervals.

    Args:
        figure: figure to draw on.
        row, column: panel of the line.
        x, y: points of the line.
        colour: colour of the line and, paler, of its intervals.
        name: name in the legend, which toggles all lines of this name together.
        group: name with which the line is toggled, if it has none in the legend.
        low, high: ends of the interval at each point; empty for none.
        hover: lines of text in the tooltip of each point, the first one bold.
        width: line width in pixels.
        opacity: opacity of the line.
        dashed: whether the line is dashed.
    """
    style = {"row": row, "col": column, "mode": "lines", "showlegend": False}
    style["legendgroup"] = name or group
    if len(low):
        # Along the upper ends, then back along the lower ends.
        figure.add_scatter(
            x=[*x, *reversed(x)],
            y=[*high, *reversed(low)],
            line={"width": 0},
            fill="toself",
            fillcolor=colour,
            opacity=INTERVAL_ALPHA,
            hoverinfo="skip",
            **style,
        )
    dash = {"dash": ",".join(f"{length}px" for length in DASHES)} if dashed else {}
    # No hovertemplate: it would substitute any %{...} in a name.
    figure.add_scatter(
        x=list(x),
        y=list(y),
        line={"color": colour, "width": width, **dash},
        opacity=opacity,
        name=plain_text(clip_text(visible_text(name), LEGEND_SIZE, LONGEST_NAME)),
        hoverinfo="text" if len(hover) else "skip",
        hovertext=[hover_text(words) for words in hover],
        **style,
    )


def hover_text(words: Sequence[str]) -> str:
    """A tooltip from lines of text, the first one bold."""
    first, *rest = map(plain_text, map(visible_text, words))
    return "<br>".join([f"<b>{first}</b>", *rest])


def plain_text(text: str) -> str:
    """The text, escaped so that plotly, which parses some HTML, shows it unchanged."""
    return escape(text, quote=False)


def ticks(low: float, high: float, most: int = 4, *, whole: bool = False) -> dict[str, Any]:
    """Ticks at round numbers within a range, in plotly's format.

    Args:
        low, high: ends of the range.
        most: maximum number of intervals.
        whole: whether to allow integers only.
    """
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    values = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10], integer=whole).tick_values(low, high)
    shown = [float(value) for value in values if low <= value <= high]
    formatter = ScalarFormatter(useOffset=False)
    formatter.set_scientific(False)
    formatter.create_dummy_axis()
    return {"tickvals": shown, "ticktext": formatter.format_ticks(shown)}
