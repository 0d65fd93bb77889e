"""Figures that are one piece of HTML: nothing is loaded, with or without a network."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from copy import copy
from html import escape
from pathlib import Path
from typing import Literal, TypeVar, get_args

from circuitsvis.utils.render import RenderedHTML

from sparse_tl.files import atomic_file
from sparse_tl.plots.palette import DARK_FILTER, GROUND, dark_svg
from sparse_tl.plots.png import svg_to_png

Theme = Literal["auto", "light", "dark"]
"""Of a saved figure. ``"auto"``: HTML as the reader's system has it, pictures light."""


Figure = TypeVar("Figure", bound="SelfContainedFigure")


class SelfContainedFigure(RenderedHTML):
    """A figure for notebooks and files.

    circuitsvis asks the internet whether it is there and then chooses between two sources; here
    there is a single source, which holds everything that it needs.

    Args:
        html: a fragment with every tag closed, which also shows without JavaScript.
        svg: the same figure as a static SVG document.
        title: of the page, when saved as HTML.
    """

    def __init__(self, html: str, svg: str, title: str) -> None:
        super().__init__(local_src=html, cdn_src=html)
        self._html = html
        self.svg = svg
        self.title = title
        # Of a figure that `dark` has turned: the one that it was made from.
        self._light: SelfContainedFigure | None = None

    def _repr_html_(self) -> str:
        return self._html

    def __html__(self) -> str:
        return self._html

    def __str__(self) -> str:
        return self._html

    def show_code(self) -> str:
        """The HTML of the figure."""
        return self._html

    def dark(self: Figure) -> Figure:
        """The same figure on a dark ground; without it, figures in notebooks are light cards."""
        if self._light is not None:
            return self
        turned = copy(self)
        turned._light = self
        html = f'<div style="filter: {DARK_FILTER}">\n{self._html}\n</div>'
        turned.local_src = turned.cdn_src = turned._html = html
        turned.svg = dark_svg(self.svg)
        return turned

    def save(
        self, path: str | os.PathLike[str], *, scale: float = 2.0, theme: Theme = "auto"
    ) -> Path:
        """Write the figure to a file, which appears whole or not at all.

        Args:
            path: ends in ``.html`` (interactive), ``.svg`` or ``.png``.
            scale: pixels of a PNG per pixel of the figure.
            theme: ``"light"``, ``"dark"``, or ``"auto"``: as `dark` has made the figure; otherwise
                HTML as the reader's system has it, and pictures light.

        Returns:
            The path written.

        Raises:
            ValueError: if the suffix or the theme is another one.
        """
        if self._light is not None:
            own = "dark" if checked_theme(theme) == "auto" else theme
            return self._light.save(path, scale=scale, theme=own)
        svg = dark_svg(self.svg) if checked_theme(theme) == "dark" else self.svg
        return save_picture(
            path,
            {
                ".html": lambda: html_page(self.title, self._html, margin=16, theme=theme),
                ".svg": lambda: svg_document(svg),
                ".png": lambda: svg_to_png(svg, scale=scale),
            },
        )


def checked_theme(theme: Theme) -> Theme:
    """A theme that there is.

    Raises:
        ValueError: there is no such theme.
    """
    if theme not in get_args(Theme):
        raise ValueError(f"expected a theme of {list(get_args(Theme))}; got {theme!r}")
    return theme


def save_picture(
    path: str | os.PathLike[str], kinds: Mapping[str, Callable[[], str | bytes]]
) -> Path:
    """Write what the suffix of a path asks for; whole or not at all.

    Args:
        path: ends in one of the suffixes.
        kinds: by suffix, what makes the content.

    Raises:
        ValueError: if the suffix is another one.
    """
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


def svg_document(svg: str) -> str:
    """An SVG element as a file of its own."""
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{svg}\n'


def html_page(
    title: str, body: str, *, margin: int, theme: Theme = "auto", ground: str = GROUND
) -> str:
    """A fragment as a page of its own.

    Args:
        title: of the page.
        body: the fragment, drawn for a light ground.
        margin: in pixels.
        theme: whether the page is turned dark: always, never, or where the reader's system is.
        ground: the colour of the page, before it is turned.
    """
    # On the root element the filter takes in the ground around the figure too.
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
        f"<style>\n:root {{ background: {ground}; }}\nbody {{ margin: {margin}px; }}\n{rule}"
        "</style>\n"
        f"</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
