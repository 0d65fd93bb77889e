"""Display and saving of grids of panels.

In a notebook, a figure consists of plotly data, which JupyterLab draws interactively, and a static
image for use without plotly: in nbconvert's HTML, which drops plotly data, and on servers without
plotly's extension. Neither includes or loads plotly's script (4 MB per cell). A style that is
displayed with the figure inverts both in dark notebooks. Colab does not include plotly: there, the
figure loads plotly's script. Saved pages have the drawing and tooltips (`grid_page`).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from functools import cache, partial
from html import escape
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio

from sparse_tl.plots.page.palette import CLEAR, dark_colour
from sparse_tl.plots.page.rendering import AUTO, Figure, Theme, notebook_style
from sparse_tl.plots.page.token_text import visible_text
from sparse_tl.plots.panels.grid_page import page_html
from sparse_tl.plots.panels.static_drawing import draw_svg

PLOTLY_DATA = "application/vnd.plotly.v1+json"
# Buttons would cover the last title; dragging zooms, a double click resets.
_CONFIG = {"displayModeBar": False, "responsive": False}
# plotly's renderers that leave the display to the notebook.
_NOTEBOOKS = {"plotly_mimetype", "vscode"}
_INVISIBLE = {"opacity": 0, "showlegend": False, "hoverinfo": "skip", "mode": "markers"}


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
        return page_html(self._drawn, self.light_svg)

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
            display(HTML(self._with_theme(_colab_html(self.plotly))))
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
        label, width = escape(self.title, quote=True), self._drawn.layout["width"]
        style = f"display: block; width: {width}px; max-width: 100%; height: auto"
        return self._with_theme(
            f'<img src="data:image/svg+xml;base64,{data}" alt="{label}" style="{style}">'
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.title!r})"


def _colab_html(drawn: go.Figure) -> str:
    digest = hashlib.sha256(str(drawn.to_json()).encode()).hexdigest()[:12]
    return drawn.to_html(
        full_html=False,
        include_plotlyjs="cdn",
        div_id=f"figure-{digest}",  # deterministic, so that files are reproducible
        config=_CONFIG,
    )


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
