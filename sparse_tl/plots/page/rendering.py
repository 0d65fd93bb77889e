"""Figures that are displayed and saved without loading anything from the network."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from html import escape
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Le
from circuitsvis.utils.render import RenderedHTML

from sparse_tl.arguments import checked
from sparse_tl.plots.page.palette import (
    BACKGROUND,
    DARK_FILTER,
    FONT_FAMILY,
    INK,
    dark_svg,
)
from sparse_tl.plots.page.token_text import shorten, visible_text
from sparse_tl.storage.files import atomic_file

Theme = Literal["auto", "light", "dark"]
"""Theme of a figure. ``"auto"``: in notebooks, the notebook's theme; in saved pages, that of the
reader's system; saved images are light."""
Scale = Annotated[float, Ge(0.1), Le(20)]  # beyond, an image may not fit into memory

STYLE = "interactive_figure.css"
AUTO = "sparse-tl-auto"
"""Class of HTML that is drawn for light pages and inverted in dark notebooks."""
_DARK_NOTEBOOKS = (
    'body[data-jp-theme-light="false"]',  # JupyterLab, Notebook 7, and nbconvert's HTML
    "body.vscode-dark",
    'body[data-vscode-theme-kind="vscode-dark"]',
    'body[data-vscode-theme-kind="vscode-high-contrast"]',
    'html[theme="dark"]',  # Colab
)
"""Selectors, one of which matches in a notebook with a dark theme."""
# plotly draws elements without our class, but turns the uid of a trace into a class.
_FIGURES = f':is(.{AUTO}, .js-plotly-plot:has([class*="{AUTO}"]))'
_RULE = f":is({', '.join(_DARK_NOTEBOOKS)}) {_FIGURES} {{ filter: {DARK_FILTER}; }}"
NOTEBOOK_RULE = f"@media screen {{ {_RULE} }}"
"""A rule of CSS that inverts figures of the class `AUTO` in dark notebooks."""
NOTEBOOK_STYLE = f"<style>{NOTEBOOK_RULE}</style>"
_ADDRESS_SPACE = 2**41

Kind = TypeVar("Kind", bound="Figure")
Shown = TypeVar("Shown")


def by_title(given: Shown | Mapping[str, Shown], alone: str = "Model") -> dict[str, Shown]:
    """What is shown, by panel title; `alone` is the title of a single thing."""
    if not isinstance(given, Mapping):
        return {alone: given}
    if not given:
        raise ValueError("there is nothing to show: pass one, or several by title")
    return {str(title): shown for title, shown in given.items()}


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
    def svg(self) -> str:
        """The figure as a static SVG element."""
        raise NotImplementedError

    def png(self, scale: float) -> bytes:
        """The figure as a PNG image, with `scale` pixels per pixel of the figure."""
        return svg_to_png(self.svg, scale)

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

    @checked
    def save(self, path: str | Path, *, scale: Scale = 2.0, theme: Theme = "auto") -> Path:
        """Write the figure to a file, completely or not at all.

        Args:
            path: path ending in ``.html`` (interactive), ``.svg`` or ``.png``.
            scale: pixels of a PNG per pixel of the figure.
            theme: ``"light"``, ``"dark"`` or ``"auto"``: the figure's theme; if that is auto too,
                HTML follows the reader's system, and images are light.

        Returns:
            The path of the file.

        Raises:
            ValueError: the suffix is unknown.
        """
        drawn, path = self._themed(self.theme if theme == "auto" else theme), Path(path)
        suffix = path.suffix.lower()
        if suffix == ".html":
            content = html_page(
                self.title, self.light_html, margin=self.page_margin, theme=drawn.theme
            ).encode()
        elif suffix == ".svg":
            content = f'<?xml version="1.0" encoding="UTF-8"?>\n{drawn.svg}\n'.encode()
        elif suffix == ".png":
            content = drawn.png(scale)
        else:
            raise ValueError(f"a figure is saved as .html, .svg or .png, not as {path.name!r}")
        with atomic_file(path) as partial:
            partial.write_bytes(content)
        return path


class SelfContainedFigure(Figure, RenderedHTML):
    """A figure that consists of one piece of HTML, with its static SVG inside.

    circuitsvis checks for an internet connection and chooses between two sources of HTML; here, a
    single one contains everything.
    """

    @property
    def light_svg(self) -> str:
        """The light figure as a static SVG element."""
        raise NotImplementedError

    @property
    def svg(self) -> str:
        return dark_svg(self.light_svg) if self.is_dark else self.light_svg

    def _repr_html_(self) -> str:
        if self.is_dark:
            return f'<div style="filter: {DARK_FILTER}">\n{self.light_html}\n</div>'
        if self.theme == "light":
            return self.light_html
        return f'<div class="{AUTO}">\n{NOTEBOOK_STYLE}\n{self.light_html}\n</div>'

    # Override the methods in which circuitsvis chooses a source.
    __str__ = __html__ = show_code = _repr_html_


def svg_to_png(svg: str, scale: float) -> bytes:
    """Render an SVG document without a browser, with text even if no fonts are installed."""
    import matplotlib
    import resvg_py

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    # Installed fonts are used for characters that DejaVu Sans lacks.
    fonts = [str(folder / name) for name in ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf")]
    family = {"font_family": "DejaVu Sans", "sans_serif_family": "DejaVu Sans"}
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=scale, font_files=fonts, **family))


def html_page(title: str, body: str, *, margin: int, theme: Theme = "auto") -> str:
    """A fragment, drawn for light pages, as a complete page with a margin in pixels."""
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


def interactive_html(attributes: str, content: str, script: str, data: str) -> str:
    """A figure as an HTML fragment, which shows its content if scripts do not run.

    Args:
        attributes: attributes of the element around the content.
        content: static content.
        script: JavaScript that defines the function ``start(root, data)``.
        data: its argument, from `script_json`.
    """
    # The same figure always has the same id, and the script starts every copy on the page that is
    # not running yet, so a figure can be shown twice.
    digest = hashlib.sha256((content + data).encode()).hexdigest()[:12]
    return (
        f'<div {attributes} data-figure="{digest}">\n{content}\n</div>\n'
        f"<script>\n(() => {{\n{read_assets('start_figures.js')}\n{script}\n"
        f'startFigures("{digest}", start, {data});\n'
        f"}})();\n</script>"
    )


def read_assets(*names: str, package: str = "sparse_tl.plots.js") -> str:
    """Concatenated scripts or styles of a package."""
    folder = resources.files(package)
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def script_json(data: Any) -> str:
    """JSON that is safe inside a script element, whatever the tokens."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    # ensure_ascii has escaped U+2028 and U+2029 already.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# ---- scripts without a browser: the same code draws pages and static files ---------------------

# V8 parses a JSON text faster than the literals that `MiniRacer.call` makes of arguments.
FIRST_VIEW = "((json) => firstView(JSON.parse(json)))"


def check_address_space() -> None:
    """Raise a MemoryError where V8, which reserves 1.5 TB of address space, would end the process.

    It uses little memory.
    """
    if sys.platform == "win32":
        return
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _ADDRESS_SPACE:
        raise MemoryError(
            f"the address space of this process is limited to {limit / 1e9:.1f} GB, and V8, which "
            "draws diagrams, reserves 1.5 TB of it; lift the limit with `ulimit -v unlimited`"
        )


def run_script(names: Sequence[str], function: str, *arguments: Any) -> Any:
    """Call a function of the scripts of these names in V8, with arguments of JSON types.

    Each call starts an engine in 10 ms. None outlives a call, so that any thread, event loop or
    forked process can draw.
    """
    check_address_space()
    # Slow import: takes longer than all others of this package.
    from py_mini_racer import MiniRacer

    with MiniRacer() as engine:
        for name in names:
            engine.eval(f"{read_assets(name)}\n//# sourceURL={name}")
        return engine.call(function, *arguments)


# ---- diagrams: what surrounds their panels ---------------------------------------------------


class PanelFigure(SelfContainedFigure):
    """A figure of framed panels that displays in notebooks and can be saved to files.

    The script that draws it on a page also draws the static figure.

    Args:
        data: data for the script.
        names: names of the panels, from top to bottom.
        title: title above the panels.
        transition: text along the arrow from each panel to the next; ``None`` for no arrow.
    """

    drawing: tuple[str, ...]
    """Scripts that draw, on a page and in Python."""
    scripts: tuple[str, ...]
    """Further scripts of a page."""

    def __init__(
        self,
        data: Mapping[str, Any],
        names: Iterable[str],
        title: str | None,
        transition: str | None,
    ) -> None:
        super().__init__(shorten(visible_text(title or "Circuit diagram")))
        words = {"title": title, "transition": transition}
        shown = {key: visible_text((text or "")[:200]) for key, text in words.items()}
        self.panel_names, self.json = tuple(names), script_json({**data, **shown})
        self._label = title or f"Circuit diagram of {' and '.join(self.panel_names)}"

    @cached_property
    def light_svg(self) -> str:
        width, height, markup = run_script(self.drawing, FIRST_VIEW, self.json)
        return "\n".join([svg_start(width, height, self._label), markup, "</svg>"])

    @property
    def light_html(self) -> str:
        content = (
            f"<style>\n{read_assets(STYLE)}</style>\n"
            f'<div class="controls"></div>\n'
            f'<div class="canvas">\n{self.light_svg}\n</div>\n'
            f'<div class="tip" role="tooltip" hidden></div>'
        )
        script, kind = self.page_script(), 'class="sparse-tl-circuit"'
        return interactive_html(kind, content, script, self.json)

    @classmethod
    def page_script(cls) -> str:
        """JavaScript that defines the function ``start(root, data)``."""
        return read_assets("interactive_figure.js", *cls.drawing, *cls.scripts)

    @property
    def data(self) -> dict[str, Any]:
        """The data for the script."""
        return json.loads(self.json)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.panel_names))})"


def svg_start(width: int, height: int, label: str) -> str:
    """The opening of the SVG element; close it with ``</svg>``."""
    label = escape(shorten(visible_text(label)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{label}" '
        f'font-family="{FONT_FAMILY}" fill="{INK}">'
    )
