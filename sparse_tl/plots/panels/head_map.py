"""Maps of heads by score or behaviour: layers upwards, heads across, selected heads framed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from sparse_tl.calls.arguments import checked
from sparse_tl.circuits import HeadBehaviour, Scores
from sparse_tl.parts.grids import HeadGrid
from sparse_tl.plots.page.palette import EMPTY_CELL, HELPS, HURTS, MARK_WEIGHT, MARKS
from sparse_tl.plots.panels.behaviour_map import behaviour_notes, behaviour_panels
from sparse_tl.plots.panels.cells import add_cells
from sparse_tl.plots.panels.grid_figure import GridFigure
from sparse_tl.plots.panels.head_panels import head_panels
from sparse_tl.plots.panels.legends import add_legend_below, add_notes
from sparse_tl.plots.panels.plotly_panels import add_line, hover_text

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

    Returns:
        The figure; call its `save` to write it to a file.

    Raises:
        ValueError: there is no panel, scores are not of heads, models differ in shape, a model
            lacks a marked head, or there are more names of marks than colours.
    """
    grid = _checked(panels)
    framed = marked_heads(grid, marked or {})
    behaviours = {
        name: result for name, result in panels.items() if isinstance(result, HeadBehaviour)
    }
    if behaviours:
        figure, positions = behaviour_panels(behaviours)
    else:
        scores = {name: result for name, result in panels.items() if isinstance(result, Scores)}
        figure, positions = _score_panels(scores, grid, framed, unit)
    for position in positions:
        _add_frames(figure, position, framed)
    if any(trace.name for trace in figure.data):
        add_legend_below(figure)
    add_notes(figure, behaviour_notes(behaviours))
    return GridFigure(
        figure, f"{'Kinds' if behaviours else 'Scores'} of heads in {', '.join(panels)}"
    )


def marked_heads(grid: HeadGrid, marked: Mapping[str, Sequence[Any]]) -> _Heads:
    """The indices of the marked heads, by legend entry.

    Raises:
        ValueError: the model lacks a head, or there are more names than colours.
    """
    if len(marked) > len(MARKS):
        raise ValueError(f"expected at most {len(MARKS)} names of heads; got {list(marked)}")
    return {name: [grid.index(head) for head in heads] for name, heads in marked.items()}


def _checked(panels: Mapping[str, Scores] | Mapping[str, HeadBehaviour]) -> HeadGrid:
    """The grid of heads that all panels share."""
    grids = {result.grid for result in panels.values()}
    grid = grids.pop() if len(grids) == 1 else None
    if not isinstance(grid, HeadGrid):
        raise ValueError(
            "expected scores of heads from attribute_heads, or head behaviour, of models of one "
            f"shape; got {list(panels.values())}. Draw scores of circuit edges with "
            "scores.figure()"
        )
    return grid


def _score_panels(
    panels: Mapping[str, Scores], grid: HeadGrid, framed: _Heads, unit: str
) -> tuple[Any, list[tuple[int, int]]]:
    """Maps of scores, and the row and column of each."""
    means = {name: scores.mean().detach().double().cpu() for name, scores in panels.items()}
    figure, positions = head_panels(list(means), grid.n_layers, grid.n_heads)
    for position, mean in zip(positions, means.values(), strict=True):
        largest = mean.abs().max().item() or 1.0
        _add_cells(figure, position, mean.tolist(), largest, framed, unit)
    return figure, positions


def _add_cells(
    figure: go.Figure,
    position: tuple[int, int],
    scores: Sequence[Sequence[float]],
    largest: float,
    framed: _Heads,
    unit: str,
) -> None:
    measured, unit = (f"Score, {unit}", f" {unit}") if unit else ("Score", "")
    names: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, heads in framed.items():
        for head in heads:
            names[head].append(name)
    tooltips = [
        [
            hover_text([f"a{layer}.h{head}", f"{score:+.3g}{unit}", *names[layer, head]])
            for head, score in enumerate(row)
        ]
        for layer, row in enumerate(scores)
    ]
    colours = [(0, HELPS), (0.5, EMPTY_CELL), (1, HURTS)]
    add_cells(figure, position, scores, tooltips, colours, (-largest, largest), measured)


def _add_frames(figure: go.Figure, position: tuple[int, int], framed: _Heads) -> None:
    """Add one line with gaps per name: the frames of its heads."""
    corners = ((-1, -1), (1, -1), (1, 1), (-1, 1), (-1, -1), (math.nan, math.nan))
    for (name, heads), colour in zip(framed.items(), MARKS, strict=False):
        at = [
            (head + across * _REACH, layer + up * _REACH)
            for layer, head in heads
            for across, up in corners
        ]
        x, y = zip(*at, strict=True) if at else ((), ())
        add_line(figure, *position, x=x, y=y, colour=colour, name=name, width=MARK_WEIGHT)
