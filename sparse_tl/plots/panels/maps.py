"""Maps by layer: activation patching, the logit lens and direct logit attribution; and heads by
score, behaviour or role. Layers upwards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparse_tl.arguments import checked
from sparse_tl.circuits import (
    KINDS,
    ActivationPatching,
    HeadBehaviour,
    LogitAttribution,
    LogitLens,
    Scores,
)
from sparse_tl.graph import HeadGrid
from sparse_tl.head_roles import ROLES, HeadRoles
from sparse_tl.plots.page import palette
from sparse_tl.plots.page.palette import EMPTY_CELL, HELPS, HURTS, TICK_SIZE, Colour, blend
from sparse_tl.plots.page.token_text import clip_text, text_width, visible_text
from sparse_tl.plots.panels import grid

_CELL, _LEAST_CELL, _ROW = 26.0, 10.0, 24.0
_TEXT_CELL, _LEAST_TEXT_CELL = 58.0, 40.0
_MOST_TEXTS = 600
"""Maximum number of cells with texts; larger maps have them in tooltips."""
_LAYER_GAP = 18
_LONGEST_LABEL, _LEAST_PLOT = 90.0, 140.0
_Scale = tuple[tuple[float, Colour], ...]
_SIGNED: _Scale = ((0, HURTS), (0.5, EMPTY_CELL), (1, HELPS))
_SHARE: _Scale = ((0, EMPTY_CELL), (1, blend(EMPTY_CELL, palette.ON_PATH[1], 0.9)))

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
def layer_map(panels: Mapping[str, Mapped]) -> grid.GridFigure:
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
    room = grid.fitting_width(len(drawn), gap=_LAYER_GAP, most=math.inf) / n_columns
    few = len(drawn) * n_rows * n_columns <= _MOST_TEXTS
    written = bool(first.texts) and few and room >= _LEAST_TEXT_CELL
    cell = max(_LEAST_CELL, min(room, _TEXT_CELL if written else _CELL), _LEAST_PLOT / n_columns)
    sizes = {"width": cell * n_columns, "height": _ROW * n_rows, "gap": _LAYER_GAP}
    figure: Any = grid.panel_figure([list(drawn)], x="", y="Layer", **sizes)
    span = {"range": (-0.5, n_rows - 0.5), "showgrid": False}
    figure.update_yaxes(**span, tickvals=list(range(n_rows)), ticktext=first.rows)
    figure.update_xaxes(range=(-0.5, n_columns - 0.5), ticks="")
    bar_top = _label_columns(figure, drawn, cell)
    for column, cells in enumerate(drawn.values(), start=1):
        shown = cells.values, cells.hover, cells.colours, cells.limits, cells.label
        grid.add_cells(figure, (1, column), *shown, bar_top)
    if written:
        texts = [
            ((1, column), x, y, clip_text(visible_text(text), TICK_SIZE, cell - 4))
            for column, cells in enumerate(drawn.values(), start=1)
            for y, row in enumerate(cells.texts)
            for x, text in enumerate(row)
        ]
        grid.add_texts(figure, texts, font={"size": TICK_SIZE}, yanchor="middle")
    return grid.GridFigure(figure, f"{next(iter(kinds)).__name__} of {', '.join(panels)}")


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
    bottom = deep + grid.BAR_BELOW
    layout = figure.layout
    figure.update_layout(height=layout.height - layout.margin.b + bottom, margin_b=bottom)
    for column, row in enumerate(labels, start=1):
        shown = range(len(row) - 1, -1, -every)  # always the last column
        texts = {"tickvals": [*shown], "ticktext": [grid.plain_text(row[x]) for x in shown]}
        figure.update_xaxes(**texts, tickangle=-90 if rotated else 0, row=1, col=column)
    return deep


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
        [f"h{text}" if result.place == "head" else text for text in result.columns],
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


# ---- heads -------------------------------------------------------------------------------------

_GAP, _LEAST_MAP = 20, 140
_SMALLEST_CELL, _LARGEST_CELL, _HIGHEST = 6, 26, 420
# A tick label of two digits, and the gap to the next.
_TICK_ROOM = 20
_REACH = 0.42
"""Distance from the centre of a cell to its frame."""

_Heads = dict[str, list[tuple[int, ...]]]


@checked
def head_map(
    panels: Mapping[str, Scores] | Mapping[str, HeadBehaviour],
    *,
    marked: Mapping[str, Sequence[Any]] | None = None,
    unit: str = "",
) -> grid.GridFigure:
    """Draw scores or behaviour of heads, one panel per model.

    For scores, blue heads help (negative score) and orange heads hurt; full colour is the panel's
    largest ``|score|``, at the ends of its colour bar. For behaviour, colours and labels show the
    kind of each head, if it has one; tooltips list all its scores.

    Args:
        panels: scores or behaviour of heads, by panel title.
        marked: heads to frame in every panel, as ``(layer, head)`` or ``"a9.h9"``, by legend
            entry, such as `sparse_tl.tasks.GPT2_IOI_HEADS`.
        unit: unit of the scores, such as "logits".

    Raises:
        ValueError: there is no panel, scores are not of heads, models differ in shape, a model
            lacks a marked head, or there are more names of marks than colours.
    """
    grids = {result.grid for result in panels.values()}
    heads = grids.pop() if len(grids) == 1 else None
    if not isinstance(heads, HeadGrid):
        raise ValueError(
            "a head map shows scores of heads from attribute_heads, or head behaviour, of models "
            "of one shape; draw scores of circuit edges with scores.figure()"
        )
    framed = marked_heads(heads, marked or {})
    behaviours = {
        name: result for name, result in panels.items() if isinstance(result, HeadBehaviour)
    }
    longest = max(text_width(label, TICK_SIZE) for label in _LABELS) + _LABEL_MARGIN
    label_width = longest if behaviours else 0
    figure, positions = head_panels([*panels], *heads.exists.shape, label_width=label_width)
    for position, result in zip(positions, panels.values(), strict=True):
        if isinstance(result, Scores):
            _add_scores(figure, position, result, framed, unit)
        else:
            _add_kinds(figure, position, result)
    _add_samples(figure, {kind for one in behaviours.values() for kind in one.main.values()})
    for position in positions:
        _add_frames(figure, position, framed)
    if any(trace.name for trace in figure.data):
        grid.add_legend(figure)
    grid.add_notes(figure, _notes(behaviours))
    return grid.GridFigure(
        figure, f"{'Kinds' if behaviours else 'Scores'} of heads in {', '.join(panels)}"
    )


def head_panels(
    titles: Sequence[str], n_layers: int, n_heads: int, *, label_width: float = 0
) -> tuple[Any, list[grid.Position]]:
    """Empty maps of heads, in rows of at most four, and their positions.

    Args:
        titles: titles of the maps.
        n_layers, n_heads: size of each.
        label_width: width in pixels of the labels in cells; 0 for square cells without labels and
            with a colour bar below.
    """
    rows = grid.in_rows(titles)
    most = max(label_width, _LARGEST_CELL)
    across = max(
        _SMALLEST_CELL, grid.fitting_width(len(rows[0]), gap=_GAP, most=most * n_heads) / n_heads
    )
    upwards = int(max(_SMALLEST_CELL, min(across, _LARGEST_CELL, _HIGHEST / n_layers)))
    across = int(across) if label_width else upwards
    width, height = max(across * n_heads, _LEAST_MAP), max(upwards * n_layers, 60)
    below = 0 if label_width else grid.BAR_ROOM
    figure = grid.panel_figure(
        rows, x="Head", y="Layer", width=width, height=height, gap=_GAP, below=below
    )
    for update, count, length in (
        (figure.update_xaxes, n_heads, width),
        (figure.update_yaxes, n_layers, height),
    ):
        most = min(max(int(length // _TICK_ROOM), 1), 16)
        update(range=(-0.5, count - 0.5), tick0=0, dtick=math.ceil(count / most))
    return figure, grid.panel_positions(rows)


def marked_heads(of: HeadGrid, marked: Mapping[str, Sequence[Any]]) -> _Heads:
    """The indices of the marked heads, by legend entry.

    Raises:
        ValueError: the model lacks a head, or there are more names than colours.
    """
    if len(marked) > len(palette.MARKS):
        raise ValueError(
            f"at most {len(palette.MARKS)} names of heads can be marked; got {list(marked)}"
        )
    return {name: [of.index(head) for head in heads] for name, heads in marked.items()}


def _add_scores(
    figure: Any, position: grid.Position, scores: Scores, framed: _Heads, unit: str
) -> None:
    measured, unit = (f"Score, {unit}", f" {unit}") if unit else ("Score", "")
    names: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, heads in framed.items():
        for head in heads:
            names[head].append(name)
    mean = scores.mean().detach().double().cpu()
    largest = mean.abs().max().item() or 1.0
    hover = [
        [
            (f"a{layer}.h{head}", f"{score:+.3g}{unit}", *names[layer, head])
            for head, score in enumerate(row)
        ]
        for layer, row in enumerate(mean.tolist())
    ]
    colours = [(0, HELPS), (0.5, EMPTY_CELL), (1, HURTS)]
    grid.add_cells(figure, position, mean.tolist(), hover, colours, (-largest, largest), measured)


def _add_frames(figure: Any, position: grid.Position, framed: _Heads) -> None:
    """Add one line with gaps per name: the frames of its heads."""
    corners = ((-1, -1), (1, -1), (1, 1), (-1, 1), (-1, -1), (math.nan, math.nan))
    for (name, heads), colour in zip(framed.items(), palette.MARKS, strict=False):
        at = [
            (head + across * _REACH, layer + up * _REACH)
            for layer, head in heads
            for across, up in corners
        ]
        x, y = zip(*at, strict=True) if at else ((), ())
        style: dict[str, Any] = {"colour": colour, "width": palette.MARK_WEIGHT}
        grid.add_line(figure, position, x=x, y=y, name=name, **style)


# ---- behaviour: a colour for each head's kind, and a short label -------------------------------

_MINUS = KINDS["negative copying"].label
_LABELS = [kind.label + _MINUS for kind in KINDS.values()]
_LABEL_MARGIN, _LEAST_HEIGHT = 4, 11
"""Horizontal padding of labels, and the least height of a cell with one, in pixels."""
_SAMPLE = 9.0
_FILL = {
    kind: blend(palette.BACKGROUND, colour, 0.4) for kind, colour in palette.KINDS_OF_HEADS.items()
}
_FILL[""] = EMPTY_CELL


def _add_samples(figure: Any, drawn: Container[str]) -> None:
    """Add the kinds that are drawn to the legend."""
    for kind in KINDS:
        if kind in drawn:
            name = f"{KINDS[kind].label} {kind}".strip()
            sample: dict[str, Any] = {"colour": _FILL[kind], "name": name, "width": _SAMPLE}
            grid.add_line(figure, (1, 1), x=[None], y=[None], **sample)


def _notes(panels: Mapping[str, HeadBehaviour]) -> list[str]:
    """Explanations of maps of behaviour, as sentences."""
    without = [title for title, behaviour in panels.items() if not behaviour.main]
    notes = [f"No head of {title} is of any kind." for title in without]
    labels = {label for behaviour in panels.values() for label in behaviour.labels.values()}
    if any(label.endswith(("+", _MINUS)) for label in labels):
        notes.append(f"+: copies what it attends to; {_MINUS}: lowers its logit.")
    return notes


def _add_kinds(figure: Any, position: grid.Position, behaviour: HeadBehaviour) -> None:
    """Fill a panel with cells and label them; tooltips have all scores.

    Labels that do not fit lose their sign, or are left out.
    """
    heads, main, most = behaviour.grid, behaviour.main, len(_FILL) - 1
    names = np.reshape(heads.names(heads.places), tuple(heads.exists.shape)).tolist()
    scores = torch.stack([*behaviour.scores.values()], dim=-1).tolist()
    number = {kind: place for place, kind in enumerate(_FILL)}
    kinds = [[number[main.get(name, "")] for name in layer] for layer in names]
    hover = [
        [
            [name, *filter(None, [main.get(name)]), *map("{} {:.3f}".format, behaviour.scores, row)]
            for name, row in zip(*layer, strict=True)
        ]
        for layer in zip(names, scores, strict=True)
    ]
    colours = [(place / most, colour) for place, colour in enumerate(_FILL.values())]
    grid.add_cells(figure, position, kinds, hover, colours, (0, most))
    width, height = grid.panel_size(figure, position)
    if height / heads.n_layers < _LEAST_HEIGHT:
        return
    labels = list[tuple[grid.Position, float, float, str]]()
    for name, label in behaviour.labels.items():
        layer, head = heads.index(name)
        for text in (label, KINDS[main[name]].label):
            if text and text_width(text, TICK_SIZE) <= width / heads.n_heads:
                labels.append((position, head, layer, text))
                break
    grid.add_texts(figure, labels, font={"size": TICK_SIZE}, yanchor="middle")


# ---- roles -------------------------------------------------------------------------------------


@checked
def head_roles_figure(roles: HeadRoles) -> grid.GridFigure:
    """Draw mean head scores over seeds, in 0..1, one panel per role: layers upwards, heads across.

    A note gives the cost of removing all heads of a role, in nats per target token; tooltips give
    the cost of removing one head.
    """
    costs = roles.classes()["removed"]
    scores = dict(zip(ROLES, roles.mean_scores().tolist(), strict=True))
    figure, positions = head_panels([role.capitalize() for role in ROLES], *roles.removed.shape)
    for position, (role, rows) in zip(positions, scores.items(), strict=True):
        hover = [
            [
                (
                    f"a{layer}.h{head}",
                    f"{role} {score:.3f}",
                    f"loss without it {roles.removed[layer, head]:+.3g} nats",
                )
                for head, score in enumerate(row)
            ]
            for layer, row in enumerate(rows)
        ]
        colours = [(0, EMPTY_CELL), (1, palette.ROLES[role])]
        label = f"{role.capitalize()} score"
        grid.add_cells(figure, position, rows, hover, colours, (0, 1), label)
    each = ", ".join(f"{role} {costs[role]:+.2f}" for role in ROLES)
    grid.add_notes(figure, [f"Increase of the loss without all heads of a role, in nats: {each}."])
    return grid.GridFigure(figure, "Roles of heads")
