"""Curves: explained effect against the number of parts kept, effects of ablating heads, and the
trajectories of their gates.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np

from sparse_tl.arguments import Share, checked
from sparse_tl.circuits.curves import (
    EffectCurve,
    SeedCurves,
    multiplier_words,
    seed_multipliers,
)
from sparse_tl.head_roles import ROLES, AblationCurve, HeadRoles
from sparse_tl.plots.page import palette
from sparse_tl.plots.panels import grid

Parts = Literal["heads", "circuit_edges"]
Curves = Sequence[SeedCurves]

_GAP = 24
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
) -> grid.GridFigure:
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
    rows = grid.in_rows(list(panels))
    width = grid.fitting_width(len(rows[0]), gap=_GAP)
    unit = min(max(_UNIT, width / 2), (_MAX_HEIGHT - label_height) / (high - low))
    span = (low, high + label_height / unit)
    figure = grid.panel_figure(
        rows,
        x=f"Number of {'Edges' if parts == 'circuit_edges' else 'Heads'} Kept",
        y="Explained Effect",
        width=width,
        height=round(unit * (span[1] - span[0])),
        gap=_GAP,
    )
    figure.update_yaxes(range=span, dtick=0.5)
    inside = dict[tuple[str, ...], grid.Position]()  # the first panel of each pair of models
    has_room = True
    for (title, curves), position in zip(drawn.items(), grid.panel_positions(rows), strict=True):
        at = {"row": position[0], "col": position[1]}
        least, axis = _axis(curves, parts)
        if inside.setdefault(pairs[title], position) == position:
            has_room &= _has_room(curves, axis, width, low, unit)
        figure.update_xaxes(**axis, **at)
        for curve, colour in zip(
            curves, palette.MODEL_PAIRS[order.index(pairs[title])], strict=False
        ):
            _add_curve(figure, position, curve, colour, parts, least)
        reached = [curve.median.size_at(level) for curve in curves]
        sizes = sorted(max(size, least) for size in reached if size is not None)
        if len(sizes) == 2:
            line: dict[str, Any] = {
                "colour": palette.INK,
                "width": palette.RULE_WEIGHT,
                "dashed": True,
            }
            grid.add_line(figure, position, x=sizes, y=[level] * 2, **line)
        size = palette.LABEL_SIZE if len(curves[0].seeds) > 1 else palette.PANEL_TITLE_SIZE - 1
        for number, words in enumerate(reversed(labels[title])):
            y = span[1] - (label_height - number * _LABEL_HEIGHT) / unit
            place = {"x": 0.5, "xref": "x domain", "xanchor": "center", "y": y, "yanchor": "bottom"}
            figure.add_annotation(text=words, font={"size": size}, **place, **at)
    if has_room:
        for position in inside.values():
            grid.add_inner_legend(figure, position)
    else:
        grid.add_legend(figure)
    grid.add_notes(figure, _notes(drawn))
    return grid.GridFigure(figure, f"Explained Effect in {', '.join(panels)}")


def _axis(curves: Curves, parts: Parts) -> tuple[float, dict[str, Any]]:
    """A horizontal axis of numbers of parts: the size drawn at its start, and plotly's settings.

    A logarithmic axis starts at the largest power of ten up to the smallest size above 0 or, if 0
    was measured, at a position for 0 below that.
    """
    measured = sorted({n for seeds in curves for curve in seeds.curves for n in curve.sizes})
    ticks: dict[str, Any]
    if parts == "heads":
        start, stop, least = 0.0, max(float(measured[-1]), 1.0), 0.0
        ticks = {"type": "linear", **grid.count_ticks(stop)}
    else:
        first = len(str(next((size for size in measured if size > 0), 1))) - 1
        stop = max(math.log10(max(measured[-1], 1)), first + 1.0)
        start = first - min(max(_ASIDE, (stop - first) / 6), 0.9) * (measured[0] == 0)
        least = 10**start
        powers = range(first, math.floor(stop + 1e-9) + 1)
        labels = {10.0**power: "10" + str(power).translate(_SUPERSCRIPTS) for power in powers}
        labels = {least: "0"} | labels if measured[0] == 0 else labels
        ticks = {"type": "log", "tickvals": [*labels], "ticktext": [*labels.values()]}
    margin = 0.02 * (stop - start)  # so that no line is clipped
    # A curve that rises at the first head would look like an axis.
    return least, {
        "range": (start - (3 if parts == "heads" else 1) * margin, stop + margin),
        **ticks,
    }


def _has_room(
    curves: Curves, axis: Mapping[str, Any], width: float, low: float, unit: float
) -> bool:
    """Whether no curve is behind a legend at the lower right of a panel."""
    room, height = grid.legend_size([curve.name for curve in curves])
    start, stop = axis["range"]
    behind = np.linspace(stop - room / width * (stop - start), stop, 33)
    behind = 10**behind if axis["type"] == "log" else behind
    return room < width and all(
        np.interp(behind, one.sizes, ends).min() > low + height / unit
        for seeds in curves
        for one in seeds.curves
        for ends in (one.low if len(seeds.curves) == 1 else one.mean,)
    )


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
    if len(set(pairs.values())) > len(palette.MODEL_PAIRS):
        raise ValueError(
            f"a figure has colours for {len(palette.MODEL_PAIRS)} pairs of models; draw fewer"
        )
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


def _add_curve(
    figure: Any, at: grid.Position, seeds: SeedCurves, colour: str, parts: Parts, least: float
) -> None:
    """Add a curve with its interval, or the curves of all seeds with their median on top."""
    noun = parts.replace("_", " ")

    def add(curve: EffectCurve, heading: str, interval: str = "Interval", **style: Any) -> None:
        hover = [
            (
                heading,
                f"{size:,} {noun if size != 1 else noun[:-1]} kept",
                f"Explained effect {mean:.3f}",
                f"{interval} {low:.3f} to {high:.3f}",
            )
            for size, mean, low, high in zip(
                curve.sizes, curve.mean, curve.low, curve.high, strict=True
            )
        ]
        x = [max(size, least) for size in curve.sizes]
        grid.add_line(figure, at, x=x, y=curve.mean, hover=hover, colour=colour, **style)

    if len(seeds.curves) == 1:
        one = seeds.curves[0]
        add(one, one.name, low=one.low, high=one.high, name=one.name)
        return
    thin = {"width": _SEED_WEIGHT, "opacity": _SEED_OPACITY, "group": seeds.name}
    for seed, one in zip(seeds.seeds, seeds.curves, strict=True):
        add(one, f"{one.name}, seed {seed}", **thin)
    add(seeds.median, f"{seeds.name}, median of {len(seeds.seeds)} seeds", "Seeds", name=seeds.name)


# ---- ablation of heads -------------------------------------------------------------------------

_PALE, _PALE_WEIGHT = 0.45, 1.0
_CROWDED = 0.7
_NARROW = 18
"""Gap between panels of a grid."""
_IN_ROLE, _BEYOND = "In the role", "Beyond it"
_NAMES = {role: role.capitalize() for role in ROLES} | {"random": "Random"}


@checked
def ablation_grid(rows: Mapping[str, Mapping[str, Sequence[AblationCurve]]]) -> grid.GridFigure:
    """Draw the change in log-probability of the target response against ablated heads.

    One row of panels per task, with its own axes, and one column per model. Lines are means over
    seeds, with a shaded range. A line has full colour while heads of its role are ablated; after
    these, or if the role has no heads, it is thin and pale. A line ends when its
    model has no heads left. The first control of a panel is drawn as its random order. A panel that
    was not measured is left out.

    Args:
        rows: curves of each panel, by task title and then model title.

    Raises:
        ValueError: there is no row, or a panel has no curves.
    """
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    if not columns or not all(curves for row in rows.values() for curves in row.values()):
        raise ValueError("there is no task, or a panel has no curves")
    panels = [
        {name: _with_control(curves) for name, curves in row.items()} for row in rows.values()
    ]
    drawn = [list(chain(*row.values())) for row in panels]
    legend = _ablation_legend(list(chain(*drawn)))
    legend_width, legend_height = grid.legend_size(list(legend))
    beside = legend_width + grid.LINE + (grid.ROW_TITLE_WIDTH if any(rows) else 0)
    width = grid.fitting_width(len(columns), gap=_NARROW, beside=beside)
    least = legend_height if len(rows) == 1 else 0
    figure = grid.panel_figure(
        [columns, *[[""] * len(columns)] * (len(rows) - 1)],
        list(rows),
        x="",
        y="",
        width=width,
        height=min(max(140, width / 2, least), _MAX_HEIGHT),
        gap=_NARROW,
    )
    # Samples in full colour, even if the lines of the first panel are pale.
    for name, style in legend.items():
        grid.add_line(figure, (1, 1), x=[None], y=[None], name=name, **style)
    figure.update_yaxes(nticks=5)
    for number, (row, curves) in enumerate(zip(panels, drawn, strict=True), start=1):
        _span_updates(figure, max(curve.counts[-1] for curve in curves), row=number)
        for column, name in enumerate(columns, start=1):
            for curve in row.get(name, []):
                _add_ablation(figure, (number, column), curve)
    upwards = "\N{GREEK CAPITAL LETTER DELTA} Log Probability<br>of Target Response"
    grid.add_outer_titles(figure, "Number of Ablated Heads", upwards)
    grid.add_side_legend(figure)
    grid.add_notes(figure, _empty_roles(rows))
    title = f"Effect of ablating heads in {', '.join([*columns, *filter(None, rows)])}"
    return grid.GridFigure(figure, title)


def _empty_roles(rows: Mapping[str, Mapping[str, Sequence[AblationCurve]]]) -> Iterator[str]:
    """One note per role, listing the panels in which it has no heads."""
    for role in ROLES:
        panels = [
            f"{task}, {model}" if task else model
            for task, row in rows.items()
            for model, curves in row.items()
            if any(curve.by == role and _n_in_role(curve) == 0 for curve in curves)
        ]
        if panels:
            yield f"No heads of {role}: {'; '.join(panels)}."


def _with_control(curves: Sequence[AblationCurve]) -> list[AblationCurve]:
    """The curves in the order of the roles, and the first control as a curve of its own."""
    controls = [
        AblationCurve("random", curve.counts, curve.control, curve.in_role)
        for curve in curves
        if curve.control is not None
    ]
    order = list(palette.ROLES)
    return sorted([*curves, *controls[:1]], key=lambda curve: order.index(curve.by))


def _ablation_legend(curves: Sequence[AblationCurve]) -> dict[str, dict[str, Any]]:
    """Line styles by name: the orders of ablation, then full colour and pale."""
    used = {curve.by for curve in curves}
    styles: dict[str, dict[str, Any]] = {
        name: {"colour": palette.ROLES[order], "dashed": order == "random"}
        for order, name in _NAMES.items()
        if order in used
    }
    if any(_n_in_role(curve) < curve.counts[-1] for curve in curves):
        styles[_IN_ROLE] = {"colour": palette.INK}
        styles[_BEYOND] = {"colour": palette.INK, "width": _PALE_WEIGHT, "opacity": _PALE}
    return styles


def _n_in_role(curve: AblationCurve) -> int:
    """Number of heads in the role, mean over seeds; a random order takes them from all."""
    if curve.by == "random":
        return curve.counts[-1]
    return round(sum(curve.in_role) / len(curve.in_role))


@checked
def gate_trajectories(roles: HeadRoles) -> grid.GridFigure:
    """Draw each head's mean gate over seeds in the three stages, coloured by its strongest role."""
    strongest = roles.mean_scores().argmax(dim=0)
    heads = {role: (strongest == index).nonzero().tolist() for index, role in enumerate(ROLES)}
    heads = {role: members for role, members in heads.items() if members}
    titles = ["G0", "G+, pushed open", "G\N{MINUS SIGN}, pushed shut"]
    width = grid.fitting_width(len(titles), gap=_NARROW)
    figure = grid.panel_figure(
        [titles], x="Update", y="Mean Gate", width=width, height=160, gap=_NARROW
    )
    _span_updates(figure, max(roles.recorded_at))
    figure.update_yaxes(range=(-0.03, 1.03), dtick=0.5)
    for column, gates in enumerate(roles.trajectories[:, roles.fitted].mean(dim=1), start=1):
        # The role with most heads is drawn first, so that it covers no other.
        for role in sorted(heads, key=lambda role: -len(heads[role])):
            for layer, head in heads[role]:
                values = gates[:, layer, head].tolist()
                grid.add_line(
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
    grid.add_legend(figure)
    return grid.GridFigure(figure, "Gates of heads by update")


def _span_updates(figure: Any, last: int, row: int | None = None) -> None:
    """Set horizontal axes from 0 to the last update, with a small margin."""
    last = max(last, 1)
    figure.update_xaxes(range=(-0.02 * last, 1.02 * last), **grid.count_ticks(last), row=row)


def _add_ablation(figure: Any, position: grid.Position, curve: AblationCurve) -> None:
    """Add the mean, in full colour while there are heads of the role, then thin and pale."""
    name, counts, values = _NAMES[curve.by], curve.counts, curve.values
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
    line: dict[str, Any] = {"colour": palette.ROLES[curve.by], "name": name}
    line["dashed"] = curve.by == "random"
    end = bisect_right(counts, _n_in_role(curve)) - 1
    inside, beyond = slice(0, end + 1), slice(end, len(counts))
    points = {"x": counts[inside], "y": mean[inside], "hover": hover[inside]}
    if end > 0:
        grid.add_line(figure, position, **points, low=low[inside], high=high[inside], **line)
    points = {"x": counts[beyond], "y": mean[beyond], "hover": hover[beyond]}
    if end < len(counts) - 1:
        grid.add_line(figure, position, **points, width=_PALE_WEIGHT, opacity=_PALE, **line)
