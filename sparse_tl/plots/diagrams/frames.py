"""What circuit and component diagrams share: what surrounds their panels, and the page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from sparse_tl.plots.page.palette import (
    BACKGROUND,
    FONT_FAMILY,
    INK,
    TITLE_SIZE,
)
from sparse_tl.plots.page.rendering import (
    STYLE,
    SelfContainedFigure,
    interactive_html,
    read_assets,
)
from sparse_tl.plots.page.token_text import clip_text, shorten, visible_text

MARGIN = 8
TITLE_HEIGHT = 34
TRANSITION_WIDTH = 76


@dataclass(frozen=True)
class Surround:
    """The surroundings of a diagram's panels.

    Args:
        names: names of the panels, from top to bottom.
        title: title above the panels.
        transition: text along the arrow from each panel to the next; ``None`` for no arrow.
    """

    names: tuple[str, ...]
    title: str | None = None
    transition: str | None = None

    @property
    def left(self) -> int:
        """Left edge of the frames."""
        has_arrow = self.transition is not None and len(self.names) > 1
        return MARGIN + (TRANSITION_WIDTH if has_arrow else 0)

    @property
    def top(self) -> int:
        """Top edge of the first frame."""
        return MARGIN + (TITLE_HEIGHT if self.title else 0)


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
            f'<div class="canvas">\n{self._svg}\n</div>\n'
            f'<div class="tip" role="tooltip" hidden></div>'
        )
        script = read_assets("interactive_figure.js", *self.scripts)
        return interactive_html('class="sparse-tl-circuit"', content, script, self.json)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.panel_names))})"


def svg_start(width: int, height: int, panel_names: Sequence[str], title: str | None) -> str:
    """The opening of the SVG element; close it with ``</svg>``."""
    names = " and ".join(panel_names)
    label = escape(shorten(visible_text(title or f"Circuit diagram of {names}")))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{label}" '
        f'font-family="{FONT_FAMILY}" fill="{INK}">'
    )


def figure_start(
    width: int, height: int, panel_names: Sequence[str], title: str | None
) -> Iterator[str]:
    """The opening of the SVG element, its background and title; close it with ``</svg>``."""
    yield svg_start(width, height, panel_names, title)
    yield f'<rect width="{width}" height="{height}" fill="{BACKGROUND}"/>'
    if title:
        heading = clip_text(visible_text(title), TITLE_SIZE, width - 2 * 20)
        yield (
            f'<text x="{width / 2:g}" y="28" text-anchor="middle" font-size="{TITLE_SIZE:g}" '
            f'font-weight="bold">{escape(heading)}</text>'
        )
