"""Figures of head roles: effects of ablation, and gate trajectories."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from sparse_tl.calls.arguments import checked
from sparse_tl.head_roles import ROLES, AblationCurve, HeadRoles
from sparse_tl.plots.page.palette import (
    INK,
    LABEL_SIZE,
    MUTED,
    ROLES as ROLE_COLOURS,
    THIN_CURVE_WEIGHT,
    TICK_SIZE,
)
from sparse_tl.plots.page.token_text import clip_text, visible_text
from sparse_tl.plots.panels.grid import (
    LEFT_LINE,
    LONGEST_NAME,
    ROW_TITLE_WIDTH,
    GridFigure,
    Position,
    add_legend,
    add_line,
    add_notes,
    add_outer_titles,
    count_ticks,
    fitting_width,
    panel_figure,
)

_PALE, _PALE_WEIGHT = 0.45, 1.0
_CROWDED = 0.7
_IN_ROLE, _BEYOND = "In the role", "Beyond it"
_NAMES = {role: role.capitalize() for role in ROLES} | {"random": "Random"}
_GAP, _WIDEST = 18, 400


@checked
def ablation_grid(rows: Mapping[str, Mapping[str, Sequence[AblationCurve]]]) -> GridFigure:
    """Draw the change in log-probability of the target response against ablated heads.

    One row of panels per task, with its own axes, and one column per model. Lines are means over
    seeds, with a shaded range. A line has full colour while heads of its role are ablated; after
    these, or if the role has no heads (a note says so), it is thin and pale. A line ends when its
    model has no heads left. The first control of a panel is drawn as its random order.

    Args:
        rows: curves of each panel, by task title and then model title.

    Raises:
        ValueError: there is no row, or a panel has no curves.
    """
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    every = [curve for row in rows.values() for curves in row.values() for curve in curves]
    if not columns or not all(curves for row in rows.values() for curves in row.values()):
        raise ValueError("there is no task, or a panel has no curves")
    beside = LEFT_LINE + (ROW_TITLE_WIDTH if any(rows) else 0)
    width = fitting_width(len(columns), gap=_GAP, most=_WIDEST, beside=beside)
    figure = panel_figure(
        [columns, *[[""] * len(columns)] * (len(rows) - 1)],
        list(rows),
        x="",
        y="",
        width=width,
        height=max(140, width / 2),
        gap=_GAP,
    )
    # Samples in full colour, even if the lines of the first panel are pale.
    for name, style in _legend(every).items():
        add_line(figure, (1, 1), x=[None], y=[None], name=name, **style)
    for number, row in enumerate(rows.values(), start=1):
        drawn = [curve for curves in row.values() for curve in curves]
        _span_updates(figure, max(curve.counts[-1] for curve in drawn), row=number)
        span = _vertical_span(drawn)
        figure.update_yaxes(range=span, nticks=5, row=number)
        for column, name in enumerate(columns, start=1):
            if name in row:
                _add_curves(figure, (number, column), row[name])
            else:
                _add_missing(figure, number, column)
    upwards = "\N{GREEK CAPITAL LETTER DELTA} Log Probability<br>of Target Response"
    add_outer_titles(figure, "Number of Ablated Heads", upwards)
    add_legend(figure)
    add_notes(figure, _empty_roles(rows))
    title = f"Effect of ablating heads in {', '.join([*columns, *filter(None, rows)])}"
    return GridFigure(figure, title)


def _legend(curves: Sequence[AblationCurve]) -> dict[str, dict[str, Any]]:
    """Line styles by name: the orders of ablation, then full colour and pale."""
    used = {curve.by for curve in curves}
    used |= {"random"} if any(curve.control is not None for curve in curves) else set()
    styles: dict[str, dict[str, Any]] = {
        name: {"colour": ROLE_COLOURS[order], "dashed": order == "random"}
        for order, name in _NAMES.items()
        if order in used
    }
    if any(_n_in_role(curve) < curve.counts[-1] for curve in curves):
        styles[_IN_ROLE] = {"colour": INK}
        styles[_BEYOND] = {"colour": INK, "width": _PALE_WEIGHT, "opacity": _PALE}
    return styles


def _empty_roles(rows: Mapping[str, Mapping[str, Sequence[AblationCurve]]]) -> Iterator[str]:
    """One note per role, listing the panels in which it has no heads."""
    for role in ROLES:
        empty: dict[str, list[str]] = defaultdict(list)
        for task, row in rows.items():
            for model, curves in row.items():
                if any(curve.by == role and _n_in_role(curve) == 0 for curve in curves):
                    empty[task].append(_clipped(model))
        panels = [
            f"{_clipped(task)} ({', '.join(models)})" if task else ", ".join(models)
            for task, models in empty.items()
        ]
        if panels:
            yield f"No heads of {role}: {'; '.join(panels)}."


def _clipped(title: str) -> str:
    return clip_text(visible_text(title), TICK_SIZE, LONGEST_NAME)


def _n_in_role(curve: AblationCurve) -> int:
    """Number of heads in the role, mean over seeds."""
    return round(sum(curve.in_role) / len(curve.in_role))


def _add_missing(figure: Any, row: int, column: int) -> None:
    # Plotly draws no axes without a trace.
    figure.add_scatter(x=[], y=[], showlegend=False, row=row, col=column)
    centre = {"xref": "x domain", "yref": "y domain", "x": 0.5, "y": 0.5}
    centre |= {"xanchor": "center", "yanchor": "middle"}
    font = {"size": LABEL_SIZE, "color": MUTED}
    figure.add_annotation(text="not measured", font=font, row=row, col=column, **centre)


@checked
def gate_trajectories(roles: HeadRoles) -> GridFigure:
    """Draw each head's mean gate over seeds in the three stages, coloured by its strongest role."""
    strongest = roles.mean_scores().argmax(dim=0)
    heads = {role: (strongest == index).nonzero().tolist() for index, role in enumerate(ROLES)}
    heads = {role: members for role, members in heads.items() if members}
    titles = ["G0", "G+, pushed open", "G\N{MINUS SIGN}, pushed shut"]
    width = fitting_width(len(titles), gap=_GAP, most=200)
    figure = panel_figure([titles], x="Update", y="Mean Gate", width=width, height=160, gap=_GAP)
    _span_updates(figure, max(roles.recorded_at))
    figure.update_yaxes(range=(-0.03, 1.03), dtick=0.5)
    for column, gates in enumerate(roles.trajectories[:, roles.fitted].mean(dim=1), start=1):
        # The role with most heads is drawn first, so that it covers no other.
        for role in sorted(heads, key=lambda role: -len(heads[role])):
            for layer, head in heads[role]:
                values = gates[:, layer, head].tolist()
                add_line(
                    figure,
                    (1, column),
                    x=roles.recorded_at,
                    y=values,
                    colour=ROLE_COLOURS[role],
                    name=_NAMES[role],
                    hover=[(f"a{layer}.h{head}", f"gate {gate:.3f}") for gate in values],
                    width=THIN_CURVE_WEIGHT,
                    opacity=_CROWDED,
                )
    add_legend(figure)
    return GridFigure(figure, "Gates of heads by update")


def _span_updates(figure: Any, last: int, row: int | None = None) -> None:
    """Set horizontal axes from 0 to the last update, with a small margin."""
    last = max(last, 1)
    figure.update_xaxes(range=(-0.02 * last, 1.02 * last), **count_ticks(last), row=row)


def _add_curves(figure: Any, position: Position, curves: Sequence[AblationCurve]) -> None:
    order = list(ROLE_COLOURS)
    for curve in sorted(curves, key=lambda curve: order.index(curve.by)):
        _add_curve(figure, position, curve.by, curve.counts, curve.values, _n_in_role(curve))
    for curve in curves:
        if curve.control is not None:
            n = curve.counts[-1]
            return _add_curve(figure, position, "random", curve.counts, curve.control, n)


def _add_curve(
    figure: Any,
    position: Position,
    order: str,
    counts: Sequence[int],
    values: Float[Tensor, "seed count"],
    in_role: int,
) -> None:
    """Add the mean, in full colour while there are heads of the role, then thin and pale."""
    name = _NAMES[order]
    mean, low, high = (
        over_seeds.tolist()
        for over_seeds in (values.mean(dim=0), values.amin(dim=0), values.amax(dim=0))
    )
    hover = [
        (
            name,
            f"{count} ablated",
            f"{mean[index]:+.3f} nats",
            f"Range over seeds {low[index]:+.3f} to {high[index]:+.3f}",
        )
        for index, count in enumerate(counts)
    ]
    line: dict[str, Any] = {"colour": ROLE_COLOURS[order], "name": name}
    line["dashed"] = order == "random"
    end = bisect_right(counts, in_role) - 1
    inside, beyond = slice(0, end + 1), slice(end, len(counts))
    points = {"x": counts[inside], "y": mean[inside], "hover": hover[inside]}
    if end > 0:
        add_line(figure, position, **points, low=low[inside], high=high[inside], **line)
    points = {"x": counts[beyond], "y": mean[beyond], "hover": hover[beyond]}
    if end < len(counts) - 1:
        add_line(figure, position, **points, width=_PALE_WEIGHT, opacity=_PALE, **line)


def _vertical_span(curves: Sequence[AblationCurve]) -> tuple[float, float]:
    """A range with every mean and 0, and as much of the spread as leaves the means legible."""
    both = ((curve.values, curve.control) for curve in curves)
    values = [changes for pair in both for changes in pair if changes is not None]
    means = [mean for changes in values for mean in changes.mean(dim=0).tolist()]
    low, high = min(0.0, *means), max(0.0, *means)
    room, more = max(0.06 * (high - low), 0.01), 0.25 * (high - low)
    lowest = min(changes.min().item() for changes in values)
    highest = max(0.0, *(changes.max().item() for changes in values))
    return max(lowest, low - more) - room, min(highest, high + more) + room
