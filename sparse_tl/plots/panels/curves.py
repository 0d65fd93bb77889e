"""Figure of explained effect against the number of parts kept: one panel per task.

1. Check the panels, and collect pairs of models, which share colours and a legend.
2. Give all panels the same effect range, with room for the multiplier above all curves.
3. Draw each curve with its interval, or the curves of all seeds and their median; and a dashed line
   between two curves at the level, with the multiplier above it.
4. Put legends inside panels if they hide no curve there, or else below all panels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go

from sparse_tl.calls.arguments import Share, checked
from sparse_tl.circuits.effect import EffectCurve, SeedCurves, seed_multipliers
from sparse_tl.plots.page.palette import (
    INK,
    LABEL_SIZE,
    MODEL_PAIRS,
    PANEL_TITLE_SIZE,
    RULE_WEIGHT,
    channels,
)
from sparse_tl.plots.page.token_text import text_width
from sparse_tl.plots.panels.effect_axis import axis_positions, axis_ticks, extent
from sparse_tl.plots.panels.grid_figure import GridFigure
from sparse_tl.plots.panels.legends import (
    add_legend,
    add_legend_below,
    add_notes,
    legend_height,
    legend_width,
)
from sparse_tl.plots.panels.plotly_panels import (
    add_line,
    fitting_width,
    in_rows,
    panel_figure,
    panel_positions,
    ticks,
)

Parts = Literal["heads", "circuit_edges"]

_GAP, _WIDEST = 54, 240
# Pixels per unit of effect, and the maximum height of a plot.
_UNIT, _MAX_HEIGHT = 147, 300
# Height of a line of text above the curves, and the margin around them in units of effect.
_LABEL_HEIGHT, _MARGIN = 18, 0.04
# Line style of one seed among several.
_SEED_WEIGHT, _SEED_OPACITY = 1.0, 0.55

Curves = Sequence[SeedCurves]


@checked
def effect_figure(
    panels: Mapping[str, Sequence[EffectCurve | SeedCurves]],
    *,
    parts: Parts,
    level: Share = 0.9,
    colours: Sequence[tuple[str, str]] = MODEL_PAIRS,
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
        colours: (dense, sparse) for each pair of models in order of appearance, as ``"#rrggbb"``.

    Returns:
        The figure; call its `save` to write it to a file.

    Raises:
        ValueError: there is no panel, a panel has no curve, more than two or two of one name,
            dense and sparse curves have different seeds, there are fewer colours than pairs of
            models, or an option is out of range.
    """
    drawn = {title: [_of_seeds(curve) for curve in curves] for title, curves in panels.items()}
    pairs = _checked_pairs(drawn, colours)
    labels = {title: _words(curves, level) for title, curves in drawn.items()}
    log = parts == "circuit_edges"
    order = list(dict.fromkeys(pairs.values()))
    label_height = _LABEL_HEIGHT * max(1, *map(len, labels.values()))
    effects = [e for seeds in drawn.values() for curve in seeds for e in _drawn_ends(curve)]
    low, high = min(0, *effects) - _MARGIN, max(1, *effects) + _MARGIN
    unit = min(_UNIT, (_MAX_HEIGHT - label_height) / (high - low))
    span = (low, high + label_height / unit)
    rows = in_rows(list(panels))
    width = fitting_width(len(rows[0]), gap=_GAP, most=_WIDEST)
    figure = panel_figure(
        rows,
        x=f"Number of {'Edges' if log else 'Heads'} Kept",
        y="Explained Effect",
        width=width,
        height=round(unit * (span[1] - span[0])),
        gap=_GAP,
        shared=False,
    )
    figure.update_yaxes(range=span, **ticks(0, 1, 2))
    for position, (title, curves) in zip(panel_positions(rows), drawn.items(), strict=True):
        start, stop = extent(curves, log)
        # With a margin at both ends, so that no line is clipped.
        margin = 0.02 * (stop - start)
        least = 10**start if log else 0.0
        figure.update_xaxes(
            type="log" if log else "linear",
            range=(start - margin, stop + margin),
            **axis_ticks(start, stop, log),
            row=position[0],
            col=position[1],
        )
        for curve, colour in zip(curves, colours[order.index(pairs[title])], strict=False):
            _add_curve(figure, position, curve, colour, parts, least)
        reached = (curve.median.size_at(level) for curve in curves)
        sizes = sorted(max(size, least) for size in reached if size is not None)
        if len(sizes) == 2:
            line = {"x": sizes, "y": [level] * 2, "width": RULE_WEIGHT, "dashed": True}
            add_line(figure, *position, colour=INK, **line)
        middle = (
            float(axis_positions(sizes, start, log).mean())
            if len(sizes) == 2
            else (start + stop) / 2
        )
        for number, words in enumerate(reversed(labels[title])):
            size = LABEL_SIZE if len(curves[0].seeds) > 1 else PANEL_TITLE_SIZE - 1
            half = text_width(words, size) / width / 2 * (stop - start)
            figure.add_annotation(
                text=words,
                font={"size": size},
                x=min(max(middle, start + half), max(stop - half, (start + stop) / 2)),
                xanchor="center",
                y=span[1] - (label_height - number * _LABEL_HEIGHT) / unit,
                yanchor="bottom",
                row=position[0],
                col=position[1],
            )
    # The legend of a pair appears in its first panel only.
    first = {names: title for title, names in reversed(pairs.items())}
    with_legend = [drawn[title] for title in first.values()]
    if all(_has_room(curves, log, width, low, unit) for curves in with_legend):
        for position, title in zip(panel_positions(rows), drawn, strict=True):
            if first[pairs[title]] == title:
                add_legend(figure, *position)
    else:
        add_legend_below(figure)
    add_notes(figure, _notes(drawn))
    return GridFigure(figure, f"Explained Effect in {', '.join(panels)}")


def _of_seeds(curve: EffectCurve | SeedCurves) -> SeedCurves:
    return curve if isinstance(curve, SeedCurves) else SeedCurves((0,), (curve,))


def _words(curves: Curves, level: float) -> tuple[str, ...]:
    """The text above the dashed line, line by line."""
    if len(curves) != 2:
        return ()
    ratios = seed_multipliers(*curves, level=level)
    # For a single seed, the missing dashed line shows that the level is not reached.
    return () if len(ratios.seeds) == len(ratios.missing) == 1 else ratios.words()


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


def _has_room(curves: Curves, log: bool, width: float, low: float, unit: float) -> bool:
    """Whether no curve is behind a legend at the lower right of a panel."""
    start, stop = extent(curves, log)
    share = legend_width(curve.name for curve in curves) / width
    behind = np.linspace(stop - share * (stop - start), stop, 33)
    top = low + legend_height(len(curves)) / unit
    return share < 1 and all(
        np.interp(behind, axis_positions(one.sizes, start, log), ends).min() > top
        for seeds in curves
        for one in seeds.curves
        for ends in (one.low if len(seeds.curves) == 1 else one.mean,)
    )


def _checked_pairs(
    panels: Mapping[str, Curves], colours: Sequence[tuple[str, str]]
) -> dict[str, tuple[str, ...]]:
    """The names of the models in each panel."""
    if not panels:
        raise ValueError('expected at least one panel; got none; pass {"IOI": [dense, sparse]}')
    pairs = {title: tuple(curve.name for curve in curves) for title, curves in panels.items()}
    for title, names in pairs.items():
        if len(names) not in (1, 2) or len(set(names)) != len(names):
            raise ValueError(
                f"expected a dense and a sparse curve with different names in panel {title!r}; got "
                f"{list(names)}; draw other models in separate panels"
            )
    n_pairs = len(set(pairs.values()))
    if n_pairs > len(colours):
        raise ValueError(
            f"expected colours for {n_pairs} pairs of models; got {len(colours)}; pass "
            "colours=[(dense, sparse), ...] or draw fewer models"
        )
    for pair in colours:
        for colour in pair:
            channels(colour)  # raises if invalid
    return pairs


def _add_curve(
    figure: go.Figure,
    position: tuple[int, int],
    seeds: SeedCurves,
    colour: str,
    parts: Parts,
    least: float,
) -> None:
    """Add a curve with its interval, or the curves of all seeds with their median on top."""
    if len(seeds.curves) == 1:
        one = seeds.curves[0]
        style = {"low": one.low, "high": one.high, "name": one.name}
        return _add_line(figure, position, one, colour, parts, least, one.name, "Interval", **style)
    thin = {"width": _SEED_WEIGHT, "opacity": _SEED_OPACITY, "group": seeds.name}
    for seed, one in zip(seeds.seeds, seeds.curves, strict=True):
        heading = f"{one.name}, seed {seed}"
        _add_line(figure, position, one, colour, parts, least, heading, "Interval", **thin)
    heading = f"{seeds.name}, median of {len(seeds.seeds)} seeds"
    median = seeds.median
    _add_line(figure, position, median, colour, parts, least, heading, "Seeds", name=seeds.name)


def _add_line(
    figure: go.Figure,
    position: tuple[int, int],
    curve: EffectCurve,
    colour: str,
    parts: Parts,
    least: float,
    heading: str,
    interval: str,
    **style: Any,
) -> None:
    """Add one line with the tooltips of its points."""
    what = parts.replace("_", " ")
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
    x = [max(size, least) for size in curve.sizes]
    add_line(figure, *position, x=x, y=curve.mean, colour=colour, hover=hover, **style)
