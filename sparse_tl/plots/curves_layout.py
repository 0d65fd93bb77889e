"""Where things stand in a row of panels: axes, ticks, titles, legends and multiplier labels.

Every range, tick and place is explicit, so that plotly and the static drawing agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape, unescape
from typing import Literal

import numpy as np
import plotly.graph_objects as go

from sparse_tl.plots.curves_svg import layout_of
from sparse_tl.plots.effect_curve import EffectCurve
from sparse_tl.plots.palette import (
    AXIS,
    GRID,
    INK,
    LABEL_SIZE,
    LEGEND_SIZE,
    MUTED,
    PANEL_TITLE_SIZE,
    TICK_SIZE,
)
from sparse_tl.plots.plotly_figure import CLEAR, PlotlyFigure, base_layout
from sparse_tl.plots.token_text import clip_text, text_width, visible_text

Parts = Literal["heads", "edges"]

# Pixels: of one panel with its labels, and of the room around its plot.
_PITCH, _LEFT, _RIGHT, _TOP, _BOTTOM = 250, 54, 12, 34, 50
_PLOT_WIDTH = _PITCH - _LEFT - _RIGHT
# Pixels per unit of effect, and the height at which a plot stops growing.
_UNIT, _MAX_HEIGHT = 147, 300
# The room that texts take in a plot, in pixels.
_LABEL_WIDTH, _LABEL_HEIGHT, _LEGEND_HEIGHT, _LEGEND_SAMPLE = 48, 19, 46, 44


def vertical_range(panels: Mapping[str, Sequence[EffectCurve]], parts: Parts) -> list[float]:
    """The range of effects that all panels share.

    It holds every mean, 0..1, room for the multiplier above and, where a legend at the bottom right
    would cover a curve, room for the legend below.
    """
    effects = [effect for curves in panels.values() for curve in curves for effect in curve.mean]
    low, high = min(0, *effects), max(1, *effects)
    # The legend of a pair stands in its first panel only.
    pairs = [tuple(curve.name for curve in curves) for curves in panels.values()]
    with_legend = [c for i, c in enumerate(panels.values()) if pairs[i] not in pairs[:i]]
    hidden = any(_under_legend(curves, parts, low) for curves in with_legend)
    room = _LEGEND_HEIGHT / _UNIT if hidden else 0.05
    return [low - room, high + 0.03 + _LABEL_HEIGHT / _UNIT]


def new_figure(n_panels: int, effects: Sequence[float]) -> PlotlyFigure:
    """An empty row of panels, as high as the range of effects needs."""
    height = min(_UNIT * (effects[1] - effects[0]), _MAX_HEIGHT)
    return PlotlyFigure(
        layout=base_layout(_PITCH * n_panels, round(_TOP + height + _BOTTOM), _TOP, _BOTTOM)
    )


def axis_names(index: int) -> dict[str, str]:
    """The axes of a panel, as a trace names them."""
    number = "" if index == 0 else str(index + 1)
    return {"xaxis": f"x{number}", "yaxis": f"y{number}"}


def legend_name(number: int) -> str:
    """The legend of a pair of models, as a trace names it."""
    return "legend" if number == 0 else f"legend{number + 1}"


def escaped(text: str) -> str:
    """A text that plotly, which reads some HTML, shows as it is."""
    return escape(visible_text(text), quote=False)


def legend_text(name: str) -> str:
    """The name of a model, or as much of it as a legend can hold."""
    room = _PLOT_WIDTH - _LEGEND_SAMPLE
    return escape(clip_text(visible_text(name), LEGEND_SIZE, room), quote=False)


def add_panel(
    figure: go.Figure,
    index: int,
    title: str,
    curves: Sequence[EffectCurve],
    parts: Parts,
    effects: Sequence[float],
) -> None:
    """Give a panel its axes and its title.

    Args:
        figure: made by `new_figure`.
        index: of the panel, from the left.
        title: of the panel.
        curves: that the panel will show.
        parts: ``"heads"`` for a linear axis, ``"edges"`` for a logarithmic one.
        effects: the vertical range.
    """
    names = axis_names(index)
    number = names["xaxis"][1:]
    figure.update_layout(
        {
            f"xaxis{number}": _x_axis(figure, index, curves, parts) | {"anchor": names["yaxis"]},
            f"yaxis{number}": _y_axis(effects) | {"anchor": names["xaxis"]},
        }
    )
    figure.add_annotation(
        text=escape(clip_text(visible_text(title), PANEL_TITLE_SIZE, _PITCH - _LEFT), quote=False),
        x=0,
        y=1,
        xref=f"{names['xaxis']} domain",
        yref=f"{names['yaxis']} domain",
        showarrow=False,
        xanchor="left",
        yanchor="bottom",
        yshift=5,
        font={"size": PANEL_TITLE_SIZE, "color": INK},
    )


def add_legend(figure: go.Figure, index: int, number: int) -> None:
    """Put the legend of a pair of models, counted by `number`, at the bottom right of a panel."""
    domain = layout_of(figure)[f"xaxis{axis_names(index)['xaxis'][1:]}"].domain
    figure.update_layout(
        {
            legend_name(number): {
                "x": domain[1],
                "xanchor": "right",
                "y": 0.01,
                "yanchor": "bottom",
                "bgcolor": CLEAR,
                "font": {"size": LEGEND_SIZE, "color": INK},
                "itemwidth": 30,
                "tracegroupgap": 0,
            }
        }
    )


def label_place(
    figure: go.Figure,
    index: int,
    curves: Sequence[EffectCurve],
    parts: Parts,
    ends: Sequence[float],
    level: float,
) -> tuple[float, float]:
    """Where the multiplier stands: over the middle of its dashed line, clear of the curves.

    Args:
        figure: with the axes of this panel.
        index: of the panel.
        curves: of this panel.
        parts: what is counted.
        ends: sizes between which the dashed line runs.
        level: explained effect at which it runs.

    Returns:
        The middle of the label's lower end, in the units of the axes (log10 on a log axis).
    """
    number = axis_names(index)["xaxis"][1:]
    start, stop = layout_of(figure)[f"xaxis{number}"].range
    bottom, top = layout_of(figure)[f"yaxis{number}"].range
    half = _LABEL_WIDTH / _PLOT_WIDTH / 2 * (stop - start)
    middle = sum(position(end, parts) for end in ends) / len(ends)
    middle = min(max(middle, start + half), stop - half)
    heights = [level]
    for curve in curves:
        heights += _between(curve, curve.mean, parts, middle - half, middle + half)
        heights += _between(curve, curve.high, parts, middle - half, middle + half)
    unit = (layout_of(figure).height - _TOP - _BOTTOM) / (top - bottom)
    return middle, min(max(heights) + 2 / unit, top - _LABEL_HEIGHT / unit)


def position(size: float, parts: Parts) -> float:
    """Where a size stands on the axis, in plotly's units."""
    return math.log10(max(size, 1)) if parts == "edges" else float(size)


def _between(
    curve: EffectCurve, effects: Sequence[float], parts: Parts, start: float, stop: float
) -> list[float]:
    """The effects that a line has between two places on the axis, where it is drawn at all."""
    places = [position(size, parts) for size in curve.sizes]
    wanted = np.linspace(start, stop, 33)
    drawn = wanted[(wanted >= places[0]) & (wanted <= places[-1])]
    return np.interp(drawn, places, effects).tolist()


def _under_legend(curves: Sequence[EffectCurve], parts: Parts, low: float) -> bool:
    names = (unescape(legend_text(curve.name)) for curve in curves)
    widest = max(text_width(name, LEGEND_SIZE) for name in names)
    start, stop = _size_range(curves, parts)
    left = stop - (widest + _LEGEND_SAMPLE) / _PLOT_WIDTH * (stop - start)
    lowest = (e for c in curves for e in _between(c, c.low, parts, left, stop))
    return min(lowest, default=1.0) < low - 0.05 + _LEGEND_HEIGHT / _UNIT


def _size_range(curves: Sequence[EffectCurve], parts: Parts) -> tuple[float, float]:
    """The ends of the axis, in plotly's units, without margins."""
    sizes = [size for curve in curves for size in curve.sizes]
    if parts == "heads":
        return 0.0, float(max(*sizes, 1))
    low = math.floor(position(min(sizes), parts))
    return low, max(position(max(sizes), parts), low + 1)


def _x_axis(
    figure: go.Figure, index: int, curves: Sequence[EffectCurve], parts: Parts
) -> dict[str, object]:
    width = layout_of(figure).width
    axis: dict[str, object] = {
        "domain": [
            (_PITCH * index + _LEFT) / width,
            (_PITCH * (index + 1) - _RIGHT) / width,
        ],
        "title": {
            "text": f"Number of {parts.capitalize()} Kept",
            "font": {"size": LABEL_SIZE, "color": INK},
            "standoff": 8,
        },
        "showgrid": False,
        "zeroline": False,
        "showline": True,
        "linecolor": AXIS,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": AXIS,
        "tickangle": 0,
        "tickfont": {"size": TICK_SIZE, "color": MUTED},
    }
    start, stop = _size_range(curves, parts)
    # A little room at the ends: lines are not cut in half there.
    margin = 0.02 * (stop - start)
    axis["range"] = [start - margin, stop + margin]
    return axis | (_log_ticks(start, stop) if parts == "edges" else _linear_ticks(round(stop)))


def _y_axis(effects: Sequence[float]) -> dict[str, object]:
    return {
        "domain": [0, 1],
        "range": list(effects),
        "tickvals": [0, 0.5, 1],
        "ticktext": ["0.0", "0.5", "1.0"],
        "title": {
            "text": "Explained Effect",
            "font": {"size": LABEL_SIZE, "color": INK},
            "standoff": 6,
        },
        "showgrid": True,
        "gridcolor": GRID,
        "zeroline": False,
        "ticks": "",
        "tickfont": {"size": TICK_SIZE, "color": MUTED},
    }


def _linear_ticks(largest: int) -> dict[str, object]:
    # 1, 2, 2.5 and 5 times a power of ten, but no half of a head.
    steps = (
        factor * 10**power // 10
        for power in range(len(str(largest)) + 1)
        for factor in (10, 20, 25, 50)
        if power or factor != 25
    )
    step = next(step for step in steps if largest <= 5 * step)
    ticks = list(range(0, largest + 1, step))
    return {"type": "linear", "tickvals": ticks, "ticktext": [str(tick) for tick in ticks]}


def _log_ticks(start: float, stop: float) -> dict[str, object]:
    powers = range(math.floor(start), math.floor(stop + 1e-9) + 1)
    return {
        "type": "log",
        "tickvals": [10**power for power in powers],
        "ticktext": [f"10<sup>{power}</sup>" for power in powers],
    }
