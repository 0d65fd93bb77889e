"""Plotly figures of panels in rows and columns, in this package's style.

Lengths are in pixels. Every range, tick and position is explicit, so that `static_drawing` agrees.
Rows and columns are counted from 1, as in plotly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import chain
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sparse_tl.plots.page.palette import (
    AXIS,
    BACKGROUND,
    CLEAR,
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
from sparse_tl.plots.page.token_text import (
    clip_text,
    fit_text,
    text_width,
    visible_text,
    wrap_text,
)

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

Position = tuple[int, int]
"""Row and column of a panel."""

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


def in_rows(panels: Sequence[str]) -> list[list[str]]:
    """Panels in rows of similar length, with at most four each."""
    n_rows = -(-len(panels) // 4)
    per_row = -(-len(panels) // n_rows)
    return [list(panels[start : start + per_row]) for start in range(0, len(panels), per_row)]


def panel_positions(rows: Sequence[Sequence[Any]]) -> list[Position]:
    """The position of each panel."""
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
        x, y: axis titles; that of the vertical axes is at the first panel of each row.
        width, height: size of one plot.
        gap: gap between two plots of a row.
        below: additional space below every row, for a colour bar.
        shared: whether the panels of a row share a vertical axis, with ticks at the first one.
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
    figure.update_yaxes(title_text=y, col=1)
    for position, title in zip(panel_positions(titles), chain(*titles), strict=True):
        place = {"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "yshift": 5}
        _add_title(figure, position, title, width + min(12, gap), place)
    for row, title in enumerate(row_titles, start=1):
        place = {"x": 1, "xanchor": "center", "xshift": 0.6 * ROW_TITLE_WIDTH}
        place |= {"y": 0.5, "yanchor": "middle", "textangle": 90}
        _add_title(figure, (row, n_columns), title, height, place)
    return figure


def panel_size(figure: Any, position: Position) -> tuple[float, float]:
    """Width and height of a plot."""
    axes, (width, height) = figure.get_subplot(*position), inner_size(figure.layout)
    (left, right), (bottom, top) = axes.xaxis.domain, axes.yaxis.domain
    return (right - left) * width, (top - bottom) * height


def inner_size(layout: Any) -> tuple[float, float]:
    """Width and height within the margins."""
    margin = layout.margin
    return layout.width - margin.l - margin.r, layout.height - margin.t - margin.b


def _add_title(
    figure: go.Figure, position: Position, title: str, room: float, place: dict[str, Any]
) -> None:
    """Add a title, as large as fits, at a place in panel units."""
    if title:
        shown, size = fit_text(visible_text(title), PANEL_TITLE_SIZE, room)
        place = place | {"xref": "x domain", "yref": "y domain", "font": {"size": size}}
        row, column = position
        figure.add_annotation(text=plain_text(shown), row=row, col=column, **place)


def add_outer_titles(figure: Any, x: str, y: str) -> None:
    """Add axis titles for all panels together, the vertical one in two lines if necessary."""
    layout, n_lines = figure.layout, 1
    if text_width(y, LABEL_SIZE) > inner_size(layout)[1]:
        spaces = (i for i, character in enumerate(y) if character == " ")
        middle = min(spaces, key=lambda i: abs(i - len(y) / 2))
        y, n_lines = f"{y[:middle]}<br>{y[middle + 1 :]}", 2
        figure.update_layout(width=layout.width + LEFT_LINE, margin_l=layout.margin.l + LEFT_LINE)
    title = {"font": {"size": LABEL_SIZE}, "xref": "paper", "yref": "paper"}
    title |= {"xanchor": "center", "yanchor": "middle"}
    below = {"x": 0.5, "y": 0, "yshift": _X_TITLE - layout.margin.b}
    aside = {"x": 0, "y": 0.5, "xshift": n_lines * LEFT_LINE / 2 + 4 - layout.margin.l}
    figure.add_annotation(text=x, **title, **below)
    figure.add_annotation(text=y, textangle=-90, **title, **aside)


# ---- points, lines and cells -------------------------------------------------------------------


def add_points(
    figure: go.Figure,
    position: Position,
    *,
    x: Sequence[float],
    y: Sequence[float],
    colour: Colour,
    name: str,
    hover: Sequence[Sequence[str]],
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
        hovertext=[hover_text(words) for words in hover],
        row=position[0],
        col=position[1],
    )


def add_line(
    figure: go.Figure,
    position: Position,
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
    """Add a line to a panel, optionally with intervals.

    Args:
        name: name in the legend, which toggles all lines of this name together.
        group: name with which the line is toggled, if it has none in the legend.
        low, high: ends of the interval at each point; empty for none.
        hover: lines of text in the tooltip of each point, the first one bold.
    """
    row, column = position
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


BAR_TOP, BAR_ROOM = 50, 50
"""Distance of a bar from cells with an axis title in between, and the room needed below it."""
BAR_BELOW = 52
"""Distance from the top of a bar to the edge of the figure."""
CELLS: dict[str, Any] = {"xgap": 1, "ygap": 1, "hoverinfo": "text", "hoverongaps": False}
"""How plotly draws a heatmap of heads or layers."""
# Height of a bar, and the distance of its ends from those of its map, so that ticks of two bars do
# not touch.
_BAR_HEIGHT, _BAR_INSET = 8, 12


def add_cells(
    figure: Any,
    position: Position,
    values: Sequence[Sequence[float]],
    hover: Iterable[Iterable[Sequence[str]]],
    colours: Sequence[tuple[float, Colour]],
    limits: tuple[float, float],
    label: str,
    bar_top: float = BAR_TOP,
) -> None:
    """Fill a panel with cells, with a colour bar below it.

    Args:
        values: values by row and column; NaN for no cell.
        hover: lines of text in the tooltip of each cell.
        colours: colour scale.
        limits: values at the ends of the scale.
        label: label of the colour bar: the quantity and its unit.
        bar_top: top of the colour bar, in pixels below the cells.
    """
    row, column = position
    axes, (inner_width, inner_height) = figure.get_subplot(row, column), inner_size(figure.layout)
    width, _ = panel_size(figure, position)
    bar = {
        "orientation": "h",
        "x": axes.xaxis.domain[0] + _BAR_INSET / inner_width,
        "xanchor": "left",
        "xpad": 0,
        "len": width - 2 * _BAR_INSET,
        "lenmode": "pixels",
        "y": axes.yaxis.domain[0] - bar_top / inner_height,
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
        text=[[hover_text(words) for words in cells] for cells in hover],
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


def hover_text(words: Sequence[str]) -> str:
    """A tooltip from lines of text, the first one bold."""
    first, *rest = map(plain_text, map(visible_text, words))
    return "<br>".join([f"<b>{first}</b>", *rest])


def plain_text(text: str) -> str:
    """The text, escaped so that plotly, which parses some HTML, shows it unchanged."""
    return escape(text, quote=False)


def ticks(low: float, high: float, most: int = 4, *, whole: bool = False) -> dict[str, Any]:
    """Ticks at round numbers, or integers only, within a range: at most so many intervals."""
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    values = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10], integer=whole).tick_values(low, high)
    shown = [float(value) for value in values if low <= value <= high]
    formatter = ScalarFormatter(useOffset=False)
    formatter.set_scientific(False)
    formatter.create_dummy_axis()
    return {"tickvals": shown, "ticktext": formatter.format_ticks(shown)}


# ---- legends and notes -------------------------------------------------------------------------

# Width of a line sample including gaps, and height of an entry.
_SAMPLE, _ENTRY_HEIGHT, _NOTE_HEIGHT = 40, 19, 18
_LEGEND = {
    "bgcolor": CLEAR,
    "font": {"size": LEGEND_SIZE, "color": INK},
    "itemwidth": 30,
    "tracegroupgap": 0,
}


def legend_width(names: Iterable[str]) -> float:
    """Width of a legend of one column."""
    return max(text_width(name, LEGEND_SIZE) for name in names) + _SAMPLE + 6


def legend_height(n_names: int) -> float:
    """Height of a legend of one column."""
    return n_names * _ENTRY_HEIGHT + 8


def add_legend(figure: Any, position: Position) -> None:
    """Add a legend to a panel, at its lower right."""
    row, column = position
    panel = figure.get_subplot(row, column)
    name = panel.xaxis.plotly_name.replace("xaxis", "legend")
    place = {"x": panel.xaxis.domain[1], "y": panel.yaxis.domain[0]}
    figure.update_layout({name: _LEGEND | place | {"xanchor": "right", "yanchor": "bottom"}})
    in_legend = {"legend": name, "showlegend": True}
    figure.update_traces(in_legend, lambda trace: bool(trace.name), row=row, col=column)


def add_side_legend(figure: Any) -> None:
    """Add one legend at the right of all panels, with each name once."""
    layout, right = figure.layout, figure.layout.margin.r
    room = legend_width(_list_once(figure))
    x = 1 + (right - 6) / inner_size(layout)[0]
    place = {"x": x, "xanchor": "left", "y": 1, "yanchor": "top"}
    width = round(layout.width + room)
    figure.update_layout(legend=_LEGEND | place, width=width, margin_r=right + room)


def add_legend_below(figure: Any) -> None:
    """Add one legend below all panels, in rows, with each name once."""
    names = _list_once(figure)
    flow: dict[str, Any] = {"orientation": "h", "entrywidthmode": "pixels"}
    flow["entrywidth"] = max(text_width(name, LEGEND_SIZE) for name in names)
    figure.update_layout(legend=_LEGEND | flow)
    _, inner_height = inner_size(figure.layout)
    n_rows = -(-len(names) // entries_per_row(figure.layout, figure.layout.legend))
    start = _grow_below(figure, n_rows * _ENTRY_HEIGHT + 8)
    place = {"x": 0, "xanchor": "left", "y": (6 - start) / inner_height, "yanchor": "top"}
    figure.update_layout(legend=place)


def entries_per_row(layout: Any, legend: Any) -> int:
    """Number of entries per row of a legend."""
    if legend.orientation != "h":
        return 1
    return max(int(inner_size(layout)[0] // (legend.entrywidth + _SAMPLE)), 1)


def add_notes(figure: Any, notes: Iterable[str]) -> None:
    """Add notes below all panels, at the left, as many per line as fit."""
    layout, lines = figure.layout, []
    for note in notes:
        room = layout.width - layout.margin.l - 4
        *whole, rest = wrap_text(visible_text(note), TICK_SIZE, room)
        longer = f"{lines[-1]} {rest}" if lines and not whole else rest
        if lines and not whole and text_width(longer, TICK_SIZE) <= layout.width - layout.margin.l:
            lines[-1] = longer
        else:
            lines += [*whole, rest]
    for line in lines:
        figure.add_annotation(
            text=plain_text(line),
            font={"size": TICK_SIZE},
            **{"xref": "paper", "yref": "paper", "x": 0, "y": 0},
            xanchor="left",
            yanchor="middle",
            yshift=-_grow_below(figure, _NOTE_HEIGHT),
        )


def _grow_below(figure: Any, by: float) -> float:
    """Add space at the bottom of a figure; return its start, in pixels below the last row."""
    layout, start = figure.layout, figure.layout.margin.b
    figure.update_layout(height=layout.height + round(by), margin_b=start + round(by))
    return start


def _list_once(figure: Any) -> list[str]:
    """Show the first trace of each name in the legend; return the names in order."""
    first = {trace.name: trace for trace in figure.data[::-1] if trace.name}
    names = list(dict.fromkeys(trace.name for trace in figure.data if trace.name))
    for name in names:
        first[name].showlegend = True
    return names
