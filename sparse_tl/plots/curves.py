"""The figure of explained effect against the number of parts kept: one panel per task.

1. Check the panels, and find the pairs of models, which share colours and a legend.
2. Give all panels one range of effects, with room for the multiplier and, where a legend would
   hide a curve, for the legend.
3. Draw each curve with its interval, a dashed line where two curves reach the level, and over it
   the multiplier.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from sparse_tl.circuits.effect import EffectCurve, check_level, multiplier
from sparse_tl.plots.grid import Axis, Grid, Line, Note, Panel
from sparse_tl.plots.grid_figure import GridFigure
from sparse_tl.plots.palette import INK, MODEL_PAIRS

Parts = Literal["heads", "circuit_edges"]

_WIDTH, _GAP = 184, 66
# Pixels per unit of effect, and the height at which a plot stops growing.
_UNIT, _MAX_HEIGHT = 147, 300
# The room that texts take in a plot, in pixels.
_LABEL_WIDTH, _LABEL_HEIGHT, _LEGEND_WIDTH, _LEGEND_HEIGHT = 48, 19, 140, 46
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")

Curves = Sequence[EffectCurve]


def effect_figure(
    panels: Mapping[str, Curves],
    *,
    parts: Parts,
    level: float = 0.9,
    colours: Sequence[tuple[str, str]] = MODEL_PAIRS,
) -> GridFigure:
    """Draw the explained effect against the parts kept, one panel per task in a row.

    A dashed line at the level leads from one curve's size at the level to the other's; above it
    stands the multiplier. It is left out where a curve does not reach the level. On the
    logarithmic axis of circuit edges, a size of 0 stands at 1.

    Args:
        panels: for each task, by the title of its panel, the dense model's curve and then the
            sparse one's, or a single curve.
        parts: ``"heads"`` for a linear axis, ``"circuit_edges"`` for a logarithmic one.
        level: explained effect at which the models are compared, above 0 and at most 1.
        colours: (dense, sparse) for each pair of models in order of appearance, as ``"#rrggbb"``.

    Returns:
        The figure; its `save` writes it to a file.

    Raises:
        ValueError: if there is no panel, a panel has no curve, more than two or two of one name,
            there are more pairs of models than colours, or an option is out of range.
    """
    check_level(level)
    pairs = _checked_pairs(panels, parts, colours)
    scale = _Scale(parts == "circuit_edges")
    # The legend of a pair stands in its first panel only.
    first = {names: title for title, names in reversed(pairs.items())}
    order = list(dict.fromkeys(pairs.values()))
    span = _effect_span(panels, first.values(), scale)
    height = min(_UNIT * (span[1] - span[0]), _MAX_HEIGHT)
    drawn = []
    for title, curves in panels.items():
        own = colours[order.index(pairs[title])]
        listed = first[pairs[title]] == title
        lines = [
            _line(curve, colour, scale, parts, listed)
            for curve, colour in zip(curves, own, strict=False)
        ]
        x = scale.axis(curves)
        ratio = multiplier(*curves, level=level) if len(curves) == 2 else None
        note = None
        if ratio is not None:
            ends = sorted(s for curve in curves if (s := curve.size_at(level)) is not None)
            said = f"multiplier at {level:g}"
            lines.append(Line(said, ends, [level] * 2, INK, width=1.4, dashed=True))
            note = Note(f"{ratio:.1f}x", *_note_place(curves, scale, x, span, height, ends, level))
        y = Axis("Explained Effect", span, {0: "0.0", 0.5: "0.5", 1: "1.0"})
        drawn.append(Panel(x, y, title, tuple(lines), note=note))
    said = f"Explained Effect in {', '.join(panels)}"
    return GridFigure(
        Grid([drawn], said, width=_WIDTH, height=round(height), gap=_GAP, side_legend=False)
    )


@dataclass(frozen=True)
class _Scale:
    """How sizes are spread over the axis."""

    log: bool

    def value(self, size: float) -> float:
        """The size as it is drawn."""
        return max(size, 1) if self.log else size

    def place(self, size: float) -> float:
        """Where a size stands, in the unit of the axis's span."""
        return math.log10(max(size, 1)) if self.log else float(size)

    def ends(self, curves: Curves) -> tuple[float, float]:
        """Of the axis, without margins."""
        sizes = [size for curve in curves for size in curve.sizes]
        if not self.log:
            return 0.0, float(max(*sizes, 1))
        low = math.floor(self.place(min(sizes)))
        return low, max(self.place(max(sizes)), low + 1)

    def axis(self, curves: Curves) -> Axis:
        """Of a panel with these curves; a little room at its ends, where no line is cut in half."""
        start, stop = self.ends(curves)
        margin = 0.02 * (stop - start)
        ticks = _log_ticks(start, stop) if self.log else _linear_ticks(round(stop))
        title = f"Number of {'Edges' if self.log else 'Heads'} Kept"
        return Axis(title, (start - margin, stop + margin), ticks, log=self.log)

    def between(
        self, curve: EffectCurve, effects: Sequence[float], start: float, stop: float
    ) -> list[float]:
        """The effects that a line has between two places, where it is drawn at all."""
        places = [self.place(size) for size in curve.sizes]
        wanted = np.linspace(start, stop, 33)
        drawn = wanted[(wanted >= places[0]) & (wanted <= places[-1])]
        return np.interp(drawn, places, effects).tolist()


def _checked_pairs(
    panels: Mapping[str, Curves], parts: str, colours: Sequence[tuple[str, str]]
) -> dict[str, tuple[str, ...]]:
    """The names of the models in each panel."""
    if parts not in get_args(Parts):
        raise ValueError(f"expected parts 'heads' or 'circuit_edges'; got {parts!r}")
    if not panels:
        raise ValueError('expected at least one panel; got none; pass {"IOI": [dense, sparse]}')
    pairs = {title: tuple(curve.name for curve in curves) for title, curves in panels.items()}
    for title, names in pairs.items():
        if len(names) not in (1, 2) or len(set(names)) != len(names):
            raise ValueError(
                f"expected a dense and a sparse curve, of different names, in panel {title!r}; got "
                f"{list(names)}; draw other models in panels of their own"
            )
    n_pairs = len(set(pairs.values()))
    if n_pairs > len(colours):
        raise ValueError(
            f"expected colours for {n_pairs} pairs of models; got {len(colours)}; pass "
            "colours=[(dense, sparse), ...] or draw fewer models"
        )
    for colour in (colour for pair in colours for colour in pair):
        digits = colour[1:].lower()
        if len(colour) != 7 or colour[0] != "#" or set(digits) - set("0123456789abcdef"):
            raise ValueError(f"expected colours like '#0072b2'; got {colour!r}")
    return pairs


def _effect_span(
    panels: Mapping[str, Curves], with_legend: Iterable[str], scale: _Scale
) -> tuple[float, float]:
    effects = [effect for curves in panels.values() for curve in curves for effect in curve.mean]
    low, high = min(0, *effects), max(1, *effects)
    # What stands where a legend at the lower right would stand.
    lowest = 1.0
    for curves in (panels[title] for title in with_legend):
        start, stop = scale.ends(curves)
        left = stop - _LEGEND_WIDTH / _WIDTH * (stop - start)
        for curve in curves:
            lowest = min(lowest, *scale.between(curve, curve.low, left, stop), 1.0)
    hidden = lowest < low - 0.05 + _LEGEND_HEIGHT / _UNIT
    room = _LEGEND_HEIGHT / _UNIT if hidden else 0.05
    return low - room, high + 0.03 + _LABEL_HEIGHT / _UNIT


def _note_place(
    curves: Curves,
    scale: _Scale,
    x: Axis,
    span: tuple[float, float],
    height: float,
    ends: Sequence[float],
    level: float,
) -> tuple[float, float]:
    """Where the multiplier stands: over the middle of its dashed line, clear of the curves."""
    start, stop = x.span
    half = _LABEL_WIDTH / _WIDTH / 2 * (stop - start)
    middle = sum(map(scale.place, ends)) / len(ends)
    middle = min(max(middle, start + half), stop - half)
    heights = [level]
    for curve in curves:
        for effects in (curve.mean, curve.high):
            heights += scale.between(curve, effects, middle - half, middle + half)
    unit = height / (span[1] - span[0])
    return middle, min(max(heights) + 2 / unit, span[1] - _LABEL_HEIGHT / unit)


def _line(curve: EffectCurve, colour: str, scale: _Scale, parts: Parts, listed: bool) -> Line:
    what = parts.replace("_", " ")
    rows = zip(curve.sizes, curve.mean, curve.low, curve.high, strict=True)
    hover = [
        (
            curve.name,
            f"{size:,} {what if size != 1 else what[:-1]} kept",
            f"Explained effect {mean:.3f}",
            f"Interval {low:.3f} to {high:.3f}",
        )
        for size, mean, low, high in rows
    ]
    x = [scale.value(size) for size in curve.sizes]
    return Line(curve.name, x, curve.mean, colour, curve.low, curve.high, hover, listed=listed)


def _linear_ticks(largest: int) -> dict[float, str]:
    # 1, 2, 2.5 and 5 times a power of ten, but no half of a head.
    steps = (
        factor * 10**power // 10
        for power in range(len(str(largest)) + 1)
        for factor in (10, 20, 25, 50)
        if power or factor != 25
    )
    step = next(step for step in steps if largest <= 5 * step)
    return {tick: str(tick) for tick in range(0, largest + 1, step)}


def _log_ticks(start: float, stop: float) -> dict[float, str]:
    powers = range(math.floor(start), math.floor(stop + 1e-9) + 1)
    return {10**power: "10" + str(power).translate(_SUPERSCRIPTS) for power in powers}
