"""Maps of heads by score or behaviour: layers upwards, heads across, selected heads framed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sparse_tl.calls.arguments import checked
from sparse_tl.circuits import KINDS, HeadBehaviour, Scores
from sparse_tl.graph import HeadGrid
from sparse_tl.plots.page.palette import (
    BACKGROUND,
    EMPTY_CELL,
    HELPS,
    HURTS,
    KINDS_OF_HEADS,
    MARK_WEIGHT,
    MARKS,
    TICK_SIZE,
    blend,
)
from sparse_tl.plots.page.token_text import text_width
from sparse_tl.plots.panels.grid_figure import GridFigure
from sparse_tl.plots.panels.panels import (
    BAR_ROOM,
    CELLS,
    Position,
    add_cells,
    add_legend_below,
    add_line,
    add_notes,
    fitting_width,
    hover_text,
    in_rows,
    panel_figure,
    panel_positions,
    panel_size,
    ticks,
)

_GAP, _LEAST_PLOT = 20, 140
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
) -> GridFigure:
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
    grid = grids.pop() if len(grids) == 1 else None
    if not isinstance(grid, HeadGrid):
        raise ValueError(
            "a head map shows scores of heads from attribute_heads, or head behaviour, of models "
            "of one shape; draw scores of circuit edges with scores.figure()"
        )
    framed = marked_heads(grid, marked or {})
    behaviours = {
        name: result for name, result in panels.items() if isinstance(result, HeadBehaviour)
    }
    longest = max(text_width(label, TICK_SIZE) for label in _LABELS) + _LABEL_MARGIN
    figure, positions = head_panels(
        list(panels), grid.n_layers, grid.n_heads, label_width=longest if behaviours else 0
    )
    for position, result in zip(positions, panels.values(), strict=True):
        if isinstance(result, Scores):
            _add_scores(figure, position, result, framed, unit)
    if behaviours:
        _add_behaviour(figure, positions, behaviours)
    for position in positions:
        _add_frames(figure, position, framed)
    if any(trace.name for trace in figure.data):
        add_legend_below(figure)
    add_notes(figure, _notes(behaviours))
    return GridFigure(
        figure, f"{'Kinds' if behaviours else 'Scores'} of heads in {', '.join(panels)}"
    )


def head_panels(
    titles: Sequence[str], n_layers: int, n_heads: int, *, label_width: float = 0
) -> tuple[Any, list[Position]]:
    """Empty maps of heads, in rows of at most four, and their positions.

    Args:
        titles: titles of the maps.
        n_layers, n_heads: size of each.
        label_width: width in pixels of the labels in cells; 0 for square cells without labels and
            with a colour bar below.
    """
    rows = in_rows(titles)
    most = max(label_width, _LARGEST_CELL)
    across = max(
        _SMALLEST_CELL, fitting_width(len(rows[0]), gap=_GAP, most=most * n_heads) / n_heads
    )
    upwards = int(max(_SMALLEST_CELL, min(across, _LARGEST_CELL, _HIGHEST / n_layers)))
    across = int(across) if label_width else upwards
    width, height = max(across * n_heads, _LEAST_PLOT), max(upwards * n_layers, 60)
    below = 0 if label_width else BAR_ROOM
    figure = panel_figure(
        rows, x="Head", y="Layer", width=width, height=height, gap=_GAP, below=below
    )
    for update, count, length in (
        (figure.update_xaxes, n_heads, width),
        (figure.update_yaxes, n_layers, height),
    ):
        most = max(int(length // _TICK_ROOM), 1)
        update(range=(-0.5, count - 0.5), **ticks(0, count - 1, min(most, 16), whole=True))
    return figure, panel_positions(rows)


def marked_heads(grid: HeadGrid, marked: Mapping[str, Sequence[Any]]) -> _Heads:
    """The indices of the marked heads, by legend entry.

    Raises:
        ValueError: the model lacks a head, or there are more names than colours.
    """
    if len(marked) > len(MARKS):
        raise ValueError(f"at most {len(MARKS)} names of heads can be marked; got {list(marked)}")
    return {name: [grid.index(head) for head in heads] for name, heads in marked.items()}


def _add_scores(figure: Any, position: Position, scores: Scores, framed: _Heads, unit: str) -> None:
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
    add_cells(figure, position, mean.tolist(), hover, colours, (-largest, largest), measured)


def _add_frames(figure: Any, position: Position, framed: _Heads) -> None:
    """Add one line with gaps per name: the frames of its heads."""
    corners = ((-1, -1), (1, -1), (1, 1), (-1, 1), (-1, -1), (math.nan, math.nan))
    for (name, heads), colour in zip(framed.items(), MARKS, strict=False):
        at = [
            (head + across * _REACH, layer + up * _REACH)
            for layer, head in heads
            for across, up in corners
        ]
        x, y = zip(*at, strict=True) if at else ((), ())
        add_line(figure, position, x=x, y=y, colour=colour, name=name, width=MARK_WEIGHT)


# ---- behaviour: a colour for each head's kind, and a short label -------------------------------

_MINUS = KINDS["negative copying"].label
_LABELS = [kind.label + _MINUS for kind in KINDS.values()]
_LABEL_MARGIN, _LEAST_HEIGHT = 4, 11
"""Horizontal padding of labels, and the least height of a cell with one, in pixels."""
_SAMPLE = 9.0
_FILL = {kind: blend(BACKGROUND, colour, 0.4) for kind, colour in KINDS_OF_HEADS.items()}
_FILL[""] = EMPTY_CELL


def _add_behaviour(
    figure: Any, positions: Sequence[Position], panels: Mapping[str, HeadBehaviour]
) -> None:
    """Fill panels with cells by kind and their labels, and add samples of the kinds."""
    drawn, texts = set[str](), list[dict[str, Any]]()
    for position, behaviour in zip(positions, panels.values(), strict=True):
        main = behaviour.main
        _add_kinds(figure, position, behaviour, main)
        texts += _labels(figure, position, behaviour, main)
        drawn |= set(main.values())
    # Added at once, since plotly validates all annotations at every addition.
    figure.update_layout(annotations=[*figure.layout.annotations, *texts])
    for kind in KINDS:
        if kind in drawn:
            name = f"{KINDS[kind].label} {kind}".strip()
            sample: dict[str, Any] = {"colour": _FILL[kind], "name": name, "width": _SAMPLE}
            add_line(figure, (1, 1), x=[None], y=[None], **sample)


def _notes(panels: Mapping[str, HeadBehaviour]) -> list[str]:
    """Explanations of maps of behaviour, as sentences."""
    without = [title for title, behaviour in panels.items() if not behaviour.main]
    notes = [f"No head of {title} is of any kind." for title in without]
    labels = {label for behaviour in panels.values() for label in behaviour.labels.values()}
    if any(label.endswith(("+", _MINUS)) for label in labels):
        notes.append(f"+: copies what it attends to; {_MINUS}: lowers its logit.")
    return notes


def _add_kinds(
    figure: Any, position: Position, behaviour: HeadBehaviour, main: Mapping[str, str]
) -> None:
    """Fill a panel with cells, one trace per kind; tooltips have all scores."""
    grid = behaviour.grid
    names = grid.names(grid.places)
    scores = torch.stack([*behaviour.scores.values()], dim=-1).flatten(0, 1).tolist()
    tooltips = list[str]()
    for name, row in zip(names, scores, strict=True):
        measured = map("{} {:.3f}".format, behaviour.scores, row)
        tooltips.append(hover_text([name, *filter(None, [main.get(name)]), *measured]))
    rows = range(0, len(tooltips), grid.n_heads)
    for kind in ("", *dict.fromkeys(main.values())):
        cells = torch.full(grid.exists.shape, torch.nan)
        for head in names:
            if main.get(head, "") == kind:
                cells[grid.index(head)] = 1
        figure.add_heatmap(
            z=cells.tolist(),
            zmin=0,
            zmax=1,
            colorscale=[(0, _FILL[kind]), (1, _FILL[kind])],
            showscale=False,
            text=[tooltips[start : start + grid.n_heads] for start in rows],
            **CELLS,
            row=position[0],
            col=position[1],
        )


def _labels(
    figure: Any, position: Position, behaviour: HeadBehaviour, main: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The labels of a panel's cells; those that do not fit lose their sign, or are left out."""
    axes, grid = figure.get_subplot(*position), behaviour.grid
    width, height = panel_size(figure, position)
    if height / grid.n_layers < _LEAST_HEIGHT:
        return []
    style: dict[str, Any] = {"font": {"size": TICK_SIZE}, "xanchor": "center", "yanchor": "middle"}
    style |= {
        "xref": axes.xaxis.plotly_name.replace("axis", ""),
        "yref": axes.yaxis.plotly_name.replace("axis", ""),
    }
    labels = []
    for name, label in behaviour.labels.items():
        layer, head = grid.index(name)
        for text in (label, KINDS[main[name]].label):
            if text and text_width(text, TICK_SIZE) <= width / grid.n_heads:
                labels.append({"text": text, "x": head, "y": layer, **style})
                break
    return labels
