"""Figure of explained effect against the number of parts kept: one panel per task.

1. Check the panels, and collect pairs of models, which share colours and a legend.
2. Give all panels the same effect range, with room for the multiplier above all curves.
3. Draw each curve with its interval, or the curves of all seeds and their median; and a dashed line
   between two curves at the level, with the multiplier above it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

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
from sparse_tl.plots.panels.grid import (
    GridFigure,
    Position,
    add_legend,
    add_line,
    add_notes,
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

    Raises:
        ValueError: there is no panel, a panel has no curve, more than two or two of one name,
            dense and sparse curves have different seeds, there are fewer colours than pairs of
            models, or an option is out of range.
    """
    drawn = {
        title: [c if isinstance(c, SeedCurves) else SeedCurves((0,), (c,)) for c in curves]
        for title, curves in panels.items()
    }
    pairs = _checked_pairs(drawn, colours)
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
        for curve, colour in zip(curves, colours[order.index(pairs[title])], strict=False):
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


def _checked_pairs(
    panels: Mapping[str, Curves], colours: Sequence[tuple[str, str]]
) -> dict[str, tuple[str, ...]]:
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
    n_pairs = len(set(pairs.values()))
    if n_pairs > len(colours):
        raise ValueError(
            f"there are {n_pairs} pairs of models, and {len(colours)} pairs of colours; pass "
            "colours=[(dense, sparse), ...] or draw fewer models"
        )
    for pair in colours:
        for colour in pair:
            channels(colour)  # raises if invalid
    return pairs


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
