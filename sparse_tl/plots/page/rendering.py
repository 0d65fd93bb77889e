"""Figures that are displayed and saved without loading anything from the network."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from html import escape
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from annotated_types import Ge, Le
from circuitsvis.utils.render import RenderedHTML

from sparse_tl.calls.arguments import checked
from sparse_tl.plots.page.palette import BACKGROUND, DARK_FILTER, dark_svg
from sparse_tl.storage.files import atomic_file

Theme = Literal["auto", "light", "dark"]
"""Theme of a figure. ``"auto"``: in notebooks, the notebook's theme; in saved pages, that of the
reader's system; saved images are light."""
Scale = Annotated[float, Ge(0.1), Le(20)]  # beyond, an image may not fit into memory

AUTO = "sparse-tl-auto"
"""Class of HTML that is drawn for light pages and inverted in dark notebooks."""
DARK_NOTEBOOKS = (
    'body[data-jp-theme-light="false"]',  # JupyterLab, Notebook 7, and nbconvert's HTML
    "body.vscode-dark",
    'body[data-vscode-theme-kind="vscode-dark"]',
    'body[data-vscode-theme-kind="vscode-high-contrast"]',
    'html[theme="dark"]',  # Colab
)
"""Selectors, one of which matches in a notebook with a dark theme."""

Kind = TypeVar("Kind", bound="Figure")


class Figure:
    """A figure on a light or dark background that can be saved to files.

    Args:
        title: title of the page, when saved as HTML.
    """

    page_margin = 16

    def __init__(self, title: str) -> None:
        self.title = title
        self.theme: Theme = "auto"

    @property
    def is_dark(self) -> bool:
        """Whether the figure is always dark."""
        return self.theme == "dark"

    @property
    def light_html(self) -> str:
        """An HTML fragment with the light figure."""
        raise NotImplementedError

    @property
    def light_svg(self) -> str:
        """The light figure as a static SVG element."""
        raise NotImplementedError

    @property
    def svg(self) -> str:
        """The figure as a static SVG element."""
        return dark_svg(self.light_svg) if self.is_dark else self.light_svg

    def dark(self: Kind) -> Kind:
        """The same figure, dark whatever the notebook's theme."""
        return self._themed("dark")

    def light(self: Kind) -> Kind:
        """The same figure, light whatever the notebook's theme."""
        return self._themed("light")

    def _themed(self: Kind, theme: Theme) -> Kind:
        themed = copy(self)
        themed.theme = theme
        return themed

    def _with_theme(self, html: str) -> str:
        """HTML of the figure, inverted in dark notebooks if its theme is auto."""
        if self.theme != "auto":
            return html
        return f'<div class="{AUTO}">\n{notebook_style()}\n{html}\n</div>'

    @checked
    def save(self, path: str | Path, *, scale: Scale = 2.0, theme: Theme = "auto") -> Path:
        """Write the figure to a file, completely or not at all.

        Args:
            path: path ending in ``.html`` (interactive), ``.svg`` or ``.png``; see `file_kinds`.
            scale: pixels of a PNG per pixel of the figure.
            theme: ``"light"``, ``"dark"`` or ``"auto"``: the figure's theme; if that is auto too,
                HTML follows the reader's system, and images are light.

        Returns:
            The path of the file.

        Raises:
            ValueError: the suffix is unknown.
        """
        drawn = self._themed(self.theme if theme == "auto" else theme)
        kinds = drawn.file_kinds(scale, drawn.theme)
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

    circuitsvis checks for an internet connection and chooses between two sources of HTML; here, a
    single one contains everything.

    Args:
        svg: the figure as a static SVG element.
        title: title of the page, when saved as HTML.
    """

    def __init__(self, svg: str, title: str) -> None:
        super().__init__(title)
        self._svg = svg

    @property
    def light_svg(self) -> str:
        return self._svg

    def _repr_html_(self) -> str:
        if self.is_dark:
            return f'<div style="filter: {DARK_FILTER}">\n{self.light_html}\n</div>'
        return self._with_theme(self.light_html)

    # Override the methods in which circuitsvis chooses a source.
    __str__ = __html__ = show_code = _repr_html_


def notebook_style() -> str:
    """A style element that inverts figures of the class `AUTO` in dark notebooks."""
    # plotly draws elements without our class, but turns the uid of a trace into a class.
    ours = f':is(.{AUTO}, .js-plotly-plot:has([class*="{AUTO}"]))'
    rule = f":is({', '.join(DARK_NOTEBOOKS)}) {ours} {{ filter: {DARK_FILTER}; }}"
    return f"<style>@media screen {{ {rule} }}</style>"


def svg_to_png(svg: str, *, scale: float = 2.0) -> bytes:
    """Render an SVG document without a browser, with text even if no fonts are installed."""
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
        body: HTML fragment, drawn for light pages.
        margin: margin in pixels.
        theme: ``"light"``, ``"dark"``, or ``"auto"`` to follow the reader's system.
    """
    # Applied to the root element, the filter includes the background around the figure.
    inverted = f":root {{ filter: {DARK_FILTER}; }}"
    rule = {
        "auto": f"@media screen and (prefers-color-scheme: dark) {{ {inverted} }}\n",
        "light": "",
        "dark": f"{inverted}\n",
    }[theme]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>\n:root {{ background: {BACKGROUND}; }}\nbody {{ margin: {margin}px; }}\n{rule}"
        "</style>\n"
        f"</head>\n<body>\n{body}\n</body>\n</html>\n"
    )
