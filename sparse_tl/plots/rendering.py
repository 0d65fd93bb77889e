"""Figures that display and save themselves without loading anything from the network."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import copy
from html import escape
from pathlib import Path
from typing import Literal, TypeVar, get_args

from circuitsvis.utils.render import RenderedHTML

from sparse_tl.files import atomic_file
from sparse_tl.plots.palette import DARK_FILTER, GROUND, dark_svg

Theme = Literal["auto", "light", "dark"]
"""Theme of a saved figure. ``"auto"``: HTML follows the reader's system, images are light."""

Kind = TypeVar("Kind", bound="Figure")


class Figure:
    """A figure on a light or dark ground that can be saved to files.

    Args:
        title: title of the page, when saved as HTML.
    """

    page_margin = 16

    def __init__(self, title: str) -> None:
        self.title = title
        self.is_dark = False

    @property
    def light_html(self) -> str:
        """An HTML fragment that shows the figure on a light ground."""
        raise NotImplementedError

    @property
    def light_svg(self) -> str:
        """A static SVG element on a light ground."""
        raise NotImplementedError

    @property
    def svg(self) -> str:
        """The figure as a static SVG element."""
        return dark_svg(self.light_svg) if self.is_dark else self.light_svg

    def dark(self: Kind) -> Kind:
        """The same figure on a dark ground. By default, figures in notebooks are light."""
        turned = copy(self)
        turned.is_dark = True
        return turned

    def save(
        self, path: str | os.PathLike[str], *, scale: float = 2.0, theme: Theme = "auto"
    ) -> Path:
        """Write the figure to a file, completely or not at all.

        Args:
            path: path ending in ``.html`` (interactive), ``.svg`` or ``.png``; see `file_kinds`.
            scale: pixels of a PNG per pixel of the figure.
            theme: ``"light"``, ``"dark"``, or ``"auto"``: dark if made by `dark`; otherwise HTML
                follows the reader's system, and images are light.

        Returns:
            The path of the file.

        Raises:
            ValueError: the suffix or the theme is unknown.
        """
        if theme not in get_args(Theme):
            raise ValueError(f"expected a theme of {list(get_args(Theme))}; got {theme!r}")
        drawn = copy(self)
        drawn.is_dark = theme == "dark" or (theme == "auto" and self.is_dark)
        kinds = drawn.file_kinds(scale, "dark" if drawn.is_dark else theme)
        path = Path(path)
        make = kinds.get(path.suffix.lower())
        if make is None:
            *first, last = kinds
            raise ValueError(
                f"expected a path that ends in {', '.join(first)} or {last}; got {path.name!r}; "
                "choose one of these suffixes"
            )
        content = make()
        with atomic_file(path) as partial:
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def file_kinds(self, scale: float, theme: Theme) -> dict[str, Callable[[], str | bytes]]:
        """Functions that produce a file's content, by suffix."""
        return {
            ".html": lambda: html_page(
                self.title, self.light_html, margin=self.page_margin, theme=theme
            ),
            ".svg": lambda: f'<?xml version="1.0" encoding="UTF-8"?>\n{self.svg}\n',
            ".png": lambda: svg_to_png(self.svg, scale=scale),
        }


class SelfContainedFigure(Figure, RenderedHTML):
    """A figure that consists of one piece of HTML.

    circuitsvis checks for an internet connection and then chooses between two sources; here there
    is a single source, which contains everything.

    Args:
        html: HTML fragment with every tag closed, which also works without JavaScript.
        svg: the same figure as a static SVG element.
        title: title of the page, when saved as HTML.
    """

    def __init__(self, html: str, svg: str, title: str) -> None:
        super().__init__(title)
        self._html, self._svg = html, svg

    @property
    def light_html(self) -> str:
        return self._html

    @property
    def light_svg(self) -> str:
        return self._svg

    def _repr_html_(self) -> str:
        if self.is_dark:
            return f'<div style="filter: {DARK_FILTER}">\n{self.light_html}\n</div>'
        return self.light_html

    # circuitsvis's names for the same; the sources that its class chooses from are never made.
    __str__ = __html__ = show_code = _repr_html_


def svg_to_png(svg: str, *, scale: float = 2.0) -> bytes:
    """Render an SVG document, without a browser, and with text even if no fonts are installed.

    Raises:
        ValueError: the scale is not positive.
    """
    if not scale > 0:
        raise ValueError(f"expected a positive scale; got {scale}; 2 is sharp on most screens")
    import matplotlib
    import resvg_py

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    # Installed fonts are used for characters that DejaVu Sans lacks.
    fonts = [str(folder / name) for name in ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf")]
    family = "DejaVu Sans"
    return bytes(
        resvg_py.svg_to_bytes(
            svg_string=svg,
            zoom=scale,
            font_files=fonts,
            font_family=family,
            sans_serif_family=family,
        )
    )


def html_page(title: str, body: str, *, margin: int, theme: Theme = "auto") -> str:
    """A fragment as a complete page.

    Args:
        title: title of the page.
        body: HTML fragment, drawn for a light ground.
        margin: margin in pixels.
        theme: whether the page is dark: always, never, or following the reader's system.
    """
    # Applied to the root element, the filter includes the ground around the figure.
    turned = f":root {{ filter: {DARK_FILTER}; }}"
    rule = {
        "auto": f"@media screen and (prefers-color-scheme: dark) {{ {turned} }}\n",
        "light": "",
        "dark": f"{turned}\n",
    }[theme]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>\n:root {{ background: {GROUND}; }}\nbody {{ margin: {margin}px; }}\n{rule}"
        "</style>\n"
        f"</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
