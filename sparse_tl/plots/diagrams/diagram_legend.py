"""The legend below a circuit diagram: what its lines, circles and arrows mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sparse_tl.circuits.prompt.attention_graph import AttentionGraph, EdgeWeight
from sparse_tl.plots.page import palette
from sparse_tl.plots.page.figure_frame import arrow_head
from sparse_tl.plots.page.palette import INK, LABEL_SIZE, MUTED, NODE_REACHED, NODE_UNREACHED
from sparse_tl.plots.page.token_text import text_width

_SYMBOL = 26
_GAP = 16
_LINE = 20
_ABOVE, _BELOW = 22, 12
_UNSIGNED = ("attention", "carried")


def legend_height(graphs: Sequence[AttentionGraph], left: int, right: int) -> int:
    """Height of the legend of these graphs between `left` and `right`, in pixels."""
    return _ABOVE + max(y for *_, y in _placed(graphs, left, right)) + _BELOW


def legend(
    graphs: Sequence[AttentionGraph],
    left: int,
    right: int,
    top: int,
    weight: EdgeWeight,
    estimated: bool,
) -> Iterator[str]:
    """The legend as SVG, in as many lines as it needs.

    Args:
        graphs: graphs of the panels.
        left, right, top: its position in pixels.
        weight: weight shown initially; the script shows and hides entries about effects.
        estimated: whether any line is an estimate initially.
    """
    yield f'<g data-role="legend" font-size="{LABEL_SIZE:g}" fill="{MUTED}">'
    for role, symbol, words, x, y in _placed(graphs, left, right):
        unseen = {"negative": weight in _UNSIGNED, "estimate": not estimated}.get(role, False)
        hidden = ' visibility="hidden"' if unseen else ""
        yield (
            f'<g data-legend="{role}"{hidden} transform="translate({x:g} {top + _ABOVE + y})">'
            f'{symbol}<text x="{_SYMBOL + 6}">{words}</text></g>'
        )
    yield "</g>"


def _placed(
    graphs: Sequence[AttentionGraph], left: int, right: int
) -> Iterator[tuple[str, str, str, float, int]]:
    """The entries, each with its position: x, and y below the first line."""
    x, y = float(left), 0
    for role, symbol, words in _entries(graphs):
        width = _SYMBOL + 6 + text_width(words, LABEL_SIZE)
        if x + width > right and x > left:
            x, y = float(left), y + _LINE
        yield role, symbol, words, x, y
        x += width + _GAP


def _entries(graphs: Sequence[AttentionGraph]) -> Iterator[tuple[str, str, str]]:
    """Role, symbol and text; the middle of a symbol is 4 px above y = 0."""
    yield "main", _stroke(palette.MAIN[1], 4), "carries most to the prediction"
    yield "path", _stroke(palette.ON_PATH[1], 2), "leads to it"
    yield "open", _stroke(palette.OFF_PATH[1], 1.6), "does not lead to it"
    yield "reached", _circle(*NODE_REACHED), "feeds the prediction"
    yield "unreached", _circle(*NODE_UNREACHED), "does not feed it"
    bow = f'<path d="M2 3C4 -16 20 -18 21 -6" fill="none" stroke="{INK}" stroke-width="1.8"/>'
    head = f'<path d="{arrow_head(21.5, -1, 1.5, 8)}" fill="{INK}"/>'
    yield "prediction", bow + head, "predicted token"
    rule = palette.RESIDUAL_ON_PATH
    upright = f'<path d="M13 5V-13" stroke="{rule}" stroke-width="{palette.RULE_WEIGHT}"/>'
    yield "residual", upright, "residual stream"
    if any(graph.mlps is not None for graph in graphs):
        fill, stroke = palette.MLP_NODE
        square = f'<rect x="9" y="-8" width="8" height="8" rx="1" fill="{fill}" stroke="{stroke}"/>'
        yield "mlp", square, "open MLP"
    if any(graph.effect is not None or graph.attribution is not None for graph in graphs):
        yield "negative", _stroke(palette.MAIN_NEGATIVE[0], 3), "orange: hurts"
    if any(graph.attribution is not None for graph in graphs):
        dotted = _stroke(palette.MAIN[1], 3, f' stroke-dasharray="{palette.dots(3)}"')
        yield "estimate", dotted, "dotted: first-order estimate"


def _stroke(colour: palette.Colour, width: float, more: str = "") -> str:
    return (
        f'<path d="M1 -4H{_SYMBOL - 1}" stroke="{colour}" stroke-width="{width:g}" '
        f'stroke-linecap="round"{more}/>'
    )


def _circle(fill: palette.Colour, stroke: palette.Colour) -> str:
    return f'<circle cx="13" cy="-4" r="4.5" fill="{fill}" stroke="{stroke}" stroke-width="1.4"/>'
