"""Display and saving of grids of panels.

In a notebook, a figure consists of plotly data, which JupyterLab draws interactively, and a static
image for use without plotly: in nbconvert's HTML, which drops plotly data, and on servers without
plotly's extension. Neither includes or loads plotly's script (4 MB per cell). A style that is
displayed with the figure inverts both in dark notebooks. Colab does not include plotly: there, the
figure loads plotly's script. Saved pages have the static drawing, with tooltips.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from html import escape, unescape
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio

from sparse_tl.plots.page.palette import CLEAR, dark_colour
from sparse_tl.plots.page.rendering import (
    AUTO,
    STYLE,
    Figure,
    Theme,
    interactive_html,
    notebook_style,
    read_assets,
    script_json,
)
from sparse_tl.plots.page.token_text import visible_text
from sparse_tl.plots.panels.panels import inner_size
from sparse_tl.plots.panels.static_drawing import draw_svg

PLOTLY_DATA = "application/vnd.plotly.v1+json"
# Buttons would cover the last title; dragging zooms, a double click resets.
_CONFIG = {"displayModeBar": False, "responsive": False}
# plotly's renderers that leave the display to the notebook.
_NOTEBOOKS = {"plotly_mimetype", "vscode"}
_INVISIBLE = {"opacity": 0, "showlegend": False, "hoverinfo": "skip", "mode": "markers"}
_REACH = 12.0
"""Distance in pixels from a point of a line within which its tooltip is shown."""


class GridFigure(Figure):
    """A figure of panels; `plotly` returns it as a plotly figure that can be modified.

    `save` also supports ``.json``, which holds plotly data. ``figure.plotly.write_html(path)``
    writes a page with plotly's own script.
    """

    page_margin = 0

    def __init__(self, drawn: go.Figure, title: str) -> None:
        super().__init__(visible_text(title))
        self._drawn = drawn
        # Cached across file kinds: `save` works on a copy, which shares the cache.
        self._draw_svg = cache(partial(draw_svg, drawn, self.title))

    @property
    def plotly(self) -> go.Figure:
        """The figure as a new plotly figure."""
        return go.Figure(_inverted(self._drawn.to_dict()) if self.is_dark else self._drawn)

    @property
    def light_svg(self) -> str:
        return self._draw_svg()

    @property
    def light_html(self) -> str:
        """The static drawing with tooltips; plotly's own script would take 4.8 MB in every file."""
        content = (
            f"<style>\n{read_assets(STYLE)}</style>\n"
            f'<div style="overflow-x: auto">\n{self.light_svg}\n</div>\n'
            f'<div class="tip" role="tooltip" hidden></div>'
        )
        targets = [
            [*(round(number, 1) for number in numbers), _lines(text)]
            for trace in self._drawn.data
            for *numbers, text in _targets(self._drawn.layout, trace)
        ]
        script = read_assets("interactive_figure.js", "grid_page.js")
        # Tooltips may be wider than the figure.
        attributes = 'class="sparse-tl-circuit" style="max-width: none"'
        return interactive_html(attributes, content, script, script_json({"targets": targets}))

    def file_kinds(self, scale: float, theme: Theme) -> dict[str, Callable[[], str | bytes]]:
        kinds = super().file_kinds(scale, theme)
        return {**kinds, ".json": lambda: str(self.plotly.to_json()) + "\n"}

    def show(self, *args: Any, **kwargs: Any) -> None:
        """Show the figure in the notebook; with arguments or elsewhere, as plotly does."""
        if args or kwargs or not (_renderers() & {*_NOTEBOOKS, "colab"}):
            return self.plotly.show(*args, **kwargs)
        from IPython.display import display

        display(self)

    def _ipython_display_(self) -> None:
        from IPython.display import HTML, display

        if "colab" in _renderers():
            style: dict[str, Any] = {"full_html": False, "include_plotlyjs": "cdn"}
            display(HTML(self._with_theme(self.plotly.to_html(config=_CONFIG, **style))))
            return
        if not _renderers() & _NOTEBOOKS:
            self.plotly.show()
            return
        if self.theme == "auto":
            display(HTML(notebook_style()))
        # Makes IPython fall back to the MIME bundle.
        raise NotImplementedError

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        data = json.loads(str(self.plotly.to_json())) | {"config": _CONFIG}
        if self.theme == "auto":
            # An invisible point: the trace of a map without a colour bar has no class.
            data["data"].append({"type": "scatter", "x": [0], "y": [0], "uid": AUTO, **_INVISIBLE})
        return {PLOTLY_DATA: data, "text/html": self._repr_html_(), "text/plain": repr(self)}

    def _repr_html_(self) -> str:
        # As an image, it shares no names or styles with others on the page.
        data = base64.b64encode(self.svg.encode()).decode()
        label, width = escape(self.title), self._drawn.layout["width"]
        style = f"display: block; width: {width}px; max-width: 100%; height: auto"
        return self._with_theme(
            f'<img src="data:image/svg+xml;base64,{data}" alt="{label}" style="{style}">'
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.title!r})"


def _renderers() -> set[str]:
    """plotly's default renderers, which depend on the environment."""
    return set((pio.renderers.default or "").split("+"))


def _inverted(value: Any, key: str = "") -> Any:
    """A part of a figure with all colours inverted."""
    if isinstance(value, dict):
        return {name: _inverted(part, name) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_inverted(part, key) for part in value]
    is_colour = key.endswith(("color", "colorscale")) and isinstance(value, str)
    return dark_colour(value) if is_colour and value != CLEAR else value


# ---- tooltips of saved pages -------------------------------------------------------------------


def _targets(layout: Any, trace: Any) -> Iterator[tuple[float, float, float, float, str]]:
    """Where a trace has tooltips: centre, half the width and height in pixels, and the text."""
    x_axis, y_axis = trace.xaxis or "x", trace.yaxis or "y"
    if trace.type == "heatmap":
        columns = _pixels(layout, x_axis, range(len(trace.z[0]) + 1))
        rows = _pixels(layout, y_axis, range(len(trace.z) + 1))
        across, up = abs(columns[1] - columns[0]) / 2, abs(rows[1] - rows[0]) / 2
        for y, values, texts in zip(rows[:-1], trace.z, trace.text, strict=True):
            for x, value, text in zip(columns[:-1], values, texts, strict=True):
                if not math.isnan(value):  # NaN: no cell
                    yield x, y, across, up, text
    elif trace.hovertext:
        columns, rows = _pixels(layout, x_axis, trace.x), _pixels(layout, y_axis, trace.y)
        for x, y, text in zip(columns, rows, trace.hovertext, strict=True):
            yield x, y, _REACH, _REACH, text


def _pixels(layout: Any, name: str, values: Iterable[float]) -> list[float]:
    """Values on an axis in pixels, from the left or from the top."""
    axis, (width, height) = layout[f"{name[0]}axis{name[1:]}"], inner_size(layout)
    (start, stop), (first, last) = axis.range, axis.domain
    coordinates = [math.log10(value) if axis.type == "log" else value for value in values]
    shares = [first + (last - first) * (at - start) / (stop - start) for at in coordinates]
    if name[0] == "x":
        return [layout.margin.l + share * width for share in shares]
    return [layout.margin.t + (1 - share) * height for share in shares]


def _lines(text: str) -> list[str]:
    """The lines of a tooltip from `panels.hover_text`."""
    return [unescape(line) for line in text.removeprefix("<b>").replace("</b>", "").split("<br>")]
