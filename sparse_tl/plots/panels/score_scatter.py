"""Figure of attribution scores against exact effects: one panel per method, model or task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from sparse_tl.calls.arguments import checked
from sparse_tl.circuits.methods.exact import Drawn, ScoreCheck
from sparse_tl.plots.page.palette import MODEL_PAIRS, MUTED, RULE_WEIGHT
from sparse_tl.plots.panels.grid_figure import GridFigure
from sparse_tl.plots.panels.legends import add_legend_below
from sparse_tl.plots.panels.plotly_panels import (
    add_line,
    add_points,
    fitting_width,
    hover_text,
    in_rows,
    panel_figure,
    panel_positions,
    ticks,
)

_GAP, _WIDEST = 54, 240
_MARGIN = 0.05
_POINT_SIZE, _POINT_OPACITY = 6, 0.7
_NAMES: dict[Drawn, str] = {"strongest": "Strongest", "random": "Drawn at Random"}


@checked
def score_figure(checks: Mapping[str, ScoreCheck], *, unit: str = "") -> GridFigure:
    """Draw scores against exact effects of the same parts; on the dashed line, both are equal.

    Args:
        checks: checked scores by panel title.
        unit: unit of the metric, such as ``"logits"``.

    Returns:
        The figure; call its `save` to write it to a file.

    Raises:
        ValueError: there is no panel.
    """
    if not checks:
        raise ValueError("expected at least one panel; got none")
    rows, suffix = in_rows(list(checks)), f" ({unit})" if unit else ""
    width = fitting_width(len(rows[0]), gap=_GAP, most=_WIDEST)
    axes = {"x": f"Exact Effect{suffix}", "y": f"Score{suffix}"}
    figure = panel_figure(rows, **axes, width=width, height=width, gap=_GAP, shared=False)
    for position, check in zip(panel_positions(rows), checks.values(), strict=True):
        values = [*check.score.tolist(), *check.exact.tolist()]
        low, high = min(0.0, *values), max(0.0, *values)
        margin = _MARGIN * (high - low) or 1.0
        ends = low - margin, high + margin
        for update in (figure.update_xaxes, figure.update_yaxes):
            update(range=ends, **ticks(*ends), row=position[0], col=position[1])
        add_line(figure, *position, x=ends, y=ends, colour=MUTED, width=RULE_WEIGHT, dashed=True)
        for drawn, colour in zip(get_args(Drawn), MODEL_PAIRS[0], strict=True):
            indices = [i for i, choice in enumerate(check.drawn) if choice == drawn]
            both = check.score, check.exact
            score, exact = ([values[i].item() for i in indices] for values in both)
            hover = [
                (check.parts[i], f"Exact effect {x:.3g}{suffix}", f"Score {y:.3g}{suffix}")
                for i, x, y in zip(indices, exact, score, strict=True)
            ]
            add_points(
                figure,
                *position,
                x=exact,
                y=score,
                colour=colour,
                name=_NAMES[drawn],
                hover=[hover_text(words) for words in hover],
                opacity=_POINT_OPACITY,
                size=_POINT_SIZE,
            )
    add_legend_below(figure)
    return GridFigure(figure, f"Scores and Exact Effects in {', '.join(checks)}")
