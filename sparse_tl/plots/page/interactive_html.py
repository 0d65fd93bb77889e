"""A static SVG, its data and its script in one HTML fragment."""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from typing import Any

from sparse_tl.plots.page.figure_frame import Surround
from sparse_tl.plots.page.rendering import SelfContainedFigure
from sparse_tl.plots.page.token_text import shorten, visible_text

CIRCUIT_DRAWING = ("reach.js", "attention_edges.js", "attention_text.js")
"""Scripts that draw the edges of a circuit diagram, on a page and in Python."""
COMPONENT_DRAWING = (
    "reach.js",
    "layered_layout.js",
    "component_layout.js",
    "component_routes.js",
    "component_view.js",
    "component_panels.js",
    "component_draw.js",
)
"""Scripts that draw a component diagram, on a page and in Python."""
STYLE = "interactive_figure.css"


class PanelFigure(SelfContainedFigure):
    """A figure of framed panels that displays in notebooks and can be saved to files.

    Args:
        svg: static figure.
        json: data for its script, from `script_json`.
        surround: title and arrows around the panels.
    """

    scripts: tuple[str, ...]
    styles: tuple[str, ...] = (STYLE,)

    def __init__(self, svg: str, json: str, surround: Surround) -> None:
        super().__init__(svg, shorten(visible_text(surround.title or "Circuit diagram")))
        self.panel_names = surround.names
        self.json = json

    @property
    def data(self) -> dict[str, Any]:
        """The data for the script."""
        return json.loads(self.json)

    @property
    def light_html(self) -> str:
        content = (
            f"<style>\n{read_assets(*self.styles)}</style>\n"
            f'<div class="controls"></div>\n'
            f'<div class="canvas">\n{self.light_svg}\n</div>\n'
            f'<div class="tip" role="tooltip" hidden></div>'
        )
        script = read_assets("interactive_figure.js", *self.scripts)
        return interactive_html('class="sparse-tl-circuit"', content, script, self.json)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.panel_names))})"


def interactive_html(attributes: str, content: str, script: str, data: str) -> str:
    """A figure as an HTML fragment, which shows static content if scripts do not run.

    Args:
        attributes: attributes of the element around the figure.
        content: content of that element.
        script: JavaScript that defines the function ``start(root, data)``, which makes a copy of
            the figure interactive.
        data: data for the script, from `script_json`.
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
