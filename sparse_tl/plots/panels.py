"""Plotly figures of panels in rows and columns, in this package's style.

Lengths are in pixels. Every range, tick and position is explicit, so that `static_drawing` agrees.
Rows and columns are counted from 1, as in plotly.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sparse_tl.plots.palette import (
    AXIS,
    CLEAR,
    CURVE_WEIGHT,
    DASHES,
    FONT_FAMILY,
    GRID,
    GROUND,
    INK,
    INTERVAL_ALPHA,
    LABEL_SIZE,
    LEGEND_SIZE,
    MUTED,
    PANEL_TITLE_SIZE,
    TICK_SIZE,
    Colour,
)
from sparse_tl.plots.token_text import clip_text, fit_text, text_width, visible_text

_TOP, _BOTTOM, _LEFT, _RIGHT = 34, 52, 62, 12
_ROW_GAP, _ROW_TITLE_WIDTH = 20, 26
# Width of a line sample in a legend including gaps, and maximum width of a name.
_LEGEND_SAMPLE, _LONGEST_NAME = 40, 144

_AXIS: dict[str, Any] = {
    "zeroline": False,
    "tickangle": 0,
    "tickfont": {"size": TICK_SIZE, "color": MUTED},
}
_AXIS_TITLE = {"size": LABEL_SIZE, "color": INK}
_LEGEND = {
    "bgcolor": CLEAR,
    "font": {"size": LEGEND_SIZE, "color": INK},
    "itemwidth": 30,
    "tracegroupgap": 0,
}
_TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": FONT_FAMILY, "color": INK, "size": TICK_SIZE},
        "paper_bgcolor": GROUND,
        "plot_bgcolor": GROUND,
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": GROUND, "font": {"size": LABEL_SIZE, "color": INK}},
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


def panel_figure(
    titles: Sequence[str],
    row_titles: Sequence[str] = ("",),
    *,
    x: str,
    y: str,
    width: float = 200,
    height: float = 140,
    gap: float = 18,
    shared: bool = True,
) -> go.Figure:
    """An empty figure of panels.

    Args:
        titles: titles above the columns.
        row_titles: titles at the right of the rows; empty ones take no space.
        x, y: axis titles.
        width, height: size of one plot.
        gap: gap between two plots of a row.
        shared: whether plots of a row share their vertical axis, and plots of a column their
            horizontal one; only the outer axes are then labelled.
    """
    n_rows, n_columns = len(row_titles), len(titles)
    inner_width = n_columns * (width + gap) - gap
    inner_height = n_rows * (height + _ROW_GAP) - _ROW_GAP
    figure = make_subplots(
        n_rows,
        n_columns,
        shared_xaxes=shared,
        shared_yaxes=shared,
        horizontal_spacing=gap / inner_width,
        vertical_spacing=_ROW_GAP / inner_height,
    )
    right = _RIGHT + (_ROW_TITLE_WIDTH if any(row_titles) else 0)
    figure.layout.template = _TEMPLATE
    figure.update_layout(
        width=round(_LEFT + inner_width + right),
        height=round(_TOP + inner_height + _BOTTOM),
        margin={"l": _LEFT, "r": right, "t": _TOP, "b": _BOTTOM, "autoexpand": False},
    )
    figure.update_xaxes(title_text=x, row=n_rows if shared else None)
    figure.update_yaxes(title_text=y, col=1 if shared else None)
    for column, title in enumerate(titles, start=1):
        place = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "yshift": 5}
        _add_title(figure, 1, column, title, width + 12, place)
    for row, title in enumerate(row_titles, start=1):
        place = {"x": 1, "xanchor": "center", "xshift": 0.6 * _ROW_TITLE_WIDTH}
        place |= {"y": 0.5, "yanchor": "middle", "textangle": 90}
        _add_title(figure, row, n_columns, title, height, place)
    return figure


def _add_title(
    figure: go.Figure, row: int, column: int, title: str, room: float, place: dict[str, Any]
) -> None:
    """A title, as large as fits, at a position in panel units."""
    if not title:
        return
    shown, size = fit_text(visible_text(title), PANEL_TITLE_SIZE, room)
    place = place | {"xref": "x domain", "yref": "y domain", "font": {"size": size}}
    figure.add_annotation(text=_shown(shown), row=row, col=column, **place)


def add_line(
    figure: go.Figure,
    row: int,
    column: int,
    *,
    x: Sequence[float],
    y: Sequence[float],
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
        name: name in the legend; lines of one name are toggled together, where a legend lists
            it.
        group: name by which the line is toggled, if no legend lists it.
        low, high: ends of the interval at each point; empty for none.
        hover: lines of text in the tooltip of each point, the first one bold.
        width: line width in pixels.
        opacity: opacity of the line; below 1 for a pale line.
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
        name=_shown(clip_text(visible_text(name), LEGEND_SIZE, _LONGEST_NAME)),
        hoverinfo="text" if len(hover) else "skip",
        hovertext=[hover_text(words) for words in hover],
        **style,
    )


def add_legend(figure: go.Figure, column: int) -> None:
    """Add a legend to a panel of the first row, at its lower right."""
    panel: Any = figure.get_subplot(1, column)
    name = f"legend{column}" if column > 1 else "legend"
    place = {"x": panel.xaxis.domain[1], "y": panel.yaxis.domain[0]}
    figure.update_layout({name: _LEGEND | place | {"xanchor": "right", "yanchor": "bottom"}})
    listed = {"legend": name, "showlegend": True}
    figure.update_traces(listed, lambda trace: bool(trace.name), row=1, col=column)


def add_side_legend(figure: Any) -> None:
    """Add one legend at the right of all panels, which lists each name once."""
    layout, left, right = figure.layout, figure.layout.margin.l, figure.layout.margin.r
    first = {trace.name: trace for trace in figure.data[::-1] if trace.name}
    for trace in first.values():
        trace.showlegend = True
    x = 1 + (right - 6) / (layout.width - left - right)
    place = {"x": x, "xanchor": "left", "y": 1, "yanchor": "top"}
    room = max(text_width(name, LEGEND_SIZE) for name in first) + _LEGEND_SAMPLE + 6
    width = round(layout.width + room)
    figure.update_layout(legend=_LEGEND | place, width=width, margin_r=right + room)


def head_panels(titles: Sequence[str], n_layers: int, n_heads: int) -> Any:
    """A row of empty maps of a model's heads: layers upwards, heads across."""
    cell = max(8, min(26, 420 // max(n_layers, n_heads)))
    figure: Any = panel_figure(
        titles,
        x="Head",
        y="Layer",
        width=max(cell * n_heads, 150),
        height=max(cell * n_layers, 60),
    )
    for update, count in ((figure.update_xaxes, n_heads), (figure.update_yaxes, n_layers)):
        update(range=(-0.5, count - 0.5), **ticks(0, count - 1, 16, whole=True))
    return figure


def add_head_cells(
    figure: Any,
    column: int,
    values: Sequence[Sequence[float]],
    said: Sequence[Sequence[str]],
    colours: Sequence[tuple[float, Colour]],
    limits: tuple[float, float],
) -> None:
    """Fill one of `head_panels`, with a tooltip text for each cell."""
    figure.add_heatmap(
        z=values,
        zmin=limits[0],
        zmax=limits[1],
        colorscale=colours,
        showscale=False,
        xgap=1,
        ygap=1,
        text=said,
        hoverinfo="text",
        row=1,
        col=column,
    )


def hover_text(words: Sequence[str]) -> str:
    """A tooltip of several lines, the first one bold."""
    first, *rest = map(_shown, map(visible_text, words))
    return "<br>".join([f"<b>{first}</b>", *rest])


def _shown(text: str) -> str:
    """A text escaped so that plotly, which parses some HTML, shows it unchanged."""
    return escape(text, quote=False)


def ticks(low: float, high: float, most: int = 4, *, whole: bool = False) -> dict[str, Any]:
    """Ticks at round numbers within a range, in plotly's format.

    Args:
        low, high: ends of the range.
        most: maximum number of intervals.
        whole: whether to allow integers only.
    """
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    places = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10], integer=whole).tick_values(low, high)
    shown = [float(place) for place in places if low <= place <= high]
    formatter = ScalarFormatter(useOffset=False)
    formatter.set_scientific(False)
    formatter.create_dummy_axis()
    return {"tickvals": shown, "ticktext": formatter.format_ticks(shown)}
