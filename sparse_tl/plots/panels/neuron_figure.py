"""Figure of an MLP's neurons: exact effects and first-order scores, strongest first."""

from __future__ import annotations

from sparse_tl.calls.arguments import checked
from sparse_tl.circuits import NeuronEffects
from sparse_tl.plots.page.palette import MODEL_PAIRS, MUTED, RULE_WEIGHT
from sparse_tl.plots.panels.grid_figure import GridFigure
from sparse_tl.plots.panels.legends import add_legend_below
from sparse_tl.plots.panels.plotly_panels import (
    add_line,
    add_points,
    hover_text,
    panel_figure,
    ticks,
)

_WIDTH, _ROW, _MARGIN = 360, 18, 0.05
_POINT_OPACITY = 0.8


@checked
def neuron_figure(neurons: NeuronEffects, *, unit: str = "", title: str = "") -> GridFigure:
    """Draw exact effects of neurons, one row each, with their first-order scores.

    Args:
        neurons: the neurons.
        unit: unit of the metric, such as ``"logits"``.
        title: title of the panel.

    Returns:
        The figure; call its `save` to write it to a file.
    """
    table = neurons.to_pandas().head(len(neurons.tokens))
    n, suffix = len(table), f" ({unit})" if unit else ""
    axes = {"x": f"Effect{suffix}", "y": f"Neuron of {neurons.mlp}"}
    figure = panel_figure([[title]], **axes, width=_WIDTH, height=_ROW * n)
    values = [0.0, *table["effect"], *table["score"]]
    margin = _MARGIN * (max(values) - min(values)) or 1.0
    ends, rows = (min(values) - margin, max(values) + margin), list(range(n))
    figure.update_xaxes(range=ends, **ticks(*ends))
    names = [name.partition(".")[2] for name in table["neuron"]]
    figure.update_yaxes(range=(n - 0.5, -0.5), tickvals=rows, ticktext=names)
    line = {"colour": MUTED, "width": RULE_WEIGHT}
    add_line(figure, 1, 1, x=(0.0, 0.0), y=(-0.5, n - 0.5), **line)
    hover = [
        hover_text(
            [
                str(row.neuron),
                f"Exact effect {row.effect:.3g}{suffix}, to first order {row.score:.3g}",
                f"Activation {row.clean:.3g}, corrupted {row.corrupted:.3g}",
                f"At {row.tokens}",
                f"Promotes {row.promotes}",
                f"Suppresses {row.suppresses}",
            ]
        )
        for row in table.itertuples()
    ]
    colours = dict(zip(("effect", "score"), MODEL_PAIRS[0], strict=True))
    for column, name in (("score", "To First Order"), ("effect", "Exact")):
        add_points(
            figure,
            1,
            1,
            x=list(table[column]),
            y=rows,
            colour=colours[column],
            name=name,
            hover=hover,
            opacity=_POINT_OPACITY,
        )
    add_legend_below(figure)
    return GridFigure(figure, f"Neurons of {neurons.mlp}")
