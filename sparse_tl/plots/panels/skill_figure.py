"""Figure of compared skills: dense and sparse shares of right above wrong, and the divergence."""

from __future__ import annotations

from typing import Any

from sparse_tl.calls.arguments import checked
from sparse_tl.plots.page.palette import AXIS, MODEL_PAIRS, MUTED, RULE_WEIGHT, TICK_SIZE
from sparse_tl.plots.page.token_text import clip_text, text_width, visible_text
from sparse_tl.plots.panels.grid_figure import GridFigure
from sparse_tl.plots.panels.legends import add_legend_below, add_notes
from sparse_tl.plots.panels.plotly_panels import (
    LONGEST_NAME,
    add_line,
    add_points,
    fitting_width,
    hover_text,
    panel_figure,
    plain_text,
    ticks,
)
from sparse_tl.tasks import SkillComparison

_GAP, _ROW, _WIDEST, _LABELS = 24, 22, 280, 52
_OFFSET, _TICK, _PALE = 0.16, 0.3, 0.45


@checked
def skill_figure(compared: SkillComparison) -> GridFigure:
    """Draw right above wrong of both models and the divergence, the largest fall at the top.

    Pale lines are 95 % intervals.

    Args:
        compared: what `measure_skills` returned.

    Returns:
        The figure; call its `save` to write it to a file.

    Raises:
        ValueError: no family was measured.
    """
    table: Any = compared.to_pandas()
    if "change" not in table:
        raise ValueError("no family was measured, so there is nothing to draw")
    table = table.dropna(subset="change").sort_values("change")
    titles = [visible_text(title) for title in table["title"]]
    labels = [clip_text(title, TICK_SIZE, LONGEST_NAME + _LABELS) for title in titles]
    more = max(0.0, *(text_width(label, TICK_SIZE) - _LABELS for label in labels))
    n, panels = len(table), ["Right above Wrong (%)", "Divergence (nats)"]
    width = fitting_width(2, gap=_GAP, most=_WIDEST, beside=more)
    figure = panel_figure([panels], x="", y="", width=width, height=_ROW * n, gap=_GAP)
    margin, total = figure.layout.margin.l + more, round(figure.layout.width + more)
    figure.update_layout(width=total, margin_l=margin)
    names = [plain_text(label) for label in labels]
    figure.update_yaxes(range=(n - 0.5, -0.5), tickvals=[*range(n)], ticktext=names)
    for column, most in enumerate((100, 1.05 * table["divergence_high"].max() or 1.0), start=1):
        span = (-0.02 * most, 1.02 * most)
        figure.update_xaxes(range=span, **ticks(0, most), row=1, col=column)
    hover = []
    for row, one in enumerate(table.itertuples()):
        chance: dict[str, Any] = {"x": [100 * one.chance] * 2, "y": [row - _TICK, row + _TICK]}
        add_line(figure, 1, 1, **chance, colour=MUTED, width=RULE_WEIGHT, name="Chance")
        ends = [100 * one.above_dense, 100 * one.above_sparse]
        add_line(figure, 1, 1, x=ends, y=[row - _OFFSET, row + _OFFSET], colour=AXIS, width=1.0)
        words = [
            f"Right above wrong {one.above_dense:.0%} to {one.above_sparse:.0%}, p {one.p:.2g}",
            f"Right {one.right_dense:.0%} to {one.right_sparse:.0%} of {one.prompts:.0f} prompts",
            f"{one.edges:,.0f} of {one.possible:,.0f} attention edges per token",
        ]
        hover.append(hover_text([titles[row], *words]))
    dense, sparse = MODEL_PAIRS[0]
    for column, scale, value, name, colour, offset in (
        (1, 100, "above_dense", "Dense", dense, -_OFFSET),
        (1, 100, "above_sparse", "Sparse", sparse, _OFFSET),
        (2, 1, "divergence", "Sparse", sparse, 0),
    ):
        points, *ends = (scale * table[f"{value}{end}"] for end in ("", "_low", "_high"))
        rows = [row + offset for row in range(n)]
        for row, *line in zip(rows, *ends, strict=True):
            add_line(figure, 1, column, x=line, y=[row] * 2, colour=colour, opacity=_PALE)
        places = {"x": points.tolist(), "y": rows}
        add_points(figure, 1, column, **places, colour=colour, name=name, hover=hover)
    add_legend_below(figure)
    if compared.left_out:
        add_notes(figure, [f"Left out: {', '.join(compared.left_out)}."])
    return GridFigure(figure, f"Skills: {compared.verdict}")
