"""Plotly's figures as this package shows and saves them.

In a notebook a figure is plotly's own data, which JupyterLab draws and moves, beside a static SVG,
which stands wherever plotly is absent: in nbconvert's HTML, which leaves out plotly's data, and
under a server without plotly's extension. Neither holds plotly's script, 4 MB in every cell, nor
loads it.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio

from sparse_tl.plots.curves_svg import draw_svg, figure_label, layout_of
from sparse_tl.plots.palette import (
    FONT_FAMILY,
    GROUND,
    INK,
    LABEL_SIZE,
    TICK_SIZE,
    dark_colour,
    translucent,
)
from sparse_tl.plots.png import svg_to_png
from sparse_tl.plots.rendering import Theme, checked_theme, html_page, save_picture, svg_document

CLEAR = translucent(GROUND, 0)
PLOTLY_DATA = "application/vnd.plotly.v1+json"
# The buttons would cover the last title; dragging zooms, a double click resets.
_CONFIG = {"displayModeBar": False, "responsive": False}


class PlotlyFigure(go.Figure):
    """A plotly figure that also shows without plotly's script, and saves itself to files."""

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        scale: float = 2.0,
        theme: Theme = "auto",
        title: str | None = None,
    ) -> Path:
        """Write the figure to a file; as `save_figure`."""
        return save_figure(self, path, scale=scale, theme=theme, title=title)

    def dark(self) -> PlotlyFigure:
        """The same figure on a dark ground; without it, figures in notebooks are light cards."""
        return PlotlyFigure(_turned(json.loads(str(self.to_json()))))

    def show(self, *args: Any, **kwargs: Any) -> None:
        """Show the figure in the notebook, or as plotly does where there is none or if told how."""
        if args or kwargs or not _in_notebook():
            return super().show(*args, **kwargs)
        from IPython.display import display

        display(self)

    def _ipython_display_(self) -> None:
        if not _in_notebook():
            return super()._ipython_display_()
        # IPython takes this as "not me", and asks for the bundle.
        raise NotImplementedError

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None, validate: bool = True, **kwargs: Any
    ) -> dict[str, Any]:
        data = json.loads(str(self.to_json(validate=validate))) | {"config": _CONFIG}
        return {PLOTLY_DATA: data, "text/html": self._repr_html_(), "text/plain": repr(self)}

    def _repr_html_(self) -> str:
        try:
            svg = draw_svg(self)
        except ValueError:  # the user has added what the static drawing lacks
            return self.to_html(full_html=False, include_plotlyjs=True, config=_CONFIG)
        style = 'style="display: block; max-width: 100%; height: auto" '
        return f"<div>\n{svg.replace('<svg ', f'<svg {style}', 1)}\n</div>"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({figure_label(self)!r})"


def save_figure(
    figure: go.Figure,
    path: str | os.PathLike[str],
    *,
    scale: float = 2.0,
    theme: Theme = "auto",
    title: str | None = None,
) -> Path:
    """Write a figure to a file, which appears whole or not at all.

    HTML holds plotly's script and needs no network; SVG and PNG are drawn without a browser.

    Args:
        figure: of this package.
        path: ends in ``.html`` (interactive), ``.json`` (plotly's), ``.svg`` or ``.png``.
        scale: pixels of a PNG per pixel of the figure.
        theme: ``"light"``, ``"dark"``, or ``"auto"``: as `PlotlyFigure.dark` has made the figure;
            otherwise HTML as the reader's system has it, and pictures light.
        title: of the page, for HTML; what the figure shows when left out.

    Returns:
        The path written.

    Raises:
        ValueError: if the suffix or the theme is another one, or the figure has something that the
            static drawing lacks.
    """
    drawn = figure
    is_dark = str(layout_of(figure).paper_bgcolor) == dark_colour(GROUND)
    if checked_theme(theme) == "dark" and not is_dark:
        drawn = PlotlyFigure(_turned(json.loads(str(figure.to_json()))))
    # A dark figure is turned already; its page is not, but for the ground.
    page_theme: Theme = "auto" if theme == "auto" and not is_dark else "light"
    ground = str(layout_of(drawn).paper_bgcolor)
    return save_picture(
        path,
        {
            ".html": lambda: html_page(
                title or figure_label(drawn),
                _drawing(drawn),
                margin=0,
                theme=page_theme,
                ground=ground,
            ),
            ".json": lambda: str(drawn.to_json()) + "\n",
            ".svg": lambda: svg_document(draw_svg(drawn)),
            ".png": lambda: svg_to_png(draw_svg(drawn), scale=scale),
        },
    )


def base_layout(width: int, height: int, top: int, bottom: int) -> dict[str, Any]:
    """What the layouts of all figures share: type, ground, and margins above and below.

    Every range, tick and place is explicit, so that plotly and the static drawing agree.
    """
    return {
        "template": "none",
        "width": width,
        "height": height,
        "margin": {"l": 0, "r": 0, "t": top, "b": bottom, "pad": 0, "autoexpand": False},
        "font": {"family": FONT_FAMILY, "color": INK, "size": TICK_SIZE},
        "paper_bgcolor": GROUND,
        "plot_bgcolor": GROUND,
        "hovermode": "closest",
        "modebar": {"bgcolor": translucent(GROUND, 0.9), "remove": ["select2d", "lasso2d"]},
        "hoverlabel": {"bgcolor": GROUND, "font": {"size": LABEL_SIZE, "color": INK}},
    }


def _in_notebook() -> bool:
    """Whether plotly would show its data in a notebook: nobody has chosen another way."""
    return "plotly_mimetype" in (pio.renderers.default or "")


def _turned(value: Any, key: str = "") -> Any:
    """A part of a figure with its colours turned: what stands under the name of a colour."""
    if isinstance(value, dict):
        return {name: _turned(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [_turned(part, key) for part in value]
    if isinstance(value, str) and (key.endswith("color") or key == "colorscale"):
        return dark_colour(value)
    return value


def _drawing(figure: go.Figure) -> str:
    digest = hashlib.sha256(str(figure.to_json()).encode()).hexdigest()[:12]
    return figure.to_html(
        full_html=False,
        include_plotlyjs=True,
        div_id=f"figure-{digest}",  # else random: the same figure is the same file
        config=_CONFIG,
    )
