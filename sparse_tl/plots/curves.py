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
from typing import Any, Literal, get_args

import numpy as np
import plotly.graph_objects as go

from sparse_tl.circuits.effect import EffectCurve, check_level, multiplier
from sparse_tl.plots.grid_figure import GridFigure
from sparse_tl.plots.palette import INK, MODEL_PAIRS, PANEL_TITLE_SIZE, RULE_WEIGHT, channels
from sparse_tl.plots.panels import add_legend, add_line, panel_figure, ticks

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
    log = parts == "circuit_edges"
    # The legend of a pair stands in its first panel only.
    first = {names: title for title, names in reversed(pairs.items())}
    order = list(dict.fromkeys(pairs.values()))
    span = _effect_span(panels, [panels[title] for title in first.values()], log)
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
    for column, (title, curves) in enumerate(panels.items(), start=1):
        start, stop = _ends(curves, log)
        # A little room at both ends, where no line is cut in half.
        margin = 0.02 * (stop - start)
        figure.update_xaxes(
            type="log" if log else "linear",
            range=(start - margin, stop + margin),
            **(_log_ticks(start, stop) if log else ticks(start, stop, 5, whole=True)),
            col=column,
        )
        for curve, colour in zip(curves, colours[order.index(pairs[title])], strict=False):
            _add_curve(figure, column, curve, colour, parts)
        if first[pairs[title]] == title:
            add_legend(figure, column)
        ratio = multiplier(*curves, level=level) if len(curves) == 2 else None
        if ratio is not None:
            sizes = sorted(s for curve in curves if (s := curve.size_at(level)) is not None)
            line = {"x": sizes, "y": [level] * 2, "width": RULE_WEIGHT, "dashed": True}
            add_line(figure, 1, column, colour=INK, **line)
            half = _LABEL_WIDTH / _WIDTH / 2 * (stop - start)
            middle = min(max(_places(sizes, log).mean(), start + half), stop - half)
            figure.add_annotation(
                text=f"{ratio:.1f}x",
                font={"size": PANEL_TITLE_SIZE - 1},
                x=middle,
                xanchor="center",
                y=span[1] - _LABEL_HEIGHT * (span[1] - span[0]) / height,
                yanchor="bottom",
                row=1,
                col=column,
            )
    return GridFigure(figure, f"Explained Effect in {', '.join(panels)}")


def _places(sizes: Sequence[float], log: bool) -> np.ndarray:
    """Where sizes stand on an axis, in the unit of its range."""
    return np.log10(np.maximum(sizes, 1)) if log else np.asarray(sizes, dtype=float)


def _ends(curves: Curves, log: bool) -> tuple[float, float]:
    """Of the axis, without margins."""
    places = np.concatenate([_places(curve.sizes, log) for curve in curves])
    low = math.floor(places.min()) if log else 0
    return low, max(float(places.max()), low + 1)


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
            channels(colour)  # raises where it is none
    return pairs


def _effect_span(
    panels: Mapping[str, Curves], with_legend: Iterable[Curves], log: bool
) -> tuple[float, float]:
    """Of all panels: room for the multiplier and, where it would hide a curve, for the legend."""
    effects = [effect for curves in panels.values() for curve in curves for effect in curve.mean]
    low, high = min(0, *effects), max(1, *effects)
    # What stands where a legend at the lower right would stand.
    lowest = 1.0
    for curves in with_legend:
        start, stop = _ends(curves, log)
        behind = np.linspace(stop - _LEGEND_WIDTH / _WIDTH * (stop - start), stop, 33)
        for curve in curves:
            lowest = min(lowest, *np.interp(behind, _places(curve.sizes, log), curve.low))
    # Where a plot may not grow any more, a unit has fewer pixels, and texts need more of them.
    unit = min(_UNIT, (_MAX_HEIGHT - _LEGEND_HEIGHT - _LABEL_HEIGHT) / (high - low + 0.03))
    hidden = lowest < low - 0.05 + _LEGEND_HEIGHT / unit
    room = _LEGEND_HEIGHT / unit if hidden else 0.05
    return low - room, high + 0.03 + _LABEL_HEIGHT / unit


def _add_curve(
    figure: go.Figure, column: int, curve: EffectCurve, colour: str, parts: Parts
) -> None:
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
    add_line(
        figure,
        1,
        column,
        x=[max(size, 1) for size in curve.sizes] if parts == "circuit_edges" else curve.sizes,
        y=curve.mean,
        colour=colour,
        name=curve.name,
        low=curve.low,
        high=curve.high,
        hover=hover,
    )


def _log_ticks(start: float, stop: float) -> dict[str, Any]:
    powers = range(math.floor(start), math.floor(stop + 1e-9) + 1)
    texts = ["10" + str(power).translate(_SUPERSCRIPTS) for power in powers]
    return {"tickvals": [10**power for power in powers], "ticktext": texts}
