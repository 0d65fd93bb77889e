"""Figures of points: checked scores, neurons, and compared skills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparse_tl.arguments import checked
from sparse_tl.circuits import NeuronEffects, ScoreCheck
from sparse_tl.plots.page.palette import AXIS, MODEL_PAIRS, MUTED, RULE_WEIGHT, TICK_SIZE
from sparse_tl.plots.page.rendering import by_title
from sparse_tl.plots.page.token_text import clip_text, text_width, visible_text
from sparse_tl.plots.panels import grid
from sparse_tl.tasks import SkillComparison

_RULE: dict[str, Any] = {"colour": MUTED, "width": RULE_WEIGHT}
_MARGIN, _POINT = 0.05, 7


def _padded(low: float, high: float) -> tuple[float, float]:
    """A range with a margin at both ends."""
    margin = _MARGIN * (high - low) or 1.0
    return low - margin, high + margin


# ---- scores against exact effects --------------------------------------------------------------

_SCORE_GAP, _WIDEST_SCORES = 56, 400
_SCORE_NAMES = {"strongest": "Strongest", "random": "Drawn at Random"}


@checked
def score_figure(checks: Mapping[str, ScoreCheck], *, unit: str = "") -> grid.GridFigure:
    """Draw scores against exact effects of the same parts; on the dashed line, both are equal.

    Args:
        checks: checked scores by panel title.
        unit: unit of the metric, such as ``"logits"``.

    Raises:
        ValueError: there is no panel.
    """
    checks = by_title(checks)
    rows, suffix = grid.in_rows(list(checks)), f" ({unit})" if unit else ""
    width = grid.fitting_width(len(rows[0]), gap=_SCORE_GAP, most=_WIDEST_SCORES)
    axes = {"x": f"Exact Effect{suffix}", "y": f"Score{suffix}"}
    figure = grid.panel_figure(
        rows, **axes, width=width, height=width, gap=_SCORE_GAP, shared=False
    )
    for position, check in zip(grid.panel_positions(rows), checks.values(), strict=True):
        values = check.table[["score", "exact"]].to_numpy()
        ends = _padded(min(0.0, float(values.min())), max(0.0, float(values.max())))
        for update in (figure.update_xaxes, figure.update_yaxes):
            update(range=ends, nticks=5, row=position[0], col=position[1])
        grid.add_line(figure, position, x=ends, y=ends, **_RULE, dashed=True)
        for (drawn, name), colour in zip(_SCORE_NAMES.items(), MODEL_PAIRS[0], strict=True):
            half = check.table[check.table["drawn"] == drawn]
            exact, score = half["exact"].tolist(), half["score"].tolist()
            hover = [
                (part, f"Exact effect {x:.3g}{suffix}", f"Score {y:.3g}{suffix}")
                for part, x, y in zip(half["part"], exact, score, strict=True)
            ]
            style: dict[str, Any] = {"colour": colour, "name": name, "opacity": 0.7}
            grid.add_line(figure, position, x=exact, y=score, hover=hover, point_size=6, **style)
    grid.add_legend(figure)
    return grid.GridFigure(figure, f"Scores and Exact Effects in {', '.join(checks)}")


# ---- neurons -----------------------------------------------------------------------------------

_NEURON_ROW = 18


@checked
def neuron_figure(neurons: NeuronEffects, *, unit: str = "", title: str = "") -> grid.GridFigure:
    """Draw exact effects of neurons, one row each, with their first-order scores.

    Args:
        neurons: the neurons.
        unit: unit of the metric, such as ``"logits"``.
        title: title of the panel.
    """
    table = neurons.to_pandas().head(len(neurons.tokens))
    n, suffix = len(table), f" ({unit})" if unit else ""
    axes = {"x": f"Effect{suffix}", "y": f"Neuron of {neurons.mlp}"}
    figure = grid.panel_figure(
        [[title]], **axes, width=grid.fitting_width(1, gap=0), height=_NEURON_ROW * n
    )
    values = [0.0, *table["effect"], *table["score"]]
    ends, rows = _padded(min(values), max(values)), list(range(n))
    figure.update_xaxes(range=ends, nticks=5)
    names = [name.partition(".")[2] for name in table["neuron"]]
    figure.update_yaxes(range=(n - 0.5, -0.5), tickvals=rows, ticktext=names)
    grid.add_line(figure, (1, 1), x=(0.0, 0.0), y=(-0.5, n - 0.5), **_RULE)
    hover = [
        (
            str(row.neuron),
            f"Exact effect {row.effect:.3g}{suffix}, to first order {row.score:.3g}",
            f"Activation {row.clean:.3g}, corrupted {row.corrupted:.3g}",
            f"At {row.tokens}",
            f"Promotes {row.promotes}",
            f"Suppresses {row.suppresses}",
        )
        for row in table.itertuples()
    ]
    exact, estimate = MODEL_PAIRS[0]
    for column, name, colour in (
        ("score", "To First Order", estimate),
        ("effect", "Exact", exact),
    ):
        style: dict[str, Any] = {"colour": colour, "name": name, "hover": hover, "opacity": 0.8}
        grid.add_line(figure, (1, 1), x=list(table[column]), y=rows, point_size=_POINT, **style)
    grid.add_legend(figure)
    return grid.GridFigure(figure, f"Neurons of {neurons.mlp}")


# ---- skills ------------------------------------------------------------------------------------

_SKILL_GAP, _SKILL_ROW, _LABELS = 24, 22, 52
_OFFSET, _TICK, _PALE = 0.16, 0.3, 0.45


@checked
def skill_figure(compared: SkillComparison) -> grid.GridFigure:
    """Draw right above wrong of both models and the divergence, the largest fall at the top.

    Pale lines are 95 % intervals.

    Args:
        compared: what `compare_skills` returned.

    Raises:
        ValueError: no family was measured.
    """
    table: Any = compared.to_pandas()
    if "change" not in table:
        raise ValueError("no family was measured, so there is nothing to draw")
    table = table.dropna(subset="change").sort_values("change")
    titles = [visible_text(title) for title in table["title"]]
    labels = [clip_text(title, TICK_SIZE, grid.LONGEST_NAME + _LABELS) for title in titles]
    more = max(0.0, *(text_width(label, TICK_SIZE) - _LABELS for label in labels))
    n, panels = len(table), ["Right above Wrong (%)", "Divergence (nats)"]
    width = grid.fitting_width(2, gap=_SKILL_GAP, beside=more)
    sizes = {"width": width, "height": _SKILL_ROW * n, "gap": _SKILL_GAP}
    figure = grid.panel_figure([panels], x="", y="", **sizes)
    margin, total = figure.layout.margin.l + more, round(figure.layout.width + more)
    figure.update_layout(width=total, margin_l=margin)
    names = [grid.plain_text(label) for label in labels]
    figure.update_yaxes(range=(n - 0.5, -0.5), tickvals=[*range(n)], ticktext=names)
    for column, most in enumerate((100, 1.05 * table["divergence_high"].max() or 1.0), start=1):
        span = (-0.02 * most, 1.02 * most)
        figure.update_xaxes(range=span, nticks=5, row=1, col=column)
    hover = []
    for row, one in enumerate(table.itertuples()):
        chance: dict[str, Any] = {"x": [100 * one.chance] * 2, "y": [row - _TICK, row + _TICK]}
        grid.add_line(figure, (1, 1), **chance, **_RULE, name="Chance")
        ends = [100 * one.above_dense, 100 * one.above_sparse]
        grid.add_line(
            figure, (1, 1), x=ends, y=[row - _OFFSET, row + _OFFSET], colour=AXIS, width=1.0
        )
        words = [
            f"Right above wrong {one.above_dense:.0%} to {one.above_sparse:.0%}, p {one.p:.2g}",
            f"Right {one.right_dense:.0%} to {one.right_sparse:.0%} of {one.prompts:.0f} prompts",
            f"{one.edges:,.0f} of {one.possible:,.0f} attention edges per token",
        ]
        hover.append([titles[row], *words])
    dense, sparse = MODEL_PAIRS[0]
    for column, scale, value, name, colour, offset in (
        (1, 100, "above_dense", "Dense", dense, -_OFFSET),
        (1, 100, "above_sparse", "Sparse", sparse, _OFFSET),
        (2, 1, "divergence", "Sparse", sparse, 0),
    ):
        points, *ends = (scale * table[f"{value}{end}"] for end in ("", "_low", "_high"))
        rows = [row + offset for row in range(n)]
        for row, *line in zip(rows, *ends, strict=True):
            grid.add_line(figure, (1, column), x=line, y=[row] * 2, colour=colour, opacity=_PALE)
        style: dict[str, Any] = {"colour": colour, "name": name, "hover": hover}
        grid.add_line(figure, (1, column), x=points.tolist(), y=rows, point_size=_POINT, **style)
    grid.add_legend(figure)
    if compared.left_out:
        grid.add_notes(figure, [f"Left out: {', '.join(compared.left_out)}."])
    return grid.GridFigure(figure, f"Skills: {compared.verdict}")
