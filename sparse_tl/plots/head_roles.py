"""The roles of heads: what ablating them does, where they are, how their gates got there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jaxtyping import Float
from torch import Tensor

from sparse_tl.head_roles import ROLES, AblationCurve, HeadRoles
from sparse_tl.plots.grid import Axis, Cells, Grid, Line, Panel, round_ticks
from sparse_tl.plots.grid_figure import GridFigure
from sparse_tl.plots.palette import ROLES as ROLE_COLOURS, THIN_CURVE_WEIGHT

_PALE = 0.35


def ablation_grid(rows: Mapping[str, Mapping[str, Sequence[AblationCurve]]]) -> GridFigure:
    """Delta log-probability of the target response against the heads ablated.

    One row of panels per task, which share their vertical axis; one column per model. Lines are
    means over seeds, shaded from the smallest to the largest. A line ends where its model has no
    head left, and is pale where no head of its role is left. The first control of a panel is its
    random order.

    Args:
        rows: for each task by its title, for each model by its title, the curves of a panel.

    Returns:
        The figure; its `save` writes it to a file.

    Raises:
        ValueError: no row, or a panel without curves.
    """
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    every = [curve for row in rows.values() for curves in row.values() for curve in curves]
    if not columns or not all(curves for row in rows.values() for curves in row.values()):
        raise ValueError(
            f"expected at least one task with one model, and curves in each panel; got {dict(rows)}"
        )
    last = max(max(curve.values.shape[1] for curve in every) - 1, 1)
    listed: set[str] = set()
    panels = []
    for index, row in enumerate(rows.values()):
        span = _vertical_span([curve for curves in row.values() for curve in curves])
        y = Axis("\N{GREEK CAPITAL LETTER DELTA} log-probability", span, round_ticks(*span))
        x = _update_axis("Number of Ablated Heads", last)
        panels.append(
            _row(
                [tuple(_panel_lines(row.get(name, ()), listed)) for name in columns],
                columns if index == 0 else [""] * len(columns),
                x if index == len(rows) - 1 else _unlabelled(x),
                y,
            )
        )
    said = f"Effect of ablating heads in {', '.join([*columns, *filter(None, rows)])}"
    return GridFigure(Grid(panels, said, row_titles=list(rows)))


def head_roles_figure(roles: HeadRoles) -> GridFigure:
    """The mean scores of all heads over seeds, one panel per role: layers upwards, heads across.

    A panel's title says what it costs to remove all heads of the role from the model, in nats per
    target token; a tooltip, what it costs to remove the head alone.
    """
    costs = roles.classes()["removed"]
    scores = dict(zip(ROLES, roles.mean_scores(), strict=True))
    n_layers, n_heads = scores[ROLES[0]].shape
    cell = max(8, min(26, 420 // max(n_layers, n_heads)))
    x = Axis("Head", (-0.5, n_heads - 0.5), _whole_ticks(n_heads))
    y = Axis("Layer", (-0.5, n_layers - 0.5), _whole_ticks(n_layers))
    panels = []
    for place, (role, values) in enumerate(scores.items()):
        hover = [
            [
                (
                    f"a{layer}.h{head}",
                    f"{role} {score:.3f}",
                    f"removed {roles.removed[layer, head]:+.3g} nats",
                )
                for head, score in enumerate(row)
            ]
            for layer, row in enumerate(values.tolist())
        ]
        cells = Cells(values.tolist(), ROLE_COLOURS[role], hover)
        title = f"{role.capitalize()}, {costs[role]:+.2f} nats"
        panels.append(Panel(x, y if place == 0 else _unlabelled(y), title, cells=cells))
    width, height = max(cell * n_heads, 150), max(cell * n_layers, 60)
    return GridFigure(Grid([panels], "Roles of heads", width=width, height=height))


def gate_trajectories(roles: HeadRoles) -> GridFigure:
    """Every head's gate, mean over seeds, through the three stages, by its strongest role."""
    strongest = roles.mean_scores().argmax(dim=0)
    by_role = sorted(
        (int(strongest[layer, head]), layer, head)
        for layer in range(strongest.shape[0])
        for head in range(strongest.shape[1])
    )
    listed: set[str] = set()
    stages = []
    for gates in roles.trajectories[:, roles.fitted].mean(dim=1):
        lines = []
        for role, layer, head in by_role:
            values = gates[:, layer, head].tolist()
            hover = [(f"a{layer}.h{head}", f"gate {gate:.3f}") for gate in values]
            name = ROLES[role].capitalize()
            lines.append(
                Line(
                    name,
                    roles.recorded_at,
                    values,
                    ROLE_COLOURS[ROLES[role]],
                    hover=hover,
                    width=THIN_CURVE_WEIGHT,
                    listed=name not in listed,
                )
            )
            listed.add(name)
        stages.append(tuple(lines))
    x = _update_axis("Update", max(*roles.recorded_at, 1))
    y = Axis("Gate", (-0.03, 1.03), round_ticks(0, 1, 2))
    titles = ["G0", "G+, pushed open", "G\N{MINUS SIGN}, pushed shut"]
    return GridFigure(Grid([_row(stages, titles, x, y)], "Gates of heads by update"))


def _update_axis(title: str, last: int) -> Axis:
    return Axis(title, (-0.02 * last, 1.02 * last), round_ticks(0, last))


def _unlabelled(axis: Axis) -> Axis:
    return Axis(axis.title, axis.span, axis.ticks, labelled=False)


def _row(lines: Sequence[tuple[Line, ...]], titles: Sequence[str], x: Axis, y: Axis) -> list[Panel]:
    """Panels that share their axes; the vertical one is labelled in the first of them."""
    return [
        Panel(x, y if place == 0 else _unlabelled(y), title, some)
        for place, (some, title) in enumerate(zip(lines, titles, strict=True))
    ]


def _panel_lines(curves: Sequence[AblationCurve], listed: set[str]) -> Iterator[Line]:
    order = list(ROLE_COLOURS)
    for curve in sorted(curves, key=lambda curve: order.index(curve.by)):
        in_role = sum(curve.in_role) / len(curve.in_role)
        yield from _ablation_lines(curve.by, curve.values, round(in_role), listed)
    control = next((curve.control for curve in curves if curve.control is not None), None)
    if control is not None:
        yield from _ablation_lines("random", control, control.shape[1], listed)


def _ablation_lines(
    order: str, values: Float[Tensor, "seed count"], in_role: int, listed: set[str]
) -> Iterator[Line]:
    """The mean in full colour as far as there are heads of the role, and then pale."""
    name, colour = order.capitalize(), ROLE_COLOURS[order]
    x = list(range(values.shape[1]))
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
        for count in x
    ]
    end, dashed = min(in_role, x[-1]), order == "random"
    for part, alpha in ((slice(0, end + 1), 1.0), (slice(end, None), _PALE)):
        if part.start == x[-1]:
            continue
        yield Line(
            name,
            x[part],
            mean[part],
            colour,
            low[part],
            high[part],
            hover[part],
            alpha=alpha,
            dashed=dashed,
            listed=name not in listed,
        )
        listed.add(name)


def _vertical_span(curves: Sequence[AblationCurve]) -> tuple[float, float]:
    """Holds every mean and 0, and as much of the ranges as does not flatten the means."""
    values = [
        some for curve in curves for some in (curve.values, curve.control) if some is not None
    ]
    means = [mean for some in values for mean in some.mean(dim=0).tolist()]
    low, high = min(0.0, *means), max(0.0, *means)
    room, more = max(0.06 * (high - low), 0.01), 0.25 * (high - low)
    lowest = min(some.min().item() for some in values)
    highest = max(0.0, *(some.max().item() for some in values))
    return max(lowest, low - more) - room, min(highest, high + more) + room


def _whole_ticks(count: int) -> dict[float, str]:
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128) if count <= 16 * step)
    return {value: str(value) for value in range(0, count, step)}
