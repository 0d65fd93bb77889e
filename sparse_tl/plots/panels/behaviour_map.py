"""Maps of head behaviour: a colour for each head's kind, and a short label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparse_tl.circuits import KINDS, HeadBehaviour
from sparse_tl.plots.page.palette import BACKGROUND, EMPTY_CELL, KINDS_OF_HEADS, TICK_SIZE, blend
from sparse_tl.plots.page.token_text import text_width
from sparse_tl.plots.panels.cells import CELLS
from sparse_tl.plots.panels.head_panels import head_panels
from sparse_tl.plots.panels.plotly_panels import add_line, hover_text

_MINUS = KINDS["negative copying"].label
_LABELS = [kind.label + _MINUS for kind in KINDS.values()]
_MARGIN, _LEAST_HEIGHT = 4, 11
"""Horizontal padding of labels, and the least height of a cell with one, in pixels."""
_SAMPLE = 9.0
_FILL = {kind: blend(BACKGROUND, colour, 0.4) for kind, colour in KINDS_OF_HEADS.items()}
_FILL[""] = EMPTY_CELL


def behaviour_panels(
    panels: Mapping[str, HeadBehaviour],
) -> tuple[Any, list[tuple[int, int]]]:
    """Maps of the behaviour of heads, and the row and column of each; see `head_map`."""
    grid = next(iter(panels.values())).grid
    longest = max(text_width(label, TICK_SIZE) for label in _LABELS) + _MARGIN
    figure, positions = head_panels(list(panels), grid.n_layers, grid.n_heads, label_width=longest)
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
            add_line(figure, 1, 1, x=[None], y=[None], colour=_FILL[kind], name=name, width=_SAMPLE)
    return figure, positions


def behaviour_notes(panels: Mapping[str, HeadBehaviour]) -> list[str]:
    """Explanations of the maps, as sentences."""
    without = [title for title, behaviour in panels.items() if not behaviour.main]
    notes = [f"No head of {title} is of any kind." for title in without]
    labels = {label for behaviour in panels.values() for label in behaviour.labels.values()}
    if any(label.endswith(("+", _MINUS)) for label in labels):
        notes.append(f"+: copies what it attends to; {_MINUS}: lowers its logit.")
    return notes


def _add_kinds(
    figure: Any, position: tuple[int, int], behaviour: HeadBehaviour, main: Mapping[str, str]
) -> None:
    """Fill a panel with cells, one trace per kind."""
    grid, tooltips = behaviour.grid, _tooltips(behaviour, main)
    for kind in ("", *dict.fromkeys(main.values())):
        cells = torch.full(grid.exists.shape, torch.nan)
        for head in grid.names(grid.places):
            if main.get(head, "") == kind:
                cells[grid.index(head)] = 1
        colour = _FILL[kind]
        figure.add_heatmap(
            z=cells.tolist(),
            zmin=0,
            zmax=1,
            colorscale=[(0, colour), (1, colour)],
            showscale=False,
            text=tooltips,
            **CELLS,
            row=position[0],
            col=position[1],
        )


def _tooltips(behaviour: HeadBehaviour, main: Mapping[str, str]) -> list[list[str]]:
    """The tooltip of each head: its kind, and all its scores."""
    names = behaviour.grid.names(behaviour.grid.places)
    scores = torch.stack([*behaviour.scores.values()], dim=-1).flatten(0, 1).tolist()
    tooltips = list[str]()
    for name, row in zip(names, scores, strict=True):
        measured = map("{} {:.3f}".format, behaviour.scores, row)
        tooltips.append(hover_text([name, *filter(None, [main.get(name)]), *measured]))
    n_heads = behaviour.grid.n_heads
    return [tooltips[start : start + n_heads] for start in range(0, len(tooltips), n_heads)]


def _labels(
    figure: Any, position: tuple[int, int], behaviour: HeadBehaviour, main: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The labels of a panel's cells; those that do not fit lose their sign, or are left out."""
    axes, layout, grid = figure.get_subplot(*position), figure.layout, behaviour.grid
    inner_width = layout.width - layout.margin.l - layout.margin.r
    inner_height = layout.height - layout.margin.t - layout.margin.b
    across, upwards = axes.xaxis.domain, axes.yaxis.domain
    width = (across[1] - across[0]) * inner_width / grid.n_heads
    if (upwards[1] - upwards[0]) * inner_height / grid.n_layers < _LEAST_HEIGHT:
        return []
    style: dict[str, Any] = {"font": {"size": TICK_SIZE}, "xanchor": "center", "yanchor": "middle"}
    style |= {
        "xref": axes.xaxis.plotly_name.replace("axis", ""),
        "yref": axes.yaxis.plotly_name.replace("axis", ""),
    }
    labels = []
    for name, label in behaviour.labels.items():
        layer, head = grid.index(name)
        either = (label, KINDS[main[name]].label)
        fitting = [text for text in either if text and text_width(text, TICK_SIZE) <= width]
        labels += [{"text": text, "x": head, "y": layer, **style} for text in fitting[:1]]
    return labels
