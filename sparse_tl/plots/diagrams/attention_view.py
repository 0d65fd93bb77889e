"""Attention patterns: maps of all heads, and circuitsvis to browse them one by one.

1. Draw the static SVG (`attention_svg`).
2. Embed it in HTML with a local build of circuitsvis's component, which readers can open below it
   if scripts run. Nothing is loaded from the network.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from jaxtyping import Float
from torch import Tensor

from sparse_tl.plots.diagrams.attention_svg import draw_attention
from sparse_tl.plots.page.interactive_html import interactive_html, read_assets, script_json
from sparse_tl.plots.page.palette import ATTENTION, BACKGROUND, FONT_FAMILY, INK
from sparse_tl.plots.page.rendering import SelfContainedFigure
from sparse_tl.plots.page.token_text import visible_text
from sparse_tl.plots.panels.plotly_panels import MAX_WIDTH

MAX_NUMBERS = 200_000
"""Maximum number of attention weights in one view."""


class AttentionView(SelfContainedFigure):
    """Attention patterns as a figure that displays in notebooks and can be saved to files."""

    def __init__(self, html: str, svg: str, title: str, heads: Sequence[str]) -> None:
        super().__init__(svg, title)
        self.heads = tuple(heads)
        self._html = html

    @property
    def light_html(self) -> str:
        return self._html

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
    """Show attention patterns: a map for each head that attends to anything, with a colour bar.

    Heads without any attention are listed below the maps. If scripts run, all heads can be browsed
    one by one with circuitsvis.

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
    svg = draw_attention(weights, texts, heads, title)
    html = _html(svg, weights, texts, heads)
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
            "expected attention weights in 0..1; pass gate times attention probability"
        )


# ---- the page ------------------------------------------------------------------------------------


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
