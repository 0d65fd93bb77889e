"""Grids of panels as pages: the static drawing, with tooltips at cells and at points of lines.

plotly's own script would take 4.8 MB in every file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import unescape
from typing import Any

from sparse_tl.plots.page.interactive_html import STYLE, interactive_html, read_assets, script_json

_REACH = 12.0
"""Distance in pixels from a point of a line within which its tooltip is shown."""

Target = tuple[float, float, float, float, list[str]]
"""Centre and half the width and height of a hover target, in pixels; lines of its tooltip."""


def page_html(drawn: Any, svg: str) -> str:
    """A plotly figure as HTML.

    Args:
        drawn: the figure.
        svg: its static drawing.
    """
    targets = [
        [*(round(number, 1) for number in numbers), lines]
        for trace in drawn.data
        for *numbers, lines in _targets(drawn.layout, trace)
    ]
    content = (
        f"<style>\n{read_assets(STYLE)}</style>\n"
        f'<div style="overflow-x: auto">\n{svg}\n</div>\n'
        f'<div class="tip" role="tooltip" hidden></div>'
    )
    script = read_assets("interactive_figure.js", "grid_page.js")
    # Tooltips may be wider than the figure.
    attributes = 'class="sparse-tl-circuit" style="max-width: none"'
    return interactive_html(attributes, content, script, script_json({"targets": targets}))


def _targets(layout: Any, trace: Any) -> Iterator[Target]:
    """The hover targets of a trace."""
    x_axis, y_axis = trace.xaxis or "x", trace.yaxis or "y"
    if trace.type == "heatmap":
        columns = _pixels(layout, x_axis, range(len(trace.z[0]) + 1))
        rows = _pixels(layout, y_axis, range(len(trace.z) + 1))
        across, up = abs(columns[1] - columns[0]) / 2, abs(rows[1] - rows[0]) / 2
        for y, values, texts in zip(rows[:-1], trace.z, trace.text, strict=True):
            for x, value, text in zip(columns[:-1], values, texts, strict=True):
                if not math.isnan(value):  # NaN: no cell
                    yield x, y, across, up, _lines(text)
    elif trace.hovertext:
        columns, rows = _pixels(layout, x_axis, trace.x), _pixels(layout, y_axis, trace.y)
        for x, y, text in zip(columns, rows, trace.hovertext, strict=True):
            yield x, y, _REACH, _REACH, _lines(text)


def _pixels(layout: Any, name: str, values: Iterable[float]) -> list[float]:
    """Values on an axis in pixels, from the left or from the top."""
    axis, margin = layout[f"{name[0]}axis{name[1:]}"], layout.margin
    (start, stop), (first, last) = axis.range, axis.domain
    coordinates = [math.log10(value) if axis.type == "log" else value for value in values]
    shares = [first + (last - first) * (at - start) / (stop - start) for at in coordinates]
    if name[0] == "x":
        return [margin.l + share * (layout.width - margin.l - margin.r) for share in shares]
    room = layout.height - margin.t - margin.b
    return [margin.t + (1 - share) * room for share in shares]


def _lines(text: str) -> list[str]:
    """The lines of a tooltip from `plotly_panels.hover_text`."""
    return [unescape(line) for line in text.removeprefix("<b>").replace("</b>", "").split("<br>")]
