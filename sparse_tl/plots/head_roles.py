"""The roles of heads: what ablating them does, where they are, how their gates got there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from sparse_tl.plots.curves_layout import escaped
from sparse_tl.plots.intervals import interval_area
from sparse_tl.plots.palette import CURVE_WEIGHT, EMPTY_CELL, THIN_CURVE_WEIGHT, translucent
from sparse_tl.plots.palette import ROLES as ROLE_COLOURS
from sparse_tl.plots.panel_grid import PanelGrid, round_ticks
from sparse_tl.plots.plotly_figure import PlotlyFigure


@dataclass(frozen=True)
class AblationLine:
    """Delta log-probability for 0, 1, ... ablated heads: its mean over seeds and its range.

    Args:
        order: the role whose heads are ablated first, or "random".
        mean: in nats.
        low: smallest over seeds.
        high: largest over seeds.
        in_role: how many heads have the role, mean over seeds: beyond, the line is pale, since
            other heads follow there. None for all.

    Raises:
        ValueError: an unknown order, no value, lengths that differ, or a value that is not finite.
    """

    order: str
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    in_role: float | None = None

    def __post_init__(self) -> None:
        if self.order not in ROLE_COLOURS:
            raise ValueError(f"expected an order of {list(ROLE_COLOURS)}; got {self.order!r}")
        if not self.mean or not len(self.mean) == len(self.low) == len(self.high):
            raise ValueError(
                f"expected as many means as ends of ranges, at least one; got {len(self.mean)}, "
                f"{len(self.low)} and {len(self.high)}"
            )
        if not all(map(math.isfinite, [*self.mean, *self.low, *self.high])):
            raise ValueError(f"expected finite differences by {self.order}; got {self.mean}")


def ablation_grid(
    rows: Mapping[str, Mapping[str, Sequence[AblationLine]]],
) -> PlotlyFigure:
    """Delta log-probability of the target response against the heads ablated.

    One row of panels per task, which share their vertical axis; one column per model. A line ends
    where its model has no head left, and is pale where no head of its role is left.

    Args:
        rows: for each task by its title, for each model by its title, the lines of a panel.

    Returns:
        The figure; its `save` writes it to a file.

    Raises:
        ValueError: no row, no line, or a model that no task has.
    """
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    if not columns or not all(lines for row in rows.values() for lines in row.values()):
        raise ValueError(
            f"expected at least one task with one model, and lines in each panel; got {dict(rows)}"
        )
    orders = [
        order
        for order in ROLE_COLOURS
        if any(line.order == order for row in rows.values() for ls in row.values() for line in ls)
    ]
    grid = PanelGrid(list(rows), columns, [order.capitalize() for order in orders])
    figure = grid.figure()
    shown: set[str] = set()
    # One axis for all: the ticks of the lowest row are those of every panel.
    last = max(len(line.mean) for row in rows.values() for ls in row.values() for line in ls) - 1
    last = max(last, 1)
    for index, panels in enumerate(rows.values()):
        low, high = _vertical_range([line for lines in panels.values() for line in lines])
        for place, column in enumerate(columns):
            lines = sorted(panels.get(column, ()), key=lambda line: orders.index(line.order))
            names = grid.add_axes(
                figure,
                index,
                place,
                x={"range": [-0.02 * last, 1.02 * last], **round_ticks(0, last)},
                y={"range": [low, high], **round_ticks(low, high)},
                x_title="Number of Ablated Heads",
                y_title="\N{GREEK CAPITAL LETTER DELTA} log-probability",
            )
            for line in lines or [None]:
                _add_line(figure, line, names, shown)
    return figure


def head_roles_figure(scores: Mapping[str, Sequence[Sequence[float]]]) -> PlotlyFigure:
    """The scores of all heads, one panel per role: layers upwards, heads from left to right.

    Args:
        scores: ``[layer][head]`` by role, each 0 to 1.
    """
    first = next(iter(scores.values()))
    n_layers, n_heads = len(first), len(first[0])
    cell = max(8, min(26, 420 // max(n_layers, n_heads)))
    grid = PanelGrid(
        [""],
        [role.capitalize() for role in scores],
        width=max(cell * n_heads, 90),
        height=max(cell * n_layers, 60),
    )
    figure = grid.figure()
    for column, (role, values) in enumerate(scores.items()):
        names = grid.add_axes(
            figure,
            0,
            column,
            x={"range": [-0.5, n_heads - 0.5], **_whole_ticks(n_heads)},
            y={"range": [-0.5, n_layers - 0.5], **_whole_ticks(n_layers)},
            x_title="Head",
            y_title="Layer",
        )
        figure.add_trace(
            go.Heatmap(
                z=[list(row) for row in values],
                zmin=0,
                zmax=1,
                colorscale=[[0, EMPTY_CELL], [1, ROLE_COLOURS[role]]],
                showscale=False,
                xgap=1,
                ygap=1,
                text=[
                    [f"a{layer}.h{head}<br>{role} {score:.3f}" for head, score in enumerate(row)]
                    for layer, row in enumerate(values)
                ],
                hoverinfo="text",
                **names,
            )
        )
    return figure


def gate_trajectories(
    lines: Mapping[tuple[int, int], tuple[str, Sequence[Sequence[float]]]],
    recorded_at: Sequence[int],
) -> PlotlyFigure:
    """Every head's gate through the three stages of a fit, in the colour of its role.

    Args:
        lines: by (layer, head): the role, and the gates of each stage.
        recorded_at: updates before each gate.
    """
    roles = [role for role in ROLE_COLOURS if any(found == role for found, _ in lines.values())]
    legend = [role.capitalize() for role in roles]
    grid = PanelGrid([""], ["G0", "G+, pushed open", "G\N{MINUS SIGN}, pushed shut"], legend)
    figure = grid.figure()
    shown: set[str] = set()
    last = max(*recorded_at, 1)
    for stage in range(3):
        names = grid.add_axes(
            figure,
            0,
            stage,
            x={"range": [-0.02 * last, 1.02 * last], **round_ticks(0, last)},
            y={"range": [-0.03, 1.03], **round_ticks(0, 1, 2)},
            x_title="Update",
            y_title="Gate",
        )
        for (layer, head), (role, stages) in sorted(
            lines.items(), key=lambda item: roles.index(item[1][0])
        ):
            gates = list(stages[stage])
            figure.add_trace(
                go.Scatter(
                    x=list(recorded_at),
                    y=gates,
                    mode="lines",
                    line={"color": ROLE_COLOURS[role], "width": THIN_CURVE_WEIGHT},
                    name=role.capitalize(),
                    legendgroup=role,
                    showlegend=role not in shown,
                    hovertext=[f"a{layer}.h{head}<br>gate {gate:.3f}" for gate in gates],
                    hoverinfo="text",
                    **names,
                )
            )
            shown.add(role)
    return figure


def _vertical_range(lines: Sequence[AblationLine]) -> tuple[float, float]:
    """Holds every mean and 0, and as much of the ranges as does not flatten the means."""
    means = [value for line in lines for value in line.mean]
    low, high = min(0.0, *means), max(0.0, *means)
    room = max(0.06 * (high - low), 0.01)
    widest = (min(v for line in lines for v in line.low), max(v for li in lines for v in li.high))
    span = 0.25 * (high - low)
    return max(widest[0], low - span) - room, min(max(widest[1], 0.0), high + span) + room


def _add_line(
    figure: go.Figure, line: AblationLine | None, names: Mapping[str, str], shown: set[str]
) -> None:
    if line is None:  # a task that this model was not asked to do: an empty panel
        figure.add_trace(go.Scatter(x=[], y=[], mode="lines", showlegend=False, **names))
        return
    x, colour = list(range(len(line.mean))), ROLE_COLOURS[line.order]
    name = escaped(line.order.capitalize())
    figure.add_trace(
        go.Scatter(
            **interval_area(x, line.low, line.high, translucent(colour, 0.16)),
            name=f"{name}, range",
            legendgroup=line.order,
            **names,
        )
    )
    rows = zip(x, line.mean, line.low, line.high, strict=True)
    hover = [
        f"<b>{name}</b><br>{count} ablated<br>{mean:+.3f} nats<br>"
        f"Range over seeds {low:+.3f} to {high:+.3f}"
        for count, mean, low, high in rows
    ]
    style = {"width": CURVE_WEIGHT, **({"dash": "4px,3px"} if line.order == "random" else {})}
    end = x[-1] if line.in_role is None else min(round(line.in_role), x[-1])
    pale = translucent(colour, 0.35)
    for part, paint in ((slice(0, end + 1), colour), (slice(end, None), pale)):
        if part.start == x[-1]:
            continue
        figure.add_trace(
            go.Scatter(
                x=x[part],
                y=list(line.mean)[part],
                mode="lines",
                line={"color": paint, **style},
                name=name,
                legendgroup=line.order,
                showlegend=paint == colour and line.order not in shown,
                hovertext=hover[part],
                hoverinfo="text",
                **names,
            )
        )
    shown.add(line.order)


def _whole_ticks(count: int) -> dict[str, list[Any]]:
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128) if count <= 16 * step)
    values = list(range(0, count, step))
    return {"tickvals": values, "ticktext": [str(value) for value in values]}
