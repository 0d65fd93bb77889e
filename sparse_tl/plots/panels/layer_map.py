"""Maps by layer: activation patching, the logit lens and direct logit attribution.

Layers upwards; positions, heads or components across. Wide labels are rotated by 90 degrees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparse_tl.calls.arguments import checked
from sparse_tl.circuits import ActivationPatching, LogitAttribution, LogitLens
from sparse_tl.plots.page.palette import (
    EMPTY_CELL,
    HELPS,
    HURTS,
    MUTED,
    ON_PATH,
    TICK_SIZE,
    Colour,
    blend,
)
from sparse_tl.plots.page.token_text import clip_text, text_width, visible_text
from sparse_tl.plots.panels.grid_figure import GridFigure
from sparse_tl.plots.panels.panels import (
    BAR_BELOW,
    add_cells,
    fitting_width,
    panel_figure,
    plain_text,
)

_CELL, _LEAST_CELL, _ROW = 26.0, 10.0, 24.0
_TEXT_CELL, _LEAST_TEXT_CELL = 58.0, 40.0
_MOST_TEXTS = 600
"""Maximum number of cells with texts; larger maps have them in tooltips."""
_GAP = 18
_LONGEST_LABEL, _LEAST_PLOT = 90.0, 140.0
_Scale = tuple[tuple[float, Colour], ...]
_SIGNED: _Scale = ((0, HURTS), (0.5, EMPTY_CELL), (1, HELPS))
_SHARE: _Scale = ((0, EMPTY_CELL), (1, blend(EMPTY_CELL, ON_PATH[1], 0.9)))

Mapped = ActivationPatching | LogitLens | LogitAttribution


@dataclass(frozen=True)
class _Cells:
    """One panel: the quantity that colours show, and its values, NaN for no cell."""

    label: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]
    hover: Sequence[Sequence[Sequence[str]]]
    colours: _Scale
    limits: tuple[float, float]
    texts: Sequence[Sequence[str]] = ()


@checked
def layer_map(panels: Mapping[str, Mapped]) -> GridFigure:
    """Draw results by layer in a row with one panel per model.

    Activation patching: the effect at each layer and column, blue if it moves the metric towards
    the prompts of the patched activations, orange if away. Logit lens: the most likely token per
    layer and position, darker for a more probable answer. Direct logit attribution: what each
    component writes, blue towards the answer, orange away from it. 0 is grey. Figures of few
    columns have the width of a printed page; others are wider.

    Args:
        panels: results of one kind by panel title.

    Raises:
        ValueError: there is no panel, or results differ in kind, or in layers and columns.
    """
    kinds = {type(result) for result in panels.values()}
    if len(kinds) != 1:
        raise ValueError("pass one or more results, all of one kind, by title")
    drawn = {title: _cells(result) for title, result in panels.items()}
    first = next(iter(drawn.values()))
    if any(len(c.columns) != len(first.columns) or c.rows != first.rows for c in drawn.values()):
        raise ValueError("the results differ in layers or columns; draw them in separate figures")
    n_rows, n_columns = len(first.rows), len(first.columns)
    room = fitting_width(len(drawn), gap=_GAP, most=math.inf) / n_columns
    few = len(drawn) * n_rows * n_columns <= _MOST_TEXTS
    written = bool(first.texts) and few and room >= _LEAST_TEXT_CELL
    cell = max(_LEAST_CELL, min(room, _TEXT_CELL if written else _CELL), _LEAST_PLOT / n_columns)
    sizes = {"width": cell * n_columns, "height": _ROW * n_rows, "gap": _GAP}
    figure: Any = panel_figure([list(drawn)], x="", y="Layer", **sizes)
    span = {"range": (-0.5, n_rows - 0.5), "showgrid": False}
    figure.update_yaxes(**span, tickvals=list(range(n_rows)), ticktext=first.rows)
    figure.update_xaxes(range=(-0.5, n_columns - 0.5), tickvals=[], ticktext=[], ticks="")
    bar_top = _label_columns(figure, drawn, cell)
    for column, cells in enumerate(drawn.values(), start=1):
        shown = cells.values, cells.hover, cells.colours, cells.limits, cells.label
        add_cells(figure, (1, column), *shown, bar_top)
    if written:
        texts = [
            (column, x, y, clip_text(visible_text(text), TICK_SIZE, cell - 4))
            for column, cells in enumerate(drawn.values(), start=1)
            for y, row in enumerate(cells.texts)
            for x, text in enumerate(row)
        ]
        _add_texts(figure, texts, font={"size": TICK_SIZE}, yanchor="middle")
    return GridFigure(figure, f"{next(iter(kinds)).__name__} of {', '.join(panels)}")


def _label_columns(figure: Any, drawn: Mapping[str, _Cells], cell: float) -> float:
    """Label the columns, vertically if labels are wider than a column; return where labels end."""
    every = math.ceil((TICK_SIZE + 3) / cell)
    labels = [
        [clip_text(visible_text(text), TICK_SIZE, _LONGEST_LABEL) for text in cells.columns]
        for cells in drawn.values()
    ]
    longest = max(text_width(text, TICK_SIZE) for row in labels for text in row)
    rotated = longest > cell - 4
    deep = (longest if rotated else TICK_SIZE) + 18
    bottom = deep + BAR_BELOW
    layout = figure.layout
    figure.update_layout(height=layout.height - layout.margin.b + bottom, margin_b=bottom)
    texts = [
        (column, x, -0.5, row[x])
        for column, row in enumerate(labels, start=1)
        for x in range(len(row) - 1, -1, -every)  # always label the last column
    ]
    below = {"yanchor": "top", "yshift": -6, "textangle": -90 if rotated else 0}
    _add_texts(figure, texts, font={"size": TICK_SIZE, "color": MUTED}, **below)
    return deep


def _add_texts(figure: Any, texts: Sequence[tuple[int, float, float, str]], **style: Any) -> None:
    """Add all texts (panel, x, y, text) at once, since plotly validates all at each addition."""
    more = [
        {"text": plain_text(text), "x": x, "y": y, "xanchor": "center"}
        | {"xref": f"x{column}", "yref": f"y{column}"}
        | style
        for column, x, y, text in texts
    ]
    figure.update_layout(annotations=[*figure.layout.annotations, *more])


def _cells(result: Mapped) -> _Cells:
    if isinstance(result, ActivationPatching):
        return _patching(result)
    return _lens(result) if isinstance(result, LogitLens) else _attribution(result)


def _patching(result: ActivationPatching) -> _Cells:
    effect = result.effect.tolist()
    n_layers = len(effect)
    most = _largest(effect)
    by_position = result.place == "position"
    return _Cells(
        f"Effect of {result.at}",
        [str(layer) for layer in range(n_layers)],
        [f"h{text}" if result.by_head else text for text in result.columns],
        effect,
        [
            [
                (
                    f"{result.at} of layer {layer}, {result.place} "
                    f"{index if by_position else text}",
                    *([text] if by_position else []),
                    f"effect {value:+.3f}",
                )
                for index, (text, value) in enumerate(zip(result.columns, row, strict=True))
            ]
            for layer, row in enumerate(effect)
        ],
        _SIGNED,
        (-most, most),
    )


def _lens(result: LogitLens) -> _Cells:
    probability, likeliest = result.probability.tolist(), result.top_probability.tolist()
    return _Cells(
        f"Probability of {visible_text(result.answer)}",
        result.rows,
        list(result.tokens),
        probability,
        [
            [
                (
                    f"{text!r} {likeliest[y][x]:.3f}",
                    f"{result.answer!r} {probability[y][x]:.3f}",
                    f"layer {name}, position {x}, {result.tokens[x]!r}",
                )
                for x, text in enumerate(result.top[y])
            ]
            for y, name in enumerate(result.rows)
        ],
        _SHARE,
        (0.0, 1.0),
        result.top,
    )


def _attribution(result: LogitAttribution) -> _Cells:
    means = dict(zip(result.components, result.values.mean(dim=1).tolist(), strict=True))
    kinds = [*(f"h{head}" for head in range(result.n_heads)), "b", "m"]
    kinds = kinds if "m0" in means else kinds[:-1]
    n_layers = sum(name.endswith(".b") for name in means)
    names = [["input"]]
    names += [[f"m{n}" if k == "m" else f"a{n}.{k}" for k in kinds] for n in range(n_layers)]
    names += [["bias"]]
    names = [row + [""] * (len(kinds) - len(row)) for row in names]
    values = [[means.get(name, math.nan) for name in row] for row in names]
    most = _largest(values)
    kind_names = {"b": "bias", "m": "MLP"}
    return _Cells(
        f"Logits; sum {result.total.mean():+.3g}",
        ["input", *map(str, range(n_layers)), "bias"],
        [kind_names.get(kind, kind) for kind in kinds],
        values,
        [
            [(name, f"{value:+.3g} logits") for name, value in zip(*both, strict=True)]
            for both in zip(names, values, strict=True)
        ],
        _SIGNED,
        (-most, most),
    )


def _largest(values: Sequence[Sequence[float]]) -> float:
    """The largest absolute value, ignoring NaN; 1 if all are 0."""
    return max((abs(v) for row in values for v in row if not math.isnan(v)), default=1.0) or 1.0
