"""Common parts of circuit figures: background, title, framed panels, arrows between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from sparse_tl.plots.page.palette import (
    BACKGROUND,
    FONT_FAMILY,
    FRAME_TITLE_SIZE,
    FRAME_WEIGHT,
    INK,
    LABEL_SIZE,
    MUTED,
    TICK_SIZE,
    TITLE_SIZE,
)
from sparse_tl.plots.page.token_text import clip_text, shorten, text_width, visible_text

MARGIN = 8
PANEL_GAP = 18
TITLE_HEIGHT = 34
TRANSITION_WIDTH = 76


@dataclass(frozen=True)
class Frame:
    """The position of one panel's frame.

    Args:
        top, height: in pixels.
    """

    top: int
    height: int

    @property
    def middle(self) -> float:
        return self.top + self.height / 2

    @property
    def bottom(self) -> int:
        return self.top + self.height


def xml_text(text: str) -> str:
    """Text escaped for use in an element or attribute."""
    return escape(text, quote=True)


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

    def svg(self, width: int, height: int, frames: Sequence[Frame], content: Iterable[str]) -> str:
        """The whole figure as an SVG element.

        Args:
            width, height: size of the figure.
            frames: frames of the panels.
            content: SVG of the panels and everything else.
        """
        parts = [*figure_start(width, height, self.names, self.title)]
        if self.transition is not None:
            parts.extend(transition_arrow(self.left, frames, self.transition))
        return "\n".join([*parts, *content, "</svg>"])


def svg_start(width: int, height: int, panel_names: Sequence[str], title: str | None) -> str:
    """The opening of the SVG element; close it with ``</svg>``."""
    names = " and ".join(panel_names)
    label = xml_text(shorten(visible_text(title or f"Circuit diagram of {names}")))
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
            f'font-weight="bold">{xml_text(heading)}</text>'
        )


def panel_frame(
    left: int, right: int, frame: Frame, name: str, caption: str, *, below: bool = False
) -> Iterator[str]:
    """The frame of a panel with its name, and a caption that a script may change.

    Args:
        left, right, frame: extent of the frame.
        name, caption: text in its corner.
        below: whether the caption is below the name, not beside it.
    """
    yield (
        f'<rect x="{left}" y="{frame.top}" width="{right - left}" '
        f'height="{frame.height}" rx="7" fill="{BACKGROUND}" stroke="{INK}" '
        f'stroke-width="{FRAME_WEIGHT}"/>'
    )
    room = right - left - 2 * 14 if below else (right - left) * 0.45
    clipped = clip_text(visible_text(name), FRAME_TITLE_SIZE, room)
    position, size = (f'x="{left + 14}" dy="17"', TICK_SIZE) if below else ('dx="14"', LABEL_SIZE)
    yield (
        f'<text x="{left + 14}" y="{frame.top + 25}"><tspan font-size="{FRAME_TITLE_SIZE:g}" '
        f'font-weight="bold">{xml_text(clipped)}</tspan><tspan {position} font-size="{size:g}" '
        f'fill="{MUTED}" data-role="caption">{xml_text(caption)}</tspan></text>'
    )


def transition_arrow(left: int, frames: Sequence[Frame], text: str) -> Iterator[str]:
    """A curved arrow from each panel to the next, left of the frames, with its text."""
    edge = left - 6
    first, last = frames[0], frames[-1]
    if first is last:
        return
    for upper, lower in zip(frames[:-1], frames[1:], strict=True):
        start, end = upper.middle + upper.height * 0.12, lower.middle - lower.height * 0.12
        depth = edge - 52
        yield (
            f'<g data-role="transition"><path d="M{edge} {start:.1f}C{depth} {start + 12:.1f} '
            f'{depth} {end - 12:.1f} {edge - 11} {end - 2:.1f}" fill="none" stroke="{INK}" '
            f'stroke-width="5" stroke-linecap="round"/>'
            f'<path d="{arrow_head(edge + 2, end, 0.16, 19)}" fill="{INK}"/></g>'
        )
    room = last.top + last.height - first.top - 10
    text = visible_text(text)
    size = max(12.0, min(17.0, 17.0 * room / max(text_width(text, 17.0), 1.0)))
    middle = (first.top + last.top + last.height) / 2
    yield (
        f'<g data-role="transition-name"><text transform="translate(24 {middle:g}) rotate(-90)" '
        f'text-anchor="middle" font-size="{size:.1f}" font-weight="bold">'
        f"{xml_text(clip_text(text, size, room))}</text></g>"
    )


def arrow_head(x: float, y: float, angle: float, size: float) -> str:
    """A filled arrow head with its tip at (x, y), as SVG path data; angle in radians."""
    corners = [(x, y)]
    for turn, reach in ((2.7, 1.0), (math.pi, 0.72), (-2.7, 1.0)):
        corners.append(
            (x + size * reach * math.cos(angle + turn), y + size * reach * math.sin(angle + turn))
        )
    return "M" + "L".join(f"{corner_x:.1f} {corner_y:.1f}" for corner_x, corner_y in corners) + "Z"
