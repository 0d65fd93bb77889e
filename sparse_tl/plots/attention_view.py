"""Attention patterns of heads: a grid of heat maps, browsable with circuitsvis.

1. Draw the static SVG: a heat map per head, queries from top to bottom, keys from left to right.
2. Embed it in HTML together with a local build of circuitsvis's component, which replaces it where
   scripts run. Nothing is loaded from the network.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache

from jaxtyping import Float
from torch import Tensor

from sparse_tl.plots.figure_frame import FIGURE_WIDTH, MARGIN, TITLE_HEIGHT, figure_start, xml_text
from sparse_tl.plots.interactive_html import read_assets, script_json
from sparse_tl.plots.palette import (
    ATTENTION,
    BORDER,
    FONT_FAMILY,
    GROUND,
    INK,
    LABEL_SIZE,
    MUTED,
    blend,
)
from sparse_tl.plots.rendering import SelfContainedFigure
from sparse_tl.plots.token_text import clip_text, visible_text

MAX_NUMBERS = 200_000
"""Maximum number of attention weights in one view."""

_GAP, _NAME_HEIGHT, _KEY_HEIGHT = 26, 22, 18
_LIGHT, _DARK = ATTENTION
_GRADES = 24
_MIN_LABELLED_CELL = 13.0


class AttentionView(SelfContainedFigure):
    """Attention patterns as a figure that displays in notebooks and can be saved to files."""

    def __init__(self, html: str, svg: str, title: str, heads: Sequence[str]) -> None:
        super().__init__(html, svg, title)
        self.heads = tuple(heads)

    def __repr__(self) -> str:
        shown = ", ".join(self.heads[:3])
        return f"AttentionView({shown}{', ...' if len(self.heads) > 3 else ''})"


def attention_view(
    attention: Float[Tensor, "head query key"],
    tokens: Sequence[str],
    heads: Sequence[str],
    *,
    title: str | None = None,
) -> AttentionView:
    """Show attention patterns, browsable head by head.

    Args:
        attention: weights in 0..1 of every head.
        tokens: text of each column.
        heads: names of the heads.
        title: title above the heat maps.

    Raises:
        ValueError: there is no head, shapes do not match, weights are not finite or outside 0..1,
            or there are more than `MAX_NUMBERS` of them.
    """
    weights = attention.detach().double().cpu()
    _check(weights, tokens, heads)
    texts = [visible_text(token) for token in tokens]
    svg = _draw_svg(weights, texts, heads, title)
    html = _html(svg, weights, texts, heads, title)
    return AttentionView(html, svg, visible_text(title or "Attention patterns"), heads)


def _check(weights: Tensor, tokens: Sequence[str], heads: Sequence[str]) -> None:
    expected = (len(heads), len(tokens), len(tokens))
    if 0 in expected or tuple(weights.shape) != expected:
        raise ValueError(
            f"expected attention of {len(heads)} heads over {len(tokens)} tokens, at least one of "
            f"each; got shape {tuple(weights.shape)}"
        )
    if weights.numel() > MAX_NUMBERS:
        raise ValueError(
            f"expected at most {MAX_NUMBERS:,} attention weights in one view; got "
            f"{weights.numel():,}; choose fewer heads or a shorter prompt"
        )
    if not weights.isfinite().all() or weights.min() < 0 or weights.max() > 1 + 1e-2:
        raise ValueError(
            "expected attention weights in 0..1; got others; pass gate times attention probability"
        )


# ---- the static picture --------------------------------------------------------------------------


def _draw_svg(
    weights: Tensor, texts: Sequence[str], heads: Sequence[str], title: str | None
) -> str:
    n_heads, n = weights.shape[:2]
    per_row = next(m for m in (4, 6, 8, 12, n_heads) if n_heads <= m * m or m == n_heads)
    per_row = max(2, min(per_row, n_heads))
    room = (FIGURE_WIDTH - 2 * MARGIN - _GAP * per_row) / per_row
    labelled = (room - _KEY_HEIGHT) / n >= _MIN_LABELLED_CELL
    left = _KEY_HEIGHT + 4 if labelled else 0
    cell = min(34.0, (room - left) / n)
    step_x, step_y = room + _GAP, _NAME_HEIGHT + n * cell + (_KEY_HEIGHT if labelled else 0) + _GAP
    top = MARGIN + (TITLE_HEIGHT if title else 0)
    height = math.ceil(top + math.ceil(n_heads / per_row) * step_y)
    parts = [*figure_start(FIGURE_WIDTH, height, ["attention patterns"], title)]
    for index, name in enumerate(heads):
        x = MARGIN + _GAP / 2 + (index % per_row) * step_x + left
        y = top + (index // per_row) * step_y + _NAME_HEIGHT
        parts += _heat_map(weights[index], name, x, y, cell)
        if labelled:
            parts += _labels(texts, x, y, cell)
    return "".join([*parts, "</svg>"])


def _heat_map(weights: Tensor, name: str, x: float, y: float, cell: float) -> Iterator[str]:
    """One path for all cells of a grade, in units of cells."""
    n = len(weights)
    yield (
        f'<text x="{x:g}" y="{y - 7:g}" font-size="{LABEL_SIZE:g}" font-weight="bold">'
        f"{xml_text(visible_text(name))}</text>"
        f'<g data-head="{xml_text(name)}" transform="translate({x:.2f} {y:.2f}) scale({cell:.4f})">'
        f'<rect width="{n}" height="{n}" fill="{_LIGHT}"/>'
    )
    cells: dict[int, list[str]] = defaultdict(list)
    for query, row in enumerate(weights.tolist()):
        for key, weight in enumerate(row):
            grade = min(_GRADES, math.ceil(weight * _GRADES - 0.1))
            if grade > 0:
                cells[grade].append(f"M{key} {query}h1v1h-1z")
    for grade, places in sorted(cells.items()):
        colour = blend(_LIGHT, _DARK, ((grade - 0.5) / _GRADES) ** 0.6)
        yield f'<path d="{"".join(places)}" fill="{colour}"/>'
    line = 1 / cell
    yield (
        f'<rect width="{n}" height="{n}" fill="none" stroke="{BORDER}" stroke-width="{line:.4f}"/>'
        "</g>"
    )


def _labels(texts: Sequence[str], x: float, y: float, cell: float) -> Iterator[str]:
    size = min(11.0, 0.72 * cell)
    yield f'<g font-size="{size:.2f}" fill="{INK}">'
    for i, text in enumerate(texts):
        middle = (i + 0.5) * cell
        clipped = xml_text(clip_text(text, size, max(cell, _KEY_HEIGHT)))
        yield (
            f'<text x="{x - 4:g}" y="{y + middle + 0.35 * size:.2f}" text-anchor="end">{clipped}'
            f'</text><text x="{x + middle:.2f}" y="{y + len(texts) * cell + size + 2:.2f}" '
            f'text-anchor="middle" fill="{MUTED}">{clipped}</text>'
        )
    yield "</g>"


# ---- the page ------------------------------------------------------------------------------------


def _html(
    svg: str, weights: Tensor, texts: Sequence[str], heads: Sequence[str], title: str | None
) -> str:
    properties = {
        "attention": [[[round(x, 4) for x in row] for row in head] for head in weights.tolist()],
        "tokens": list(texts),
        "attentionHeadNames": [visible_text(name) for name in heads],
        "minValue": 0,
        "maxValue": 1,
        "maskUpperTri": True,
        "positiveColor": _DARK,
    }
    payload = script_json(properties)
    digest = hashlib.sha256((svg + payload).encode()).hexdigest()[:12]
    start = read_assets("attention_view.js")
    return (
        f'<div class="sparse-tl-attention" data-figure="{digest}" '
        f'style="max-width: {FIGURE_WIDTH}px; background: {GROUND}; color: {INK}; '
        f'color-scheme: light; font-family: {FONT_FAMILY}">\n'
        f'<div class="static">\n{svg}\n</div>\n'
        '<div class="browser"></div>\n'
        "</div>\n"
        f"<script>\n(() => {{\n{_circuitsvis()}\n{start}\n"
        f"startAttention({json.dumps(digest)}, {payload}, "
        f"{script_json(visible_text(title or ''))});\n"
        "})();\n</script>"
    )


@cache
def _circuitsvis() -> str:
    """The local build of circuitsvis, safe to embed in a script element."""
    source = read_assets("dist/cdn/iife.js", package="circuitsvis")
    source = re.sub(r"^//# sourceMappingURL=.*$", "", source, flags=re.MULTILINE)
    # These occur only in strings, where a backslash before these letters has no effect.
    return source.replace("</script", r"<\/script").replace("<!--", r"<\!--")
