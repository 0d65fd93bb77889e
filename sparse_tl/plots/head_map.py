"""Scores of heads as a map: layers upwards, heads across, and some heads framed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from sparse_tl.circuits import Scores
from sparse_tl.grids import HeadGrid
from sparse_tl.plots.grid_figure import GridFigure
from sparse_tl.plots.palette import EMPTY_CELL, HELPS, HURTS, MARK_WEIGHT, MARKS, check_marks
from sparse_tl.plots.panels import add_line, add_side_legend, hover_text, panel_figure, ticks

_REACH = 0.42
"""From the middle of a cell to its frame."""

_Heads = dict[str, list[tuple[int, ...]]]


def head_map(
    panels: Mapping[str, Scores],
    *,
    marked: Mapping[str, Sequence[Any]] | None = None,
    unit: str = "",
) -> GridFigure:
    """Draw how much every head matters, one panel per model in a row.

    Blue heads help (negative score), orange ones hurt; full colour is the largest ``|score|`` of
    the panel, which its title gives.

    Args:
        panels: scores of heads, by the title of their panel.
        marked: heads that are framed in every panel, as ``(layer, head)`` or ``"a9.h9"``, by what
            the legend calls them, such as `sparse_tl.tasks.GPT2_IOI_HEADS`.
        unit: of the scores, such as "logits".

    Returns:
        The figure; its `save` writes it to a file.

    Raises:
        ValueError: no panel, scores of other parts than heads, models of different shapes, a marked
            head that they lack, or more names of marked heads than colours.
    """
    grid = _checked(panels)
    framed = {name: [grid.index(head) for head in heads] for name, heads in (marked or {}).items()}
    check_marks(framed)
    unit = f" {unit}" if unit else ""
    means = {name: scores.mean().detach().double().cpu() for name, scores in panels.items()}
    largest = [mean.abs().max().item() for mean in means.values()]
    cell = max(8, min(26, 420 // max(grid.n_layers, grid.n_heads)))
    figure = panel_figure(
        [
            f"{name}, \N{PLUS-MINUS SIGN}{most:.2g}{unit}"
            for name, most in zip(means, largest, strict=True)
        ],
        x="Head",
        y="Layer",
        width=max(cell * grid.n_heads, 150),
        height=max(cell * grid.n_layers, 60),
    )
    for column, (mean, most) in enumerate(zip(means.values(), largest, strict=True), start=1):
        _add_cells(figure, column, mean.tolist(), most or 1.0, framed, unit)
        _add_frames(figure, column, framed)
    for update, count in (
        (figure.update_xaxes, grid.n_heads),
        (figure.update_yaxes, grid.n_layers),
    ):
        update(range=(-0.5, count - 0.5), **ticks(0, count - 1, 16, whole=True))
    if framed:
        add_side_legend(figure)
    return GridFigure(figure, f"Scores of heads in {', '.join(panels)}")


def _checked(panels: Mapping[str, Scores]) -> HeadGrid:
    """The heads that all panels are of."""
    sites = list(dict.fromkeys(scores.site for scores in panels.values()))
    if len(sites) != 1 or not isinstance(sites[0], HeadGrid):
        raise ValueError(
            "expected scores of the heads of one model, or of models of one shape, as "
            f"attribute_heads returns them; got scores of {sites}. Circuit edges are drawn as a "
            "circuit: scores.top(100).figure(scores=scores)"
        )
    return sites[0]


def _add_cells(
    figure: go.Figure,
    column: int,
    scores: Sequence[Sequence[float]],
    largest: float,
    framed: _Heads,
    unit: str,
) -> None:
    called: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, heads in framed.items():
        for head in heads:
            called[head].append(name)
    said = [
        [
            hover_text((f"a{layer}.h{head}", f"{score:+.3g}{unit}", *called.get((layer, head), ())))
            for head, score in enumerate(row)
        ]
        for layer, row in enumerate(scores)
    ]
    figure.add_heatmap(
        z=scores,
        zmin=-largest,
        zmax=largest,
        colorscale=[(0, HELPS), (0.5, EMPTY_CELL), (1, HURTS)],
        showscale=False,
        xgap=1,
        ygap=1,
        text=said,
        hoverinfo="text",
        row=1,
        col=column,
    )


def _add_frames(figure: go.Figure, column: int, framed: _Heads) -> None:
    """One broken line for each name: the frames of its heads."""
    corners = ((-1, -1), (1, -1), (1, 1), (-1, 1), (-1, -1), (math.nan, math.nan))
    for (name, heads), colour in zip(framed.items(), MARKS, strict=False):
        at = [
            (head + across * _REACH, layer + up * _REACH)
            for layer, head in heads
            for across, up in corners
        ]
        x, y = zip(*at, strict=True) if at else ((), ())
        add_line(figure, 1, column, x=x, y=y, colour=colour, name=name, width=MARK_WEIGHT)
