"""Figure of explained effect against the number of parts kept: one panel per task.

1. Check the panels, and find the pairs of models, which share colours and a legend.
2. Give all panels the same effect range, with room for the multiplier and for legends that would
   hide a curve.
3. Draw each curve with its interval, or the curves of all seeds and their median; and a dashed line
   between two curves at the level, with the multiplier above it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import plotly.graph_objects as go

from sparse_tl.circuits.effect import EffectCurve, check_level
from sparse_tl.circuits.seeds import SeedCurves, seed_multipliers
from sparse_tl.plots.grid_figure import GridFigure
from sparse_tl.plots.palette import (
    INK,
    LABEL_SIZE,
    MODEL_PAIRS,
    PANEL_TITLE_SIZE,
    RULE_WEIGHT,
    TICK_SIZE,
    channels,
)
from sparse_tl.plots.panels import add_legend, add_line, panel_figure, ticks
from sparse_tl.plots.token_text import text_width

Parts = Literal["heads", "circuit_edges"]

_WIDTH, _GAP = 184, 66
# Pixels per unit of effect, and the maximum height of a plot.
_UNIT, _MAX_HEIGHT = 147, 300
# Space for texts in a plot, in pixels.
_LABEL_HEIGHT, _LEGEND_WIDTH, _LEGEND_HEIGHT, _NOTE_HEIGHT = 19, 140, 46, 18
# Line style of one seed among several.
_SEED_WEIGHT, _SEED_OPACITY = 1.0, 0.55
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")

Curves = Sequence[SeedCurves]


def effect_figure(
    panels: Mapping[str, Sequence[EffectCurve | SeedCurves]],
    *,
    parts: Parts,
    level: float = 0.9,
    colours: Sequence[tuple[str, str]] = MODEL_PAIRS,
) -> GridFigure:
    """Draw the explained effect against the parts kept, in a row with one panel per task.

    Single curves are drawn with their intervals; several seeds are thin lines with a thick median.
    A dashed line at the level connects both models, and above it is the multiplier; for several
    seeds its median and range, and the number of seeds that miss the level. The dashed line is
    left out if a thick line does not reach the level. The logarithmic axis of circuit edges starts
    at 1, where a size of 0 is drawn too.

    Args:
        panels: curves by panel title, one panel per task: the dense model's curve, or those of its
            seeds, then the sparse model's; or a single model's.
        parts: ``"heads"`` for a linear axis, ``"circuit_edges"`` for a logarithmic one.
        level: explained effect at which the models are compared, above 0 and at most 1.
        colours: (dense, sparse) for each pair of models in order of appearance, as ``"#rrggbb"``.

    Returns:
        The figure; call its `save` to write it to a file.

    Raises:
        ValueError: there is no panel, a panel has no curve, more than two or two of one name,
            dense and sparse curves have different seeds, there are more pairs of models than
            colours, or an option is out of range.
    """
    check_level(level)
    drawn = {title: [_of_seeds(curve) for curve in curves] for title, curves in panels.items()}
    pairs = _checked_pairs(drawn, parts, colours)
    said = {title: _words(curves, level) for title, curves in drawn.items()}
    log = parts == "circuit_edges"
    # The legend of a pair appears in its first panel only.
    first = {names: title for title, names in reversed(pairs.items())}
    order = list(dict.fromkeys(pairs.values()))
    label_height = _LABEL_HEIGHT * max(1, *map(len, said.values()))
    span = _effect_span(drawn, [drawn[title] for title in first.values()], log, label_height)
    height = min(_UNIT * (span[1] - span[0]), _MAX_HEIGHT)
    figure = panel_figure(
        list(panels),
        x=f"Number of {'Edges' if log else 'Heads'} Kept",
        y="Explained Effect",
        width=_WIDTH,
        height=round(height),
        gap=_GAP,
        shared=False,
    )
    figure.update_yaxes(range=span, **ticks(0, 1, 2))
    for column, (title, curves) in enumerate(drawn.items(), start=1):
        stop = _stop(curves, log)
        # A margin at both ends, so that no line is cut off.
        figure.update_xaxes(
            type="log" if log else "linear",
            range=(-0.02 * stop, 1.02 * stop),
            **(_log_ticks(stop) if log else ticks(0, stop, 5, whole=True)),
            col=column,
        )
        for curve, colour in zip(curves, colours[order.index(pairs[title])], strict=False):
            _add_curve(figure, column, curve, colour, parts)
        if first[pairs[title]] == title:
            add_legend(figure, column)
        sizes = sorted(s for curve in curves if (s := curve.median.size_at(level)) is not None)
        if len(sizes) == 2:
            line = {"x": sizes, "y": [level] * 2, "width": RULE_WEIGHT, "dashed": True}
            add_line(figure, 1, column, colour=INK, **line)
        middle = float(_places(sizes, log).mean()) if len(sizes) == 2 else stop / 2
        for row, words in enumerate(reversed(said[title])):
            size = LABEL_SIZE if len(curves[0].seeds) > 1 else PANEL_TITLE_SIZE - 1
            half = text_width(words, size) / _WIDTH / 2 * stop
            figure.add_annotation(
                text=words,
                font={"size": size},
                x=min(max(middle, half), max(stop - half, stop / 2)),
                xanchor="center",
                y=span[1] - (label_height - row * _LABEL_HEIGHT) * (span[1] - span[0]) / height,
                yanchor="bottom",
                row=1,
                col=column,
            )
    _add_notes(figure, _notes(drawn))
    return GridFigure(figure, f"Explained Effect in {', '.join(panels)}")


def _of_seeds(curve: EffectCurve | SeedCurves) -> SeedCurves:
    return curve if isinstance(curve, SeedCurves) else SeedCurves((0,), (curve,))


def _words(curves: Curves, level: float) -> tuple[str, ...]:
    """The text above the dashed line, line by line."""
    if len(curves) != 2:
        return ()
    found = seed_multipliers(*curves, level=level)
    # For a single seed, the missing dashed line already says that the level is not reached.
    return () if len(found.seeds) == len(found.missing) == 1 else found.words()


def _notes(panels: Mapping[str, Curves]) -> list[str]:
    """Explanation of the lines, if there are several seeds."""
    counts = sorted({len(curve.seeds) for curves in panels.values() for curve in curves})
    if counts[-1] == 1:
        return []
    notes = [f"{' or '.join(map(str, counts))} seeds: thin; their median: thick."]
    if any(len(curves) == 2 for curves in panels.values()):
        notes.append("Multipliers: median (range).")
    return notes


def _add_notes(figure: Any, notes: Iterable[str]) -> None:
    """Add notes below all panels, at the left, with as many per line as fit."""
    layout, lines = figure.layout, []
    room = layout.width - layout.margin.l - layout.margin.r
    for note in notes:
        longer = f"{lines[-1]} {note}" if lines else note
        if lines and text_width(longer, TICK_SIZE) <= room:
            lines[-1] = longer
        else:
            lines.append(note)
    for line in lines:
        figure.add_annotation(
            text=line,
            font={"size": TICK_SIZE},
            x=0,
            xref="x domain",
            xanchor="left",
            y=0,
            yref="y domain",
            yanchor="middle",
            yshift=-layout.margin.b,
        )
        figure.update_layout(
            height=layout.height + _NOTE_HEIGHT, margin_b=layout.margin.b + _NOTE_HEIGHT
        )


def _places(sizes: Sequence[float], log: bool) -> np.ndarray:
    """Positions of sizes on an axis, in units of its range."""
    return np.log10(np.maximum(sizes, 1)) if log else np.asarray(sizes, dtype=float)


def _stop(curves: Curves, log: bool) -> float:
    """The end of an axis that starts at 0 (logarithmic: at 1), without margin."""
    largest = max(curve.sizes[-1] for seeds in curves for curve in seeds.curves)
    return max(float(_places([largest], log)[0]), 1.0)


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
    for pair in colours:
        for colour in pair:
            channels(colour)  # raises if invalid
    return pairs


def _effect_span(
    panels: Mapping[str, Curves], with_legend: Iterable[Curves], log: bool, label_height: float
) -> tuple[float, float]:
    """Effect range of all panels, with room for the multiplier and legends that hide a curve."""
    drawn = [one for curves in panels.values() for seeds in curves for one in seeds.curves]
    effects = [effect for one in drawn for effect in one.mean]
    low, high = min(0, *effects), max(1, *effects)
    # Lowest curve point behind a legend at the lower right.
    lowest = 1.0
    for curves in with_legend:
        stop = _stop(curves, log)
        behind = np.linspace(stop - _LEGEND_WIDTH / _WIDTH * stop, stop, 33)
        for seeds in curves:
            for one in seeds.curves:
                # Seeds among others have no interval.
                ends = one.low if len(seeds.curves) == 1 else one.mean
                lowest = min(lowest, *np.interp(behind, _places(one.sizes, log), ends))
    # At maximum height a unit has fewer pixels, and texts take up more units.
    unit = min(_UNIT, (_MAX_HEIGHT - _LEGEND_HEIGHT - label_height) / (high - low + 0.03))
    hidden = lowest < low - 0.05 + _LEGEND_HEIGHT / unit
    room = _LEGEND_HEIGHT / unit if hidden else 0.05
    return low - room, high + 0.03 + label_height / unit


def _add_curve(
    figure: go.Figure, column: int, seeds: SeedCurves, colour: str, parts: Parts
) -> None:
    """A curve with its interval; or the curves of all seeds with their median on top."""
    if len(seeds.curves) == 1:
        one = seeds.curves[0]
        style = {"low": one.low, "high": one.high, "name": one.name}
        return _add_line(figure, column, one, colour, parts, one.name, "Interval", **style)
    for seed, one in zip(seeds.seeds, seeds.curves, strict=True):
        style = {"width": _SEED_WEIGHT, "opacity": _SEED_OPACITY, "group": one.name}
        _add_line(
            figure, column, one, colour, parts, f"{one.name}, seed {seed}", "Interval", **style
        )
    said = f"{seeds.name}, median of {len(seeds.seeds)} seeds"
    _add_line(figure, column, seeds.median, colour, parts, said, "Seeds", name=seeds.name)


def _add_line(
    figure: go.Figure,
    column: int,
    curve: EffectCurve,
    colour: str,
    parts: Parts,
    said: str,
    interval: str,
    **style: Any,
) -> None:
    """One line with the tooltips of its points."""
    what = parts.replace("_", " ")
    rows = zip(curve.sizes, curve.mean, curve.low, curve.high, strict=True)
    hover = [
        (
            said,
            f"{size:,} {what if size != 1 else what[:-1]} kept",
            f"Explained effect {mean:.3f}",
            f"{interval} {low:.3f} to {high:.3f}",
        )
        for size, mean, low, high in rows
    ]
    places = [max(size, 1) for size in curve.sizes] if parts == "circuit_edges" else curve.sizes
    add_line(figure, 1, column, x=places, y=curve.mean, colour=colour, hover=hover, **style)


def _log_ticks(stop: float) -> dict[str, Any]:
    powers = range(math.floor(stop + 1e-9) + 1)
    texts = ["10" + str(power).translate(_SUPERSCRIPTS) for power in powers]
    return {"tickvals": [10**power for power in powers], "ticktext": texts}
