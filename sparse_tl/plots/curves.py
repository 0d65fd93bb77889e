"""The figure of explained effect against the number of parts kept: one panel per task.

1. Check the panels, and find the pairs of models, which share colours and a legend.
2. Give every panel its axes and its title (`curves_layout`).
3. Draw the intervals, the mean lines in front of them, and the multiplier (`effect_curve`).
4. Show and save: as plotly does, or as a static drawing of the same figure (`plotly_figure`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

import plotly.graph_objects as go

from sparse_tl.plots.curves_layout import (
    Parts,
    add_legend,
    add_panel,
    axis_names,
    escaped,
    label_place,
    legend_name,
    legend_text,
    new_figure,
    vertical_range,
)
from sparse_tl.plots.effect_curve import EffectCurve, check_level, multiplier
from sparse_tl.plots.intervals import interval_area
from sparse_tl.plots.palette import CURVE_WEIGHT, INK, MODEL_PAIRS, PANEL_TITLE_SIZE, translucent
from sparse_tl.plots.plotly_figure import PlotlyFigure

__all__ = ["EffectCurve", "effect_figure", "multiplier"]


def effect_figure(
    panels: Mapping[str, Sequence[EffectCurve]],
    *,
    parts: Parts,
    level: float = 0.9,
    colours: Sequence[tuple[str, str]] = MODEL_PAIRS,
) -> PlotlyFigure:
    """Draw the explained effect against the parts kept, one panel per task in a row.

    A dashed line at the level leads from one curve's size at the level to the other's; above it
    stands the multiplier. It is left out where a curve does not reach the level. On the
    logarithmic axis of edges, a size of 0 stands at 1.

    Args:
        panels: for each task, by the title of its panel, the dense model's curve and then the
            sparse one's, or a single curve.
        parts: ``"heads"`` for a linear axis, ``"edges"`` for a logarithmic one.
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
    effects = vertical_range(panels, parts)
    figure = new_figure(len(panels), effects)
    with_legend: set[tuple[str, ...]] = set()
    for index, (title, curves) in enumerate(panels.items()):
        pair = tuple(curve.name for curve in curves)
        number = pairs.index(pair)
        add_panel(figure, index, title, curves, parts, effects)
        if pair not in with_legend:
            add_legend(figure, index, number)
        place = axis_names(index) | {"legend": legend_name(number)}
        for curve, colour in zip(curves, colours[number], strict=False):
            interval, line = _curve_traces(curve, colour, parts, place)
            line.showlegend = pair not in with_legend
            figure.add_traces([interval, line])
        with_legend.add(pair)
        if len(curves) == 2:
            _add_multiplier(figure, index, curves, parts, level)
    return figure


def _checked_pairs(
    panels: Mapping[str, Sequence[EffectCurve]], parts: str, colours: Sequence[tuple[str, str]]
) -> list[tuple[str, ...]]:
    """The different pairs of models, in order of appearance."""
    if parts not in get_args(Parts):
        raise ValueError(f"expected parts 'heads' or 'edges'; got {parts!r}")
    if not panels:
        raise ValueError('expected at least one panel; got none; pass {"IOI": [dense, sparse]}')
    for title, curves in panels.items():
        names = [curve.name for curve in curves]
        if len(names) not in (1, 2) or len(set(names)) != len(names):
            raise ValueError(
                f"expected a dense and a sparse curve, of different names, in panel {title!r}; got "
                f"{names}; draw other models in panels of their own"
            )
    pairs = list(dict.fromkeys(tuple(curve.name for curve in c) for c in panels.values()))
    if len(pairs) > len(colours):
        raise ValueError(
            f"expected colours for {len(pairs)} pairs of models; got {len(colours)}; pass "
            "colours=[(dense, sparse), ...] or draw fewer models"
        )
    for colour in (colour for pair in colours for colour in pair):
        digits = colour[1:].lower()
        if len(colour) != 7 or colour[0] != "#" or set(digits) - set("0123456789abcdef"):
            raise ValueError(f"expected colours like '#0072b2'; got {colour!r}")
    return pairs


def _curve_traces(
    curve: EffectCurve, colour: str, parts: Parts, place: Mapping[str, str]
) -> tuple[go.Scatter, go.Scatter]:
    """The interval, and the mean line in front of it."""
    x = [max(size, 1) for size in curve.sizes] if parts == "edges" else list(curve.sizes)
    name = escaped(curve.name)
    interval = go.Scatter(
        **interval_area(x, curve.low, curve.high, translucent(colour, 0.2)),
        name=f"{name}, interval",
        legendgroup=curve.name,
        **place,
    )
    # No hovertemplate: it would fill in whatever %{...} a name holds.
    rows = zip(curve.sizes, curve.mean, curve.low, curve.high, strict=True)
    hover = [
        f"<b>{name}</b><br>{size:,} {parts if size != 1 else parts[:-1]} kept<br>"
        f"Explained effect {mean:.3f}<br>Interval {low:.3f} to {high:.3f}"
        for size, mean, low, high in rows
    ]
    line = go.Scatter(
        x=x,
        y=list(curve.mean),
        mode="lines",
        line={"color": colour, "width": CURVE_WEIGHT},
        name=legend_text(curve.name),
        legendgroup=curve.name,
        hovertext=hover,
        hoverinfo="text",
        **place,
    )
    return interval, line


def _add_multiplier(
    figure: go.Figure, index: int, curves: Sequence[EffectCurve], parts: Parts, level: float
) -> None:
    dense, sparse = curves
    ratio = multiplier(dense, sparse, level)
    ends = [size for size in (sparse.size_at(level), dense.size_at(level)) if size is not None]
    if ratio is None:
        return
    figure.add_trace(
        go.Scatter(
            x=ends,
            y=[level, level],
            mode="lines",
            line={"color": INK, "width": 1.4, "dash": "4px,3px"},
            name=f"multiplier at {level:g}",
            showlegend=False,
            hoverinfo="skip",
            **axis_names(index),
        )
    )
    x, y = label_place(figure, index, curves, parts, ends, level)
    figure.add_annotation(
        text=f"{ratio:.1f}x",
        x=x,
        y=y,
        xref=axis_names(index)["xaxis"],
        yref=axis_names(index)["yaxis"],
        showarrow=False,
        xanchor="center",
        yanchor="bottom",
        font={"size": PANEL_TITLE_SIZE - 1, "color": INK},
    )
