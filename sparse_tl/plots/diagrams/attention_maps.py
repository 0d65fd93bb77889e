"""Attention patterns: maps of all heads, and circuitsvis to browse them one by one.

1. Draw the static SVG: a map per head that attends to anything, queries from top to bottom and keys
   from left to right, and a colour bar. Tokens label each row of maps at its left and each column
   below it, so that the nine heads of a layer fit on a screen; if there is no room, the labels are
   positions, and a note lists the tokens. Cells that the causal mask excludes are hatched, to
   distinguish them from a weight of 0.
2. Embed it in HTML with a local build of circuitsvis's component, which readers can open below it
   if scripts run. Nothing is loaded from the network.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from html import escape

from jaxtyping import Float
from torch import Tensor

from sparse_tl.plots.page.palette import (
    ATTENTION,
    BACKGROUND,
    BORDER,
    FONT_FAMILY,
    INK,
    LABEL_SIZE,
    MASKED,
    MUTED,
    TICK_SIZE,
    TITLE_SIZE,
    blend,
)
from sparse_tl.plots.page.rendering import (
    SelfContainedFigure,
    interactive_html,
    read_assets,
    script_json,
    svg_start,
)
from sparse_tl.plots.page.token_text import (
    LEFT_TO_RIGHT,
    clip_text,
    shorten,
    text_width,
    visible_text,
    wrap_text,
)
from sparse_tl.plots.panels.grid import MAX_WIDTH

MAX_NUMBERS = 200_000
"""Maximum number of attention weights in one view."""
_MARGIN, _TITLE_HEIGHT = 8, 34
_GAP, _NAME_HEIGHT, _LINE = 16, 22, 18
_LEGEND_HEIGHT, _BAR_WIDTH, _BAR_HEIGHT = 44, 160, 9
_LARGEST_CELL, _LABELLED_CELL, _LONGEST_LABEL = 34.0, 12.5, 64
# Maximum height of three or more rows of maps, if possible.
_HIGHEST = 1100
# More heads than this are drawn small, without axes.
_MOST_LABELLED = 24
_MOST_LISTED = 100
_GRADES = 24
_HATCHING = (
    '<defs><pattern id="masked" width="5" height="5" patternUnits="userSpaceOnUse" '
    f'patternTransform="rotate(45)"><path d="M0 0V5" stroke="{MASKED}" stroke-width="2"/>'
    "</pattern></defs>"
)


class AttentionView(SelfContainedFigure):
    """Attention patterns as a figure that displays in notebooks and can be saved to files."""

    def __init__(
        self, weights: Tensor, texts: Sequence[str], heads: Sequence[str], title: str | None
    ) -> None:
        super().__init__(visible_text(title or "Attention patterns"))
        self._weights, self._texts, self._heading = weights, texts, title
        self.heads = tuple(heads)

    @cached_property
    def light_svg(self) -> str:
        return _draw(self._weights, self._texts, self.heads, self._heading)

    @property
    def light_html(self) -> str:
        return _html(self.light_svg, self._weights, self._texts, self.heads)

    def __repr__(self) -> str:
        shown = ", ".join(self.heads[:3])
        return f"AttentionView({shown}{', ...' if len(self.heads) > 3 else ''})"


def attention_maps(
    attention: Float[Tensor, "head query key"],
    tokens: Sequence[str],
    heads: Sequence[str],
    *,
    title: str | None = None,
) -> AttentionView:
    """Show attention patterns: a map for each head that attends to anything, with a colour bar.

    Heads without any attention are listed below the maps. If scripts run, all heads can be browsed
    one by one with circuitsvis.

    Args:
        attention: weights in 0..1 of every head.
        tokens: text of each column.
        heads: names of the heads.
        title: title above the heat maps.

    Raises:
        ValueError: there are more than `MAX_NUMBERS` weights.
    """
    weights = attention.detach().double().cpu()
    if weights.numel() > MAX_NUMBERS:
        raise ValueError(
            f"a view holds at most {MAX_NUMBERS:,} attention weights; got {weights.numel():,}; "
            "choose fewer heads or a shorter prompt"
        )
    return AttentionView(weights, [visible_text(token) for token in tokens], heads, title)


# ---- the static drawing ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """Sizes in pixels of maps in rows; `left` and `below` are the space for axis labels."""

    per_row: int
    n_rows: int
    cell: float
    side: float
    texts: tuple[str, ...]
    left: float
    below: float

    @property
    def row_height(self) -> float:
        return _NAME_HEIGHT + self.side + _GAP

    @property
    def height(self) -> float:
        return self.n_rows * self.row_height + self.below


def _draw(weights: Tensor, texts: Sequence[str], heads: Sequence[str], title: str | None) -> str:
    """The figure as an SVG element."""
    drawn = [index for index in range(len(heads)) if weights[index].any()]
    empty = [visible_text(heads[index]) for index in range(len(heads)) if index not in drawn]
    is_causal = not weights.triu(1).any()
    n, layout = len(texts), _layout(texts, max(len(drawn), 1))
    top = _MARGIN + (_TITLE_HEIGHT if title else 0)
    below = top + layout.height
    room = MAX_WIDTH - 2 * _MARGIN
    notes = wrap_text(f"No attention: {', '.join(empty)}.", TICK_SIZE, room) if empty else []
    notes += [] if layout.texts else ["Rows are queries, columns are keys."]
    if layout.texts != tuple(texts) and n <= _MOST_LISTED:
        clipped = (clip_text(text, TICK_SIZE, _LONGEST_LABEL) for text in texts)
        # The marks keep right-to-left tokens from reversing the order of the list.
        listed = " ".join(f"{i}:{text}{LEFT_TO_RIGHT}" for i, text in enumerate(clipped))
        notes += wrap_text(f"Tokens: {listed}", TICK_SIZE, room)
    height = math.ceil(below + _LEGEND_HEIGHT + _LINE * len(notes) + _MARGIN)
    start = svg_start(MAX_WIDTH, height, title or "Attention patterns")
    parts = [start, f'<rect width="{MAX_WIDTH}" height="{height}" fill="{BACKGROUND}"/>']
    if title:
        heading = escape(clip_text(visible_text(title), TITLE_SIZE, MAX_WIDTH - 2 * 20))
        parts.append(
            f'<text x="{MAX_WIDTH / 2:g}" y="28" text-anchor="middle" font-size="{TITLE_SIZE:g}" '
            f'font-weight="bold">{heading}</text>'
        )
    parts.append(_HATCHING)
    for slot, index in enumerate(drawn):
        row, column = divmod(slot, layout.per_row)
        x = _MARGIN + layout.left + column * (layout.side + _GAP)
        y = top + row * layout.row_height + _NAME_HEIGHT
        parts += _heat_map(weights[index], heads[index], x, y, layout.cell, is_causal)
        if layout.texts:
            is_lowest = slot + layout.per_row >= len(drawn)
            parts += _axes(layout, x, y, query=column == 0, key=is_lowest)
    parts += _legend(below, is_causal and n > 1 and bool(drawn))
    for line, note in enumerate(notes):
        y = below + _LEGEND_HEIGHT + _LINE * (line + 0.7)
        text = escape(clip_text(note, TICK_SIZE, room))
        parts.append(f'<text x="{_MARGIN}" y="{y:g}" font-size="{TICK_SIZE:g}">{text}</text>')
    return "".join([*parts, "</svg>"])


def _layout(texts: Sequence[str], n_heads: int) -> _Layout:
    n, longest = len(texts), min(max(text_width(t, TICK_SIZE) for t in texts), _LONGEST_LABEL)

    def in_rows(most: int, texts: Sequence[str], left: float, below: float) -> _Layout:
        """As few rows of at most `most` maps as possible, of about equal length."""
        n_rows = math.ceil(n_heads / most)
        per_row = math.ceil(n_heads / n_rows)
        room = MAX_WIDTH - 2 * _MARGIN - left - (per_row - 1) * _GAP
        cell = min(room / per_row / n, _LARGEST_CELL)
        n_rows = math.ceil(n_heads / per_row)
        return _Layout(per_row, n_rows, cell, n * cell, tuple(texts), left, below)

    if n_heads > _MOST_LABELLED:
        return in_rows(8 if n_heads <= 64 else 12, (), 0, 0)
    left = longest + 6 + _LINE
    for per_row in (4, 3, 2, 1):
        layout = in_rows(per_row, texts, left, 2 * _LINE)
        if longest > layout.cell:
            layout = replace(layout, below=left)
        fits = layout.n_rows <= 2 or layout.height <= _HIGHEST
        if layout.cell >= _LABELLED_CELL and fits:
            return layout
    # Label positions instead, as many as there is room for.
    longest = text_width(str(n - 1), TICK_SIZE)
    layouts = [in_rows(size, (), longest + 6 + _LINE, 2 * _LINE) for size in (1, 2, 3, 4)]
    layout = next((each for each in layouts if each.height <= _HIGHEST), layouts[-1])
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500) if s * layout.cell >= longest + 6)
    return replace(layout, texts=tuple(str(i) if i % step == 0 else "" for i in range(n)))


def _heat_map(
    weights: Tensor, name: str, x: float, y: float, cell: float, is_causal: bool
) -> Iterator[str]:
    """A head's name and map, with one path per grade, in units of cells."""
    n = len(weights)
    room = n * cell
    yield (
        f'<text x="{x:g}" y="{y - 7:g}" font-size="{LABEL_SIZE:g}" font-weight="bold">'
        f"{escape(clip_text(visible_text(name), LABEL_SIZE, max(room, 60)))}</text>"
    )
    if is_causal and n > 1:
        steps = "".join(f"V{y + i * cell:.2f}H{x + i * cell:.2f}" for i in range(n - 1, 0, -1))
        yield (
            f'<path d="M{x + cell:.2f} {y:.2f}H{x + room:.2f}{steps}V{y:.2f}Z" '
            'fill="url(#masked)" data-role="masked"/>'
        )
    label = escape(shorten(visible_text(name)))
    yield f'<g data-head="{label}" transform="translate({x:.2f} {y:.2f}) scale({cell:.4f})">'
    cells: dict[int, list[str]] = defaultdict(list)
    for query, row in enumerate(weights.tolist()):
        for key, weight in enumerate(row):
            grade = min(_GRADES, math.ceil(weight * _GRADES - 0.1))
            if grade > 0:
                cells[grade].append(f"M{key} {query}h1v1h-1z")
    for grade, paths in sorted(cells.items()):
        yield f'<path d="{"".join(paths)}" fill="{_colour(grade)}"/>'
    line = 1 / cell
    yield (
        f'<rect width="{n}" height="{n}" fill="none" stroke="{BORDER}" stroke-width="{line:.4f}"/>'
        "</g>"
    )


def _colour(grade: int) -> str:
    return blend(*ATTENTION, ((grade - 0.5) / _GRADES) ** 0.6)


def _axes(layout: _Layout, x: float, y: float, query: bool, key: bool) -> Iterator[str]:
    """Labels of queries left of a map and of keys below it, vertical if wider than a cell."""
    bottom, is_upright = y + layout.side, layout.below > 2 * _LINE
    titles = list[tuple[str, str]]()
    yield f'<g font-size="{TICK_SIZE:g}" fill="{MUTED}">'
    for i, text in enumerate(layout.texts):
        middle, clipped = (i + 0.5) * layout.cell, clip_text(text, TICK_SIZE, _LONGEST_LABEL)
        if text and query:
            place = f'x="{x - 5:g}" y="{y + middle + 0.35 * TICK_SIZE:.2f}" text-anchor="end"'
            yield f"<text {place}>{escape(clipped)}</text>"
        if text and key:
            place = f'x="{x + middle:.2f}" y="{bottom + TICK_SIZE + 3:.2f}" text-anchor="middle"'
            if is_upright:
                start = f"{x + middle + 0.35 * TICK_SIZE:.2f} {bottom + 5:.2f}"
                place = f'transform="translate({start}) rotate(-90)" text-anchor="end"'
            yield f"<text {place}>{escape(clipped)}</text>"
    yield "</g>"
    if query:
        aside = f"{x - layout.left + 13:.2f} {y + layout.side / 2:.2f}"
        titles.append((f'transform="translate({aside}) rotate(-90)"', "Query"))
    if key:
        down = bottom + layout.below - _LINE + 13
        titles.append((f'x="{x + layout.side / 2:.2f}" y="{down:.2f}"', "Key"))
    for place, title in titles:
        yield f'<text {place} font-size="{LABEL_SIZE:g}" text-anchor="middle">{title}</text>'


def _legend(y: float, has_masked: bool) -> Iterator[str]:
    """A colour bar of the weights with ticks below, and a sample of a masked cell."""
    top, label = y + 6, "Attention weight"
    x = _MARGIN
    yield f'<g font-size="{TICK_SIZE:g}"><text x="{x}" y="{top + 9:g}">{label}</text>'
    x += math.ceil(text_width(label, TICK_SIZE)) + 8
    width = _BAR_WIDTH / (_GRADES + 1)
    yield f'<rect x="{x}" y="{top:g}" width="{_BAR_WIDTH}" height="{_BAR_HEIGHT}" fill="none" '
    yield f'stroke="{BORDER}"/>'
    for grade in range(1, _GRADES + 1):
        start = x + grade * width
        # Drawn to the end of the bar, so that no gap shows between grades.
        yield (
            f'<rect x="{start:.2f}" y="{top:g}" width="{x + _BAR_WIDTH - start:.2f}" '
            f'height="{_BAR_HEIGHT}" fill="{_colour(grade)}"/>'
        )
    for share, text in ((0, "0"), (0.5, "0.5"), (1, "1")):
        yield (
            f'<text x="{x + share * _BAR_WIDTH:g}" y="{top + _BAR_HEIGHT + 14:g}" fill="{MUTED}" '
            f'text-anchor="middle">{text}</text>'
        )
    if has_masked:
        x += _BAR_WIDTH + 28
        yield (
            f'<rect x="{x}" y="{top - 2:g}" width="26" height="13" fill="url(#masked)" '
            f'stroke="{BORDER}"/><text x="{x + 34}" y="{top + 9:g}" fill="{INK}">'
            "Masked: keys after the query</text>"
        )
    yield "</g>"


# ---- the page ----------------------------------------------------------------------------------


def _html(svg: str, weights: Tensor, texts: Sequence[str], heads: Sequence[str]) -> str:
    properties = {
        "attention": [[[round(x, 4) for x in row] for row in head] for head in weights.tolist()],
        "tokens": list(texts),
        "attentionHeadNames": [visible_text(name) for name in heads],
        "minValue": 0,
        "maxValue": 1,
        "maskUpperTri": not bool(weights.triu(1).any()),
        "positiveColor": ATTENTION[1],
    }
    style = (
        f"max-width: {MAX_WIDTH}px; background: {BACKGROUND}; color: {INK}; color-scheme: light; "
        f"font: 13px {FONT_FAMILY}"
    )
    content = (
        f'<div class="static">\n{svg}\n</div>\n'
        "<details hidden><summary>Browse the heads one by one</summary>\n"
        '<div class="browser"></div>\n</details>'
    )
    script = f"{_circuitsvis()}\n{read_assets('attention_view.js')}"
    attributes = f'class="sparse-tl-attention" style="{style}"'
    return interactive_html(attributes, content, script, script_json(properties))


@cache
def _circuitsvis() -> str:
    """The local build of circuitsvis, safe to embed in a script element."""
    source = read_assets("dist/cdn/iife.js", package="circuitsvis")
    source = re.sub(r"^//# sourceMappingURL=.*$", "", source, flags=re.MULTILINE)
    # These occur only in strings, where the added backslash has no effect.
    return source.replace("</script", r"<\/script").replace("<!--", r"<\!--")
