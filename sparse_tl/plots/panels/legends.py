"""Legends and notes of a figure of panels: inside a panel, beside all panels, or below them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sparse_tl.plots.page.palette import CLEAR, INK, LEGEND_SIZE, TICK_SIZE
from sparse_tl.plots.page.token_text import text_width, visible_text, wrap_text
from sparse_tl.plots.panels.plotly_panels import plain_text

# Width of a line sample including gaps, and height of an entry.
_SAMPLE, _ENTRY_HEIGHT, _NOTE_HEIGHT = 40, 19, 18
_LEGEND = {
    "bgcolor": CLEAR,
    "font": {"size": LEGEND_SIZE, "color": INK},
    "itemwidth": 30,
    "tracegroupgap": 0,
}


def legend_width(names: Iterable[str]) -> float:
    """Width of a legend of one column, in pixels."""
    return max(text_width(name, LEGEND_SIZE) for name in names) + _SAMPLE + 6


def legend_height(n_names: int) -> float:
    """Height of a legend of one column, in pixels."""
    return n_names * _ENTRY_HEIGHT + 8


def add_legend(figure: Any, row: int, column: int) -> None:
    """Add a legend to a panel, at its lower right."""
    panel = figure.get_subplot(row, column)
    name = panel.xaxis.plotly_name.replace("xaxis", "legend")
    position = {"x": panel.xaxis.domain[1], "y": panel.yaxis.domain[0]}
    figure.update_layout({name: _LEGEND | position | {"xanchor": "right", "yanchor": "bottom"}})
    in_legend = {"legend": name, "showlegend": True}
    figure.update_traces(in_legend, lambda trace: bool(trace.name), row=row, col=column)


def add_side_legend(figure: Any) -> None:
    """Add one legend at the right of all panels, with each name once."""
    layout, left, right = figure.layout, figure.layout.margin.l, figure.layout.margin.r
    room = legend_width(_list_once(figure))
    x = 1 + (right - 6) / (layout.width - left - right)
    position = {"x": x, "xanchor": "left", "y": 1, "yanchor": "top"}
    width = round(layout.width + room)
    figure.update_layout(legend=_LEGEND | position, width=width, margin_r=right + room)


def add_legend_below(figure: Any) -> None:
    """Add one legend below all panels, in rows, with each name once."""
    names = _list_once(figure)
    flow: dict[str, Any] = {"orientation": "h", "entrywidthmode": "pixels"}
    flow["entrywidth"] = max(text_width(name, LEGEND_SIZE) for name in names)
    figure.update_layout(legend=_LEGEND | flow)
    layout = figure.layout
    inner = layout.height - layout.margin.t - layout.margin.b
    n_rows = -(-len(names) // entries_per_row(layout, layout.legend))
    start = grow_below(figure, n_rows * _ENTRY_HEIGHT + 8)
    position = {"x": 0, "xanchor": "left", "y": (6 - start) / inner, "yanchor": "top"}
    figure.update_layout(legend=position)


def entries_per_row(layout: Any, legend: Any) -> int:
    """Number of entries per row of a legend."""
    if legend.orientation != "h":
        return 1
    room = layout.width - layout.margin.l - layout.margin.r
    return max(int(room // (legend.entrywidth + _SAMPLE)), 1)


def grow_below(figure: Any, by: float) -> float:
    """Add space at the bottom of a figure; return its start, in pixels below the last row."""
    layout, start = figure.layout, figure.layout.margin.b
    figure.update_layout(height=layout.height + round(by), margin_b=start + round(by))
    return start


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
            yshift=-grow_below(figure, _NOTE_HEIGHT),
        )


def _list_once(figure: Any) -> list[str]:
    """Show the first trace of each name in the legend; return the names in order."""
    first = {trace.name: trace for trace in figure.data[::-1] if trace.name}
    names = list(dict.fromkeys(trace.name for trace in figure.data if trace.name))
    for name in names:
        first[name].showlegend = True
    return names
