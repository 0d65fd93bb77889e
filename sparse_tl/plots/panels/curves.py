"""Curves: explained effect against the number of parts kept, effects of ablating heads, and the
trajectories of their gates.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from torch import Tensor

from sparse_tl.calls.arguments import Share, checked
from sparse_tl.circuits.evaluation import (
    EffectCurve,
    SeedCurves,
    multiplier_words,
    seed_multipliers,
)
from sparse_tl.head_roles import ROLES, AblationCurve, HeadRoles
from sparse_tl.plots.page import palette
from sparse_tl.plots.page.palette import (
    INK,
    LABEL_SIZE,
    MODEL_PAIRS,
    PANEL_TITLE_SIZE,
    RULE_WEIGHT,
)
from sparse_tl.plots.page.token_text import text_width
from sparse_tl.plots.panels.grid import (
    LEFT_LINE,
    ROW_TITLE_WIDTH,
    GridFigure,
    Position,
    add_legend,
    add_line,
    add_notes,
    add_outer_titles,
    count_ticks,
    fitting_width,
    in_rows,
    panel_figure,
    panel_positions,
)

Parts = Literal["heads", "circuit_edges"]
Curves = Sequence[SeedCurves]

_GAP, _WIDEST = 24, 420
# Least number of pixels per unit of effect, and the maximum height of a plot.
_UNIT, _MAX_HEIGHT = 147, 300
# Height of a line of text above the curves, and the margin around them in units of effect.
_LABEL_HEIGHT, _MARGIN = 18, 0.04
# Line style of one seed among several.
_SEED_WEIGHT, _SEED_OPACITY = 1.0, 0.55
# Least distance of 0 from the first power of ten, in powers of ten.
_ASIDE = 0.5
# plotly's own superscripts are too small to read.
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@checked
def effect_figure(
    panels: Mapping[str, Sequence[EffectCurve | SeedCurves]],
    *,
    parts: Parts,
    level: Share = 0.9,
) -> GridFigure:
    """Draw the explained effect against the parts kept, one panel per task.

    Single curves are drawn with their intervals; several seeds are thin lines with a thick median.
    A dashed line at the level connects both models, with the multiplier above it; for several seeds
    its median and range, and the number of seeds that do not reach the level. There is no dashed
    line if a thick line does not reach the level. The logarithmic axis of circuit edges starts at a
    power of ten below all measured sizes, or has a tick for a size of 0.

    Args:
        panels: curves by panel title, one panel per task: the dense model's curve, or its
            `SeedCurves`, then the sparse model's; or those of a single model.
        parts: ``"heads"`` for a linear axis, ``"circuit_edges"`` for a logarithmic one.
        level: explained effect at which the models are compared, above 0 and at most 1.

    Raises:
        ValueError: there is no panel, a panel has no curve, more than two or two of one name,
            dense and sparse curves have different seeds, or there are more than two pairs of
            models.
    """
    drawn = {
        title: [c if isinstance(c, SeedCurves) else SeedCurves((0,), (c,)) for c in curves]
        for title, curves in panels.items()
    }
    pairs = _checked_pairs(drawn)
    labels = {title: _words(curves, level) for title, curves in drawn.items()}
    order = list(dict.fromkeys(pairs.values()))
    label_height = _LABEL_HEIGHT * max(1, *map(len, labels.values()))
    effects = [e for seeds in drawn.values() for curve in seeds for e in _drawn_ends(curve)]
    low, high = min(0, *effects) - _MARGIN, max(1, *effects) + _MARGIN
    rows = in_rows(list(panels))
    width = fitting_width(len(rows[0]), gap=_GAP, most=_WIDEST)
    unit = min(max(_UNIT, width / 2), (_MAX_HEIGHT - label_height) / (high - low))
    span = (low, high + label_height / unit)
    figure = panel_figure(
        rows,
        x=f"Number of {'Edges' if parts == 'circuit_edges' else 'Heads'} Kept",
        y="Explained Effect",
        width=width,
        height=round(unit * (span[1] - span[0])),
        gap=_GAP,
    )
    figure.update_yaxes(range=span, dtick=0.5)
    positions = dict(zip(drawn, panel_positions(rows), strict=True))
    axes = {title: _Axis.of(curves, parts) for title, curves in drawn.items()}
    for title, curves in drawn.items():
        (row, column), axis = positions[title], axes[title]
        figure.update_xaxes(**axis.layout(), row=row, col=column)
        for curve, colour in zip(curves, MODEL_PAIRS[order.index(pairs[title])], strict=False):
            _add_curve(figure, positions[title], curve, colour, axis)
        reached = [curve.median.size_at(level) for curve in curves]
        sizes = sorted(max(size, axis.least) for size in reached if size is not None)
        middle = (axis.start + axis.stop) / 2
        if len(sizes) == 2:
            line: dict[str, Any] = {"colour": INK, "width": RULE_WEIGHT, "dashed": True}
            add_line(figure, positions[title], x=sizes, y=[level] * 2, **line)
            middle = float(axis.positions(sizes).mean())
        for number, words in enumerate(reversed(labels[title])):
            size = LABEL_SIZE if len(curves[0].seeds) > 1 else PANEL_TITLE_SIZE - 1
            half = text_width(words, size) / width / 2 * (axis.stop - axis.start)
            right = max(axis.stop - half, (axis.start + axis.stop) / 2)
            figure.add_annotation(
                text=words,
                font={"size": size},
                x=min(max(middle, axis.start + half), right),
                xanchor="center",
                y=span[1] - (label_height - number * _LABEL_HEIGHT) / unit,
                yanchor="bottom",
                row=row,
                col=column,
            )
    add_legend(figure)
    add_notes(figure, _notes(drawn))
    return GridFigure(figure, f"Explained Effect in {', '.join(panels)}")


@dataclass(frozen=True)
class _Axis:
    """A horizontal axis of numbers of parts, linear or logarithmic.

    Args:
        parts: what is counted.
        start, stop: its ends, without margin. A logarithmic axis starts at the largest power of ten
            up to the smallest size above 0 or, if 0 was measured, at a position for 0 below that.
    """

    parts: Parts
    start: float
    stop: float

    @classmethod
    def of(cls, curves: Curves, parts: Parts) -> _Axis:
        measured = sorted({n for seeds in curves for curve in seeds.curves for n in curve.sizes})
        if parts == "heads":
            return cls(parts, 0.0, max(float(measured[-1]), 1.0))
        first = len(str(next((size for size in measured if size > 0), 1))) - 1
        stop = max(math.log10(max(measured[-1], 1)), first + 1.0)
        aside = min(max(_ASIDE, (stop - first) / 6), 0.9)
        return cls(parts, first - aside * (measured[0] == 0), stop)

    @property
    def log(self) -> bool:
        return self.parts == "circuit_edges"

    @property
    def least(self) -> float:
        """The size that is drawn at the start."""
        return 10**self.start if self.log else 0.0

    def positions(self, sizes: Sequence[float]) -> np.ndarray:
        """Positions of sizes, in units of `start` and `stop`."""
        values = np.maximum(sizes, self.least)
        return np.log10(values) if self.log else values

    def layout(self) -> dict[str, Any]:
        """Range, and ticks at round numbers, or at 0 and powers of ten."""
        # With a margin at both ends, so that no line is clipped.
        margin = 0.02 * (self.stop - self.start)
        ends = (self.start - margin, self.stop + margin)
        if not self.log:
            return {"type": "linear", "range": ends, **count_ticks(self.stop)}
        powers = range(math.ceil(self.start), math.floor(self.stop + 1e-9) + 1)
        labels = {10.0**power: "10" + str(power).translate(_SUPERSCRIPTS) for power in powers}
        if self.start < powers[0]:
            labels = {self.least: "0", **labels}
        return {"type": "log", "range": ends, "tickvals": [*labels], "ticktext": [*labels.values()]}


def _checked_pairs(panels: Mapping[str, Curves]) -> dict[str, tuple[str, ...]]:
    """The names of the models in each panel."""
    if not panels:
        raise ValueError('there is no panel; pass {"IOI": [dense, sparse]}')
    pairs = {title: tuple(curve.name for curve in curves) for title, curves in panels.items()}
    for title, names in pairs.items():
        if len(names) not in (1, 2) or len(set(names)) != len(names):
            raise ValueError(
                f"panel {title!r} is for a dense and a sparse curve with different names; got "
                f"{list(names)}; draw other models in separate panels"
            )
    if len(set(pairs.values())) > len(MODEL_PAIRS):
        raise ValueError(f"a figure has colours for {len(MODEL_PAIRS)} pairs of models; draw fewer")
    return pairs


def _words(curves: Curves, level: float) -> tuple[str, ...]:
    """The text above the dashed line, line by line."""
    if len(curves) != 2:
        return ()
    ratios = seed_multipliers(*curves, level=level)
    # For a single seed, the missing dashed line shows that the level is not reached.
    return () if len(ratios) == 1 and ratios.isna().all() else multiplier_words(ratios)


def _notes(panels: Mapping[str, Curves]) -> list[str]:
    """An explanation of the lines, if there are several seeds."""
    counts = sorted({len(curve.seeds) for curves in panels.values() for curve in curves})
    if counts[-1] == 1:
        return []
    notes = [f"{' or '.join(map(str, counts))} seeds: thin; their median: thick."]
    if any(len(curves) == 2 for curves in panels.values()):
        notes.append("Multipliers: median (range).")
    return notes


def _drawn_ends(curve: SeedCurves) -> Iterator[float]:
    """All effects to draw: a single curve with its interval, or the curves of all seeds."""
    for one in curve.curves:
        yield from one.mean
        if len(curve.curves) == 1:
            yield from (*one.low, *one.high)


def _add_curve(figure: Any, at: Position, seeds: SeedCurves, colour: str, axis: _Axis) -> None:
    """Add a curve with its interval, or the curves of all seeds with their median on top."""
    line: dict[str, Any] = {"colour": colour, "axis": axis}
    if len(seeds.curves) == 1:
        one = seeds.curves[0]
        style = {"low": one.low, "high": one.high, "name": one.name}
        return _add_line(figure, at, one, one.name, "Interval", **line, **style)
    thin = {"width": _SEED_WEIGHT, "opacity": _SEED_OPACITY, "group": seeds.name}
    for seed, one in zip(seeds.seeds, seeds.curves, strict=True):
        _add_line(figure, at, one, f"{one.name}, seed {seed}", "Interval", **line, **thin)
    heading = f"{seeds.name}, median of {len(seeds.seeds)} seeds"
    _add_line(figure, at, seeds.median, heading, "Seeds", **line, name=seeds.name)


def _add_line(
    figure: Any,
    at: Position,
    curve: EffectCurve,
    heading: str,
    interval: str,
    axis: _Axis,
    **style: Any,
) -> None:
    """Add one line with the tooltips of its points."""
    what = axis.parts.replace("_", " ")
    rows = zip(curve.sizes, curve.mean, curve.low, curve.high, strict=True)
    hover = [
        (
            heading,
            f"{size:,} {what if size != 1 else what[:-1]} kept",
            f"Explained effect {mean:.3f}",
            f"{interval} {low:.3f} to {high:.3f}",
        )
        for size, mean, low, high in rows
    ]
    x = [max(size, axis.least) for size in curve.sizes]
    add_line(figure, at, x=x, y=curve.mean, hover=hover, **style)


# ---- ablation of heads -------------------------------------------------------------------------

_PALE, _PALE_WEIGHT = 0.45, 1.0
_CROWDED = 0.7
_NARROW = 18
"""Gap between panels of a grid."""
_WIDEST_ABLATION = 400
_IN_ROLE, _BEYOND = "In the role", "Beyond it"
_NAMES = {role: role.capitalize() for role in ROLES} | {"random": "Random"}


@checked
def ablation_grid(rows: Mapping[str, Mapping[str, Sequence[AblationCurve]]]) -> GridFigure:
    """Draw the change in log-probability of the target response against ablated heads.

    One row of panels per task, with its own axes, and one column per model. Lines are means over
    seeds, with a shaded range. A line has full colour while heads of its role are ablated; after
    these, or if the role has no heads, it is thin and pale. A line ends when its
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
    width = fitting_width(len(columns), gap=_NARROW, most=_WIDEST_ABLATION, beside=beside)
    figure = panel_figure(
        [columns, *[[""] * len(columns)] * (len(rows) - 1)],
        list(rows),
        x="",
        y="",
        width=width,
        height=max(140, width / 2),
        gap=_NARROW,
    )
    # Samples in full colour, even if the lines of the first panel are pale.
    for name, style in _ablation_legend(every).items():
        add_line(figure, (1, 1), x=[None], y=[None], name=name, **style)
    for number, row in enumerate(rows.values(), start=1):
        drawn = [curve for curves in row.values() for curve in curves]
        _span_updates(figure, max(curve.counts[-1] for curve in drawn), row=number)
        span = _vertical_span(drawn)
        figure.update_yaxes(range=span, nticks=5, row=number)
        for column, name in enumerate(columns, start=1):
            if name in row:
                _add_ablations(figure, (number, column), row[name])
            else:
                _add_missing(figure, number, column)
    upwards = "\N{GREEK CAPITAL LETTER DELTA} Log Probability<br>of Target Response"
    add_outer_titles(figure, "Number of Ablated Heads", upwards)
    add_legend(figure)
    title = f"Effect of ablating heads in {', '.join([*columns, *filter(None, rows)])}"
    return GridFigure(figure, title)


def _ablation_legend(curves: Sequence[AblationCurve]) -> dict[str, dict[str, Any]]:
    """Line styles by name: the orders of ablation, then full colour and pale."""
    used = {curve.by for curve in curves}
    used |= {"random"} if any(curve.control is not None for curve in curves) else set()
    styles: dict[str, dict[str, Any]] = {
        name: {"colour": palette.ROLES[order], "dashed": order == "random"}
        for order, name in _NAMES.items()
        if order in used
    }
    if any(_n_in_role(curve) < curve.counts[-1] for curve in curves):
        styles[_IN_ROLE] = {"colour": INK}
        styles[_BEYOND] = {"colour": INK, "width": _PALE_WEIGHT, "opacity": _PALE}
    return styles


def _n_in_role(curve: AblationCurve) -> int:
    """Number of heads in the role, mean over seeds."""
    return round(sum(curve.in_role) / len(curve.in_role))


def _add_missing(figure: Any, row: int, column: int) -> None:
    # Plotly draws no axes without a trace.
    figure.add_scatter(x=[], y=[], showlegend=False, row=row, col=column)
    centre = {"xref": "x domain", "yref": "y domain", "x": 0.5, "y": 0.5}
    centre |= {"xanchor": "center", "yanchor": "middle"}
    font = {"size": LABEL_SIZE, "color": palette.MUTED}
    figure.add_annotation(text="not measured", font=font, row=row, col=column, **centre)


@checked
def gate_trajectories(roles: HeadRoles) -> GridFigure:
    """Draw each head's mean gate over seeds in the three stages, coloured by its strongest role."""
    strongest = roles.mean_scores().argmax(dim=0)
    heads = {role: (strongest == index).nonzero().tolist() for index, role in enumerate(ROLES)}
    heads = {role: members for role, members in heads.items() if members}
    titles = ["G0", "G+, pushed open", "G\N{MINUS SIGN}, pushed shut"]
    width = fitting_width(len(titles), gap=_NARROW, most=200)
    figure = panel_figure([titles], x="Update", y="Mean Gate", width=width, height=160, gap=_NARROW)
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
                    colour=palette.ROLES[role],
                    name=_NAMES[role],
                    hover=[(f"a{layer}.h{head}", f"gate {gate:.3f}") for gate in values],
                    width=palette.THIN_CURVE_WEIGHT,
                    opacity=_CROWDED,
                )
    add_legend(figure)
    return GridFigure(figure, "Gates of heads by update")


def _span_updates(figure: Any, last: int, row: int | None = None) -> None:
    """Set horizontal axes from 0 to the last update, with a small margin."""
    last = max(last, 1)
    figure.update_xaxes(range=(-0.02 * last, 1.02 * last), **count_ticks(last), row=row)


def _add_ablations(figure: Any, position: Position, curves: Sequence[AblationCurve]) -> None:
    order = list(palette.ROLES)
    for curve in sorted(curves, key=lambda curve: order.index(curve.by)):
        _add_ablation(figure, position, curve.by, curve.counts, curve.values, _n_in_role(curve))
    for curve in curves:
        if curve.control is not None:
            n = curve.counts[-1]
            return _add_ablation(figure, position, "random", curve.counts, curve.control, n)


def _add_ablation(
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
    line: dict[str, Any] = {"colour": palette.ROLES[order], "name": name}
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
