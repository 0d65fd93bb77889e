"""A grid of panels as a plotly figure, to be moved, zoomed and hovered."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from sparse_tl.plots.grid import BOTTOM, ROW_TITLE_WIDTH, TOP, Axis, Box, Grid, Line, Panel
from sparse_tl.plots.palette import (
    AXIS,
    DASHES,
    EMPTY_CELL,
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
    translucent,
)
from sparse_tl.plots.token_text import fit_text, visible_text


def draw_plotly(grid: Grid) -> go.Figure:
    """The grid as plotly draws it."""
    width, height = grid.size
    legends = grid.legends()
    layout: dict[str, Any] = {
        "template": "none",
        "width": width,
        "height": height,
        "margin": {"l": 0, "r": 0, "t": TOP, "b": BOTTOM, "pad": 0, "autoexpand": False},
        "font": {"family": FONT_FAMILY, "color": INK, "size": TICK_SIZE},
        "paper_bgcolor": GROUND,
        "plot_bgcolor": GROUND,
        "hovermode": "closest",
        "modebar": {"bgcolor": translucent(GROUND, 0.9), "remove": ["select2d", "lasso2d"]},
        "hoverlabel": {"bgcolor": GROUND, "font": {"size": LABEL_SIZE, "color": INK}},
        "annotations": [],
    }
    inner = height - TOP - BOTTOM
    for number, legend in enumerate(legends, start=1):
        layout[_numbered("legend", number)] = {
            "x": legend.right / width,
            "xanchor": "right",
            "y": 1 - (legend.bottom - TOP) / inner,
            "yanchor": "bottom",
            "bgcolor": translucent(GROUND, 0),
            "font": {"size": LEGEND_SIZE, "color": INK},
            "itemwidth": 30,
            "tracegroupgap": 0,
        }
    traces: list[Any] = []
    for number, (box, panel) in enumerate(grid.panels(), start=1):
        x, y = _numbered("x", number), _numbered("y", number)
        layout |= _axes(panel, box, number, width, inner)
        layout["annotations"] += _panel_texts(panel, box, x, y)
        if panel.cells is not None:
            traces.append(go.Heatmap(**_cells(panel), xaxis=x, yaxis=y))
        for line in panel.lines:
            if len(line.low):
                traces.append(go.Scatter(**_interval(line), xaxis=x, yaxis=y))
            at = (n for n, some in enumerate(legends, start=1) if line in some.lines)
            legend = {"legend": _numbered("legend", next(at))} if line.listed else {}
            said = _line(line, grid.legend_text(line))
            traces.append(go.Scatter(**said, **legend, xaxis=x, yaxis=y))
        if not panel.lines and panel.cells is None:  # an axis without a trace would not be drawn
            traces.append(go.Scatter(x=[], y=[], showlegend=False, xaxis=x, yaxis=y))
    for row, title in enumerate(grid.row_titles):
        box = grid.box(row, len(grid.rows[row]) - 1)
        place = _place(box.right + 0.6 * ROW_TITLE_WIDTH, (box.top + box.bottom) / 2, width, inner)
        layout["annotations"].append(
            _text(title, box.height) | place | {"textangle": 90, "yanchor": "middle"}
        )
    return go.Figure(data=traces, layout=layout)


def _numbered(name: str, number: int) -> str:
    """As plotly counts: x, x2, x3."""
    return name if number == 1 else f"{name}{number}"


def _escaped(text: str) -> str:
    """A text that plotly, which reads some HTML, shows as it is."""
    return escape(visible_text(text), quote=False)


def _hover(words: Sequence[str]) -> str:
    first, *rest = map(_escaped, words)
    return "<br>".join([f"<b>{first}</b>", *rest])


def _axes(panel: Panel, box: Box, number: int, width: float, inner: float) -> dict[str, Any]:
    shared = {"zeroline": False, "tickangle": 0, "linecolor": AXIS}
    shared |= {"tickfont": {"size": TICK_SIZE, "color": MUTED}}
    across = {
        **shared,
        **_axis(panel.x, standoff=8),
        "domain": [box.left / width, box.right / width],
        "anchor": _numbered("y", number),
        "showgrid": False,
        "showline": True,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": AXIS,
    }
    upwards = {
        **shared,
        **_axis(panel.y, standoff=6),
        "domain": [1 - (box.bottom - TOP) / inner, 1 - (box.top - TOP) / inner],
        "anchor": _numbered("x", number),
        "showgrid": True,
        "gridcolor": GRID,
        "showline": False,  # else a colour of the line would bring the line
        "ticks": "",
    }
    return {_numbered("xaxis", number): across, _numbered("yaxis", number): upwards}


def _axis(axis: Axis, standoff: int) -> dict[str, Any]:
    font = {"size": LABEL_SIZE, "color": INK}
    return {
        "type": "log" if axis.log else "linear",
        "range": list(axis.span),
        "tickvals": list(axis.ticks),
        "ticktext": list(axis.ticks.values()) if axis.labelled else [""] * len(axis.ticks),
        "title": {
            "text": axis.title if axis.labelled else "",
            "font": font,
            "standoff": standoff,
        },
    }


def _panel_texts(panel: Panel, box: Box, x: str, y: str) -> list[dict[str, Any]]:
    texts = []
    if panel.title:
        place = {"xref": f"{x} domain", "yref": f"{y} domain", "x": 0, "y": 1, "yshift": 5}
        texts.append(_text(panel.title, box.width + 12) | place | {"xanchor": "left"})
    if panel.note is not None:
        font = {"size": PANEL_TITLE_SIZE - 1, "color": INK}
        place = {"xref": x, "yref": y, "x": panel.note.x, "y": panel.note.y, "font": font}
        texts.append(_text(panel.note.text, box.width) | place)
    return texts


def _text(text: str, room: float) -> dict[str, Any]:
    shown, size = fit_text(visible_text(text), PANEL_TITLE_SIZE, room)
    return {
        "text": escape(shown, quote=False),
        "showarrow": False,
        "xanchor": "center",
        "yanchor": "bottom",
        "font": {"size": size, "color": INK},
    }


def _place(x: float, y: float, width: float, inner: float) -> dict[str, Any]:
    """A place in pixels, for an annotation."""
    return {"xref": "paper", "yref": "paper", "x": x / width, "y": 1 - (y - TOP) / inner}


def _interval(line: Line) -> dict[str, Any]:
    """The area of the intervals: along their upper ends and back along the lower ones."""
    return {
        "x": [*line.x, *reversed(line.x)],
        "y": [*line.high, *reversed(line.low)],
        "mode": "lines",
        "line": {"width": 0},
        "fill": "toself",
        "fillcolor": translucent(line.colour, INTERVAL_ALPHA),
        "name": f"{_escaped(line.name)}, interval",
        "legendgroup": line.name,
        "showlegend": False,
        "hoverinfo": "skip",
    }


def _line(line: Line, text: str) -> dict[str, Any]:
    colour = line.colour if line.alpha == 1 else translucent(line.colour, line.alpha)
    dash = {"dash": ",".join(f"{length}px" for length in DASHES)} if line.dashed else {}
    # No hovertemplate: it would fill in whatever %{...} a name holds.
    hover: dict[str, Any] = {"hoverinfo": "skip"}
    if len(line.hover):
        hover = {"hoverinfo": "text", "hovertext": [_hover(words) for words in line.hover]}
    return {
        "x": list(line.x),
        "y": list(line.y),
        "mode": "lines",
        "line": {"color": colour, "width": line.width, **dash},
        "name": escape(text, quote=False),
        "legendgroup": line.name,
        "showlegend": line.listed,
        **hover,
    }


def _cells(panel: Panel) -> dict[str, Any]:
    assert panel.cells is not None
    return {
        "z": [list(row) for row in panel.cells.values],
        "zmin": 0,
        "zmax": 1,
        "colorscale": [[0, EMPTY_CELL], [1, panel.cells.colour]],
        "showscale": False,
        "xgap": 1,
        "ygap": 1,
        "text": [[_hover(words) for words in row] for row in panel.cells.hover],
        "hoverinfo": "text",
    }
