"""Plotly figures of panels in rows and columns, in this package's style.

Lengths are in pixels. Rows and columns are counted from 1, as in plotly.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from html import escape
from itertools import chain
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio
from plotly.subplots import make_subplots

from sparse_tl.plots.page import palette
from sparse_tl.plots.page.rendering import AUTO, NOTEBOOK_STYLE, Figure
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
LONGEST_NAME = 144
"""Maximum width of a name in a legend."""

Position = tuple[int, int]
"""Row and column of a panel."""

_AXIS: dict[str, Any] = {
    "zeroline": False,
    "tickangle": 0,
    "tickfont": {"size": palette.TICK_SIZE, "color": palette.MUTED},
}
_LABEL = {"size": palette.LABEL_SIZE, "color": palette.INK}
_TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": palette.FONT_FAMILY, "color": palette.INK, "size": palette.TICK_SIZE},
        "paper_bgcolor": palette.BACKGROUND,
        "plot_bgcolor": palette.BACKGROUND,
        "hovermode": "closest",
        "hoverlabel": {
            "bgcolor": palette.BACKGROUND,
            "font": {"size": palette.LABEL_SIZE, "color": palette.INK},
        },
        "xaxis": _AXIS
        | {
            "title": {"font": _LABEL, "standoff": 8},
            "showgrid": False,
            "showline": True,
            "linecolor": palette.AXIS,
            "ticks": "outside",
            "ticklen": 4,
            "tickcolor": palette.AXIS,
        },
        "yaxis": _AXIS
        | {
            "title": {"font": _LABEL, "standoff": 6},
            "gridcolor": palette.GRID,
            "ticks": "",
        },
        "annotationdefaults": {"showarrow": False, "font": {"color": palette.INK}},
        "legend": {
            "bgcolor": palette.CLEAR,
            "font": {"size": palette.LEGEND_SIZE, "color": palette.INK},
            "itemwidth": 30,
            "tracegroupgap": 0,
        },
    }
)

# ---- display and files -------------------------------------------------------------------------

# Buttons would cover the last title; dragging zooms, a double click resets.
_CONFIG = {"displayModeBar": False, "responsive": False}
_INVISIBLE = {"opacity": 0, "showlegend": False, "hoverinfo": "skip", "mode": "markers"}


def has_browser() -> bool:
    """Whether there is a Chrome or Chromium in which plotly can draw images."""
    from choreographer.browsers.chromium import Chromium

    return Chromium.find_browser(skip_local=False) is not None


class GridFigure(Figure):
    """A figure of panels; `plotly` returns it as a plotly figure that can be modified.

    Notebooks show it by plotly's default renderer (``plotly.io.renderers.default``), which is
    interactive in JupyterLab. nbconvert's HTML drops that; ``"plotly_mimetype+png"`` adds pictures.
    A page holds plotly's script, 5 MB; images are drawn by plotly in Chrome or Chromium (the one at
    the environment variable ``BROWSER_PATH``, if set).
    """

    page_margin = 0

    def __init__(self, drawn: go.Figure, title: str) -> None:
        super().__init__(visible_text(title))
        self._drawn = drawn
        self._images: dict[tuple[bool, float], dict[str, bytes]] = {}  # dark, scale; kind

    @property
    def plotly(self) -> go.Figure:
        """The figure as a new plotly figure."""
        return go.Figure(_inverted(self._drawn.to_dict()) if self.is_dark else self._drawn)

    @property
    def light_html(self) -> str:
        return self._drawn.to_html(full_html=False, config=_CONFIG)

    @property
    def svg(self) -> str:
        return self._drawn_images(2.0)["svg"].decode()

    def png(self, scale: float) -> bytes:
        return self._drawn_images(scale)["png"]

    def _drawn_images(self, scale: float) -> dict[str, bytes]:
        if (self.is_dark, scale) not in self._images:
            draw_images([self], scale)
        return self._images[self.is_dark, scale]

    def show(self, *args: Any, **kwargs: Any) -> None:
        """Show the figure as plotly does, with its arguments."""
        self.plotly.show(*args, **({"config": _CONFIG} | kwargs))

    def _ipython_display_(self) -> None:
        shown = self.plotly
        renderers = set((pio.renderers.default or "").split("+"))
        if self.theme == "auto" and renderers & {"plotly_mimetype", "vscode"}:
            from IPython.display import HTML, display

            display(HTML(NOTEBOOK_STYLE))
            # plotly draws elements without a class of ours, but makes one of the uid of a trace. An
            # invisible point has it: the trace of a map without a colour bar has no class.
            shown.add_scatter(x=[0], y=[0], uid=AUTO, **_INVISIBLE)
        shown.show(config=_CONFIG)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.title!r})"


def draw_images(figures: Sequence[GridFigure], scale: float = 2.0) -> None:
    """Draw figures as SVG and PNG, for `save`, in one browser, which takes seconds to start."""
    import kaleido

    async def draw() -> None:
        async with kaleido.Kaleido(n=1) as browser:
            for figure in figures:
                drawn = figure.plotly.to_dict()
                figure._images[figure.is_dark, scale] = {
                    "svg": await browser.calc_fig(drawn, opts={"format": "svg", "scale": 1}),
                    "png": await browser.calc_fig(drawn, opts={"format": "png", "scale": scale}),
                }

    with ThreadPoolExecutor(1) as thread:  # in a notebook, this one runs an event loop
        thread.submit(asyncio.run, draw()).result()


def _inverted(value: Any, key: str = "") -> Any:
    """A part of a figure with all colours inverted."""
    if isinstance(value, dict):
        return {name: _inverted(part, name) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_inverted(part, key) for part in value]
    is_colour = key.endswith(("color", "colorscale")) and isinstance(value, str)
    return palette.dark_colour(value) if is_colour and value != palette.CLEAR else value


# ---- panels ------------------------------------------------------------------------------------


def in_rows(panels: Sequence[str]) -> list[list[str]]:
    """Panels in rows of similar length, with at most four each."""
    n_rows = -(-len(panels) // 4)
    per_row = -(-len(panels) // n_rows)
    return [list(panels[start : start + per_row]) for start in range(0, len(panels), per_row)]


def panel_positions(rows: Sequence[Sequence[Any]]) -> list[Position]:
    """The position of each panel."""
    return [(r, c) for r, row in enumerate(rows, 1) for c, _ in enumerate(row, 1)]


def fitting_width(
    n_columns: int, *, gap: float, most: float = math.inf, beside: float = 0
) -> float:
    """Width of each of several plots in a row, so that the figure has at most `MAX_WIDTH`.

    Args:
        n_columns: plots in the row.
        gap: gap between two plots.
        most: maximum width of a plot.
        beside: width needed beside the plots, for labels and the titles of rows.
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


def count_ticks(most: float) -> dict[str, Any]:
    """Ticks of an axis of counts from 0: integers only."""
    return {"nticks": 5} if most > 8 else {"dtick": 1}


def panel_size(figure: Any, position: Position) -> tuple[float, float]:
    """Width and height of a plot."""
    axes, (width, height) = figure.get_subplot(*position), _inner_size(figure.layout)
    (left, right), (bottom, top) = axes.xaxis.domain, axes.yaxis.domain
    return (right - left) * width, (top - bottom) * height


def _inner_size(layout: Any) -> tuple[float, float]:
    """Width and height within the margins."""
    margin = layout.margin
    return layout.width - margin.l - margin.r, layout.height - margin.t - margin.b


def _add_title(
    figure: go.Figure, position: Position, title: str, room: float, place: dict[str, Any]
) -> None:
    """Add a title, as large as fits, at a place in panel units."""
    if title:
        shown, size = fit_text(visible_text(title), palette.PANEL_TITLE_SIZE, room)
        place = place | {"xref": "x domain", "yref": "y domain", "font": {"size": size}}
        row, column = position
        figure.add_annotation(text=plain_text(shown), row=row, col=column, **place)


def add_outer_titles(figure: Any, x: str, y: str) -> None:
    """Add axis titles for all panels together, the vertical one of two lines."""
    layout = figure.layout
    figure.update_layout(width=layout.width + LINE, margin_l=layout.margin.l + LINE)
    title = {"font": {"size": palette.LABEL_SIZE}, "xref": "paper", "yref": "paper"}
    title |= {"xanchor": "center", "yanchor": "middle"}
    below = {"x": 0.5, "y": 0, "yshift": _BELOW_TITLE - layout.margin.b}
    aside = {"x": 0, "y": 0.5, "xshift": LINE + 4 - layout.margin.l}
    figure.add_annotation(text=x, **title, **below)
    figure.add_annotation(text=y, textangle=-90, **title, **aside)


# ---- points, lines and cells -------------------------------------------------------------------


def add_line(
    figure: go.Figure,
    position: Position,
    *,
    x: Sequence[float | None],
    y: Sequence[float | None],
    colour: palette.Colour,
    name: str = "",
    group: str = "",
    low: Sequence[float] = (),
    high: Sequence[float] = (),
    hover: Sequence[Sequence[str]] = (),
    width: float = palette.CURVE_WEIGHT,
    opacity: float = 1.0,
    dashed: bool = False,
    point_size: float = 0,
) -> None:
    """Add a line to a panel, optionally with intervals, or points.

    Args:
        name: name in the legend, which toggles all lines of this name and colour together.
        group: name with which the line is toggled, if it has none in the legend.
        low, high: ends of the interval at each point; empty for none.
        hover: lines of text in the tooltip of each point, the first one bold.
        point_size: diameter of points to draw instead of a line.
    """
    row, column = position
    style: dict[str, Any] = {"row": row, "col": column, "showlegend": False}
    style |= {"legendgroup": f"{name or group} {colour}", "mode": "lines"}
    if len(low):
        # Along the upper ends, then back along the lower ends.
        figure.add_scatter(
            x=[*x, *reversed(x)],
            y=[*high, *reversed(low)],
            line={"width": 0},
            fill="toself",
            fillcolor=colour,
            opacity=palette.INTERVAL_ALPHA,
            hoverinfo="skip",
            **style,
        )
    if point_size:
        style |= {"mode": "markers", "marker": {"color": colour, "size": point_size}}
    else:
        dash = {"dash": ",".join(f"{length}px" for length in palette.DASHES)} if dashed else {}
        style["line"] = {"color": colour, "width": width, **dash}
    # No hovertemplate: it would substitute any %{...} in a name.
    figure.add_scatter(
        x=list(x),
        y=list(y),
        opacity=opacity,
        name=plain_text(clip_text(visible_text(name), palette.LEGEND_SIZE, LONGEST_NAME)),
        hoverinfo="text" if len(hover) else "skip",
        hovertext=[hover_text(words) for words in hover],
        **style,
    )


BAR_TOP, BAR_ROOM = 50, 50
"""Distance of a bar from cells with an axis title in between, and the room needed below it."""
BAR_BELOW = 52
"""Distance from the top of a bar to the edge of the figure."""
# Height of a bar, and the distance of its ends from those of its map, so that ticks of two bars do
# not touch.
_BAR_HEIGHT, _BAR_INSET = 8, 12


def add_cells(
    figure: Any,
    position: Position,
    values: Sequence[Sequence[float]],
    hover: Iterable[Iterable[Sequence[str]]],
    colours: Sequence[tuple[float, palette.Colour]],
    limits: tuple[float, float],
    label: str = "",
    bar_top: float = BAR_TOP,
) -> None:
    """Fill a panel with cells, with a colour bar below it if that has a label.

    Args:
        values: values by row and column; NaN for no cell.
        hover: lines of text in the tooltip of each cell.
        colours: colour scale.
        limits: values at the ends of the scale.
        label: label of the colour bar: the quantity and its unit.
        bar_top: top of the colour bar, in pixels below the cells.
    """
    row, column = position
    axes, (inner_width, inner_height) = figure.get_subplot(row, column), _inner_size(figure.layout)
    width, _ = panel_size(figure, position)
    shown = plain_text(clip_text(visible_text(label), palette.TICK_SIZE, width))
    ticks = [limits[0], sum(limits) / 2, limits[1]]
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
        "tickfont": {"size": palette.TICK_SIZE, "color": palette.MUTED},
        "tickangle": 0,
        "tickvals": ticks,
        "ticktext": [f"{tick:.3g}".replace("-", "\N{MINUS SIGN}") for tick in ticks],
        "title": {"text": shown, "side": "bottom", "font": {"size": palette.TICK_SIZE}},
    }
    figure.add_heatmap(
        z=values,
        zmin=limits[0],
        zmax=limits[1],
        colorscale=colours,
        colorbar=bar,
        showscale=bool(label),
        text=[[hover_text(words) for words in cells] for cells in hover],
        hoverinfo="text",
        hoverongaps=False,
        xgap=1,
        ygap=1,
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


def add_texts(
    figure: Any, texts: Iterable[tuple[Position, float, float, str]], **style: Any
) -> None:
    """Add texts (panel, x, y, text), all at once: plotly validates all at each addition."""
    added = []
    for position, x, y, text in texts:
        axes = figure.get_subplot(*position)
        xref, yref = (axis.plotly_name.replace("axis", "") for axis in axes)
        place = {"x": x, "xref": xref, "xanchor": "center", "y": y, "yref": yref}
        added.append({"text": plain_text(text)} | place | style)
    figure.update_layout(annotations=[*figure.layout.annotations, *added])


# ---- legends and notes -------------------------------------------------------------------------

# Width of a line sample including gaps, and height of an entry.
LINE, _BELOW_TITLE = 16, 20
"""Width of a line of a vertical axis title; height of the middle of a horizontal one."""
_SAMPLE, _ENTRY_HEIGHT, _NOTE_HEIGHT = 50, 19, 18


def legend_size(names: Sequence[str]) -> tuple[float, float]:
    """Width and height of a legend of one column."""
    width = max(text_width(name, palette.LEGEND_SIZE) for name in names) + _SAMPLE + 6
    return width, len(names) * _ENTRY_HEIGHT + 8


def _listed_once(figure: Any) -> dict[tuple[str, palette.Colour], Any]:
    """The traces that a legend lists: the first of each name and colour."""
    first = dict[tuple[str, palette.Colour], Any]()
    for trace in figure.data:
        if trace.name:
            first.setdefault((trace.name, trace.line.color or trace.marker.color), trace)
    for trace in first.values():
        trace.showlegend = True
    return first


def add_inner_legend(figure: Any, position: Position) -> None:
    """Add a legend to a panel, at its lower right."""
    row, column = position
    panel = figure.get_subplot(row, column)
    name = panel.xaxis.plotly_name.replace("xaxis", "legend")
    place = {"x": panel.xaxis.domain[1], "xanchor": "right"}
    place |= {"y": panel.yaxis.domain[0], "yanchor": "bottom"}
    figure.update_layout({name: _TEMPLATE.layout.legend.to_plotly_json() | place})
    in_legend = {"legend": name, "showlegend": True}
    figure.update_traces(in_legend, lambda trace: bool(trace.name), row=row, col=column)


def add_side_legend(figure: Any) -> None:
    """Add one legend at the right of all panels, with each name once per colour."""
    layout, right = figure.layout, figure.layout.margin.r
    room, _ = legend_size([name for name, _ in _listed_once(figure)])
    place = {"x": 1 + (right - 6) / _inner_size(layout)[0], "xanchor": "left", "y": 1}
    width = round(layout.width + room)
    figure.update_layout(legend=place | {"yanchor": "top"}, width=width, margin_r=right + room)


def add_legend(figure: Any) -> None:
    """Add one legend below all panels, in rows, with each name once per colour."""
    first = _listed_once(figure)
    inner_width, inner_height = _inner_size(figure.layout)
    entry = max(text_width(name, palette.LEGEND_SIZE) for name, _ in first)
    n_rows = -(-len(first) // max(int(inner_width // (entry + _SAMPLE)), 1))
    start = _grow_below(figure, n_rows * _ENTRY_HEIGHT + 8)
    flow = {"orientation": "h", "entrywidthmode": "pixels", "entrywidth": entry}
    place = {"x": 0, "xanchor": "left", "y": (6 - start) / inner_height, "yanchor": "top"}
    figure.update_layout(legend=flow | place)


def add_notes(figure: Any, notes: Iterable[str]) -> None:
    """Add notes below all panels, at the left."""
    layout = figure.layout
    room = layout.width - layout.margin.l - 4
    for line in wrap_text(visible_text(" ".join(notes)), palette.TICK_SIZE, room):
        figure.add_annotation(
            text=plain_text(line),
            font={"size": palette.TICK_SIZE},
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
