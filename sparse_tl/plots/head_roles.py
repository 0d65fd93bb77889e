"""Figures of head roles: effects of ablation, roles by head, and gate trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from sparse_tl.head_roles import ROLES, AblationCurve, HeadRoles
from sparse_tl.plots.grid_figure import GridFigure
from sparse_tl.plots.palette import EMPTY_CELL, ROLES as ROLE_COLOURS, THIN_CURVE_WEIGHT
from sparse_tl.plots.panels import (
    add_head_cells,
    add_line,
    add_side_legend,
    head_panels,
    hover_text,
    panel_figure,
    ticks,
)

_PALE = 0.35


def ablation_grid(rows: Mapping[str, Mapping[str, Sequence[AblationCurve]]]) -> GridFigure:
    """Delta log-probability of the target response against the number of ablated heads.

    One row of panels per task, with a shared vertical axis; one column per model. Lines are means
    over seeds, shaded from minimum to maximum. A line ends where its model has no heads left, and
    is pale where its role has no heads left. The first control of a panel is its random order.

    Args:
        rows: curves of each panel, by task title and then model title.

    Returns:
        The figure; call its `save` to write it to a file.

    Raises:
        ValueError: there is no row, or a panel has no curves.
    """
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    every = [curve for row in rows.values() for curves in row.values() for curve in curves]
    if not columns or not all(curves for row in rows.values() for curves in row.values()):
        raise ValueError(
            f"expected at least one task with one model, and curves in each panel; got {dict(rows)}"
        )
    figure = panel_figure(
        columns,
        list(rows),
        x="Number of Ablated Heads",
        y="\N{GREEK CAPITAL LETTER DELTA} log-probability",
    )
    _span_updates(figure, max(curve.values.shape[1] for curve in every) - 1)
    for number, row in enumerate(rows.values(), start=1):
        span = _vertical_span([curve for curves in row.values() for curve in curves])
        figure.update_yaxes(range=span, **ticks(*span), row=number)
        for column, name in enumerate(columns, start=1):
            if name in row:
                _add_curves(figure, number, column, row[name])
            else:  # plotly draws no axes without a trace
                figure.add_scatter(x=[], y=[], showlegend=False, row=number, col=column)
    add_side_legend(figure)
    said = f"Effect of ablating heads in {', '.join([*columns, *filter(None, rows)])}"
    return GridFigure(figure, said)


def head_roles_figure(roles: HeadRoles) -> GridFigure:
    """Mean head scores over seeds, one panel per role: layers upwards, heads across.

    Panel titles state the cost of removing all heads of the role from the model, in nats per
    target token; tooltips state the cost of removing one head.
    """
    costs = roles.classes()["removed"]
    scores = dict(zip(ROLES, roles.mean_scores().tolist(), strict=True))
    figure = head_panels(
        [f"{role.capitalize()}, {costs[role]:+.2f} nats" for role in ROLES], *roles.removed.shape
    )
    for column, (role, rows) in enumerate(scores.items(), start=1):
        said = [
            [
                hover_text(
                    (
                        f"a{layer}.h{head}",
                        f"{role} {score:.3f}",
                        f"removed {roles.removed[layer, head]:+.3g} nats",
                    )
                )
                for head, score in enumerate(row)
            ]
            for layer, row in enumerate(rows)
        ]
        colours = [(0, EMPTY_CELL), (1, ROLE_COLOURS[role])]
        add_head_cells(figure, column, rows, said, colours, (0, 1))
    return GridFigure(figure, "Roles of heads")


def gate_trajectories(roles: HeadRoles) -> GridFigure:
    """Every head's gate, mean over seeds, in the three stages, coloured by its strongest role."""
    strongest = roles.mean_scores().argmax(dim=0)
    titles = ["G0", "G+, pushed open", "G\N{MINUS SIGN}, pushed shut"]
    figure = panel_figure(titles, x="Update", y="Gate")
    _span_updates(figure, max(roles.recorded_at))
    figure.update_yaxes(range=(-0.03, 1.03), **ticks(0, 1, 2))
    for column, gates in enumerate(roles.trajectories[:, roles.fitted].mean(dim=1), start=1):
        for place, role in enumerate(ROLES):
            for layer, head in (strongest == place).nonzero().tolist():
                values = gates[:, layer, head].tolist()
                add_line(
                    figure,
                    1,
                    column,
                    x=roles.recorded_at,
                    y=values,
                    colour=ROLE_COLOURS[role],
                    name=role.capitalize(),
                    hover=[(f"a{layer}.h{head}", f"gate {gate:.3f}") for gate in values],
                    width=THIN_CURVE_WEIGHT,
                )
    add_side_legend(figure)
    return GridFigure(figure, "Gates of heads by update")


def _span_updates(figure: go.Figure, last: int) -> None:
    """Set horizontal axes from 0 to the last update, with a small margin."""
    last = max(last, 1)
    figure.update_xaxes(range=(-0.02 * last, 1.02 * last), **ticks(0, last, whole=True))


def _add_curves(figure: go.Figure, row: int, column: int, curves: Sequence[AblationCurve]) -> None:
    order = list(ROLE_COLOURS)
    for curve in sorted(curves, key=lambda curve: order.index(curve.by)):
        in_role = sum(curve.in_role) / len(curve.in_role)
        _add_curve(figure, row, column, curve.by, curve.values, round(in_role))
    control = next((curve.control for curve in curves if curve.control is not None), None)
    if control is not None:
        _add_curve(figure, row, column, "random", control, control.shape[1])


def _add_curve(
    figure: go.Figure,
    row: int,
    column: int,
    order: str,
    values: Float[Tensor, "seed count"],
    in_role: int,
) -> None:
    """The mean, in full colour while there are heads of the role, then pale."""
    name = order.capitalize()
    mean, low, high = (
        over_seeds.tolist()
        for over_seeds in (values.mean(dim=0), values.amin(dim=0), values.amax(dim=0))
    )
    hover = [
        (
            name,
            f"{count} ablated",
            f"{mean[count]:+.3f} nats",
            f"Range over seeds {low[count]:+.3f} to {high[count]:+.3f}",
        )
        for count in range(len(mean))
    ]
    last = len(mean) - 1
    end = min(in_role, last)
    for first, stop, opacity in ((0, end, 1.0), (end, last, _PALE)):
        if first == last:
            continue
        part = slice(first, stop + 1)
        add_line(
            figure,
            row,
            column,
            x=range(first, stop + 1),
            y=mean[part],
            colour=ROLE_COLOURS[order],
            name=name,
            low=low[part],
            high=high[part],
            hover=hover[part],
            opacity=opacity,
            dashed=order == "random",
        )


def _vertical_span(curves: Sequence[AblationCurve]) -> tuple[float, float]:
    """A range that holds every mean and 0, and as much of the spread as leaves means legible."""
    values = [
        some for curve in curves for some in (curve.values, curve.control) if some is not None
    ]
    means = [mean for some in values for mean in some.mean(dim=0).tolist()]
    low, high = min(0.0, *means), max(0.0, *means)
    room, more = max(0.06 * (high - low), 0.01), 0.25 * (high - low)
    lowest = min(some.min().item() for some in values)
    highest = max(0.0, *(some.max().item() for some in values))
    return max(lowest, low - more) - room, min(highest, high + more) + room
