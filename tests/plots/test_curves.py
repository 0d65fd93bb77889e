"""The figure of explained effect against parts kept."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import pytest

from sparse_tl.circuits import EffectCurve, SeedCurves
from sparse_tl.plots import effect_figure
from sparse_tl.plots.page.palette import MODEL_PAIRS


def curve(name: str, effects: dict[int, float], width: float = 0.05) -> EffectCurve:
    mean = list(effects.values())
    low, high = [e - width for e in mean], [e + width for e in mean]
    return EffectCurve(name, list(effects), mean, low, high)


# Both reach 0.9 exactly at a measured size: 100 and 20.
DENSE = curve("GPT-2", {0: 0.0, 10: 0.1, 100: 0.9, 144: 1.0})
SPARSE = curve("Sparse GPT-2", {0: 0.0, 10: 0.5, 20: 0.9, 144: 1.0})
LARGE = curve("OLMo-7B", {10: 0.0, 1000: 0.5, 100_000: 1.0})
SPARSE_LARGE = curve("Sparse OLMo-7B", {10: 0.0, 100: 0.95, 100_000: 1.0})
FOUR = {
    "Greater Than": [DENSE, SPARSE],
    "IOI": [DENSE, SPARSE],
    "Docstring": [LARGE, SPARSE_LARGE],
    "IOI Long": [LARGE, SPARSE_LARGE],
}


def labels(figure: go.Figure) -> list[str]:
    return [a.text for a in figure.layout.annotations if a.text.endswith("x")]


def dashed(figure: go.Figure) -> list[Any]:
    return [trace for trace in figure.data if trace.line.dash]


class TestFigure:
    def test_a_line_and_an_interval_per_curve(self) -> None:
        figure = effect_figure({"IOI": [DENSE, SPARSE]}, parts="heads").plotly
        interval, line, _, sparse_line, dash = figure.data
        assert (line.x, line.y) == (DENSE.sizes, DENSE.mean)
        assert (line.line.color, sparse_line.line.color) == MODEL_PAIRS[0]
        assert tuple(interval.x) == (0, 10, 100, 144, 144, 100, 10, 0)
        assert interval.y == (*DENSE.high, *reversed(DENSE.low))
        assert interval.fill == "toself"
        assert dash.x == pytest.approx((20, 100))
        assert dash.y == (0.9, 0.9)

    def test_legends_are_in_the_first_panel_of_each_pair_if_they_hide_no_curve(self) -> None:
        two = {"IOI": [DENSE, SPARSE], "Docstring": [LARGE, SPARSE_LARGE]}
        figure = effect_figure(two, parts="heads").plotly
        legends = [figure.layout.legend, figure.layout.legend2]
        assert [(legend.xanchor, legend.yanchor) for legend in legends] == [("right", "bottom")] * 2
        assert figure.layout.legend2.font.size == figure.layout.template.layout.legend.font.size
        late = curve("GPT-2", {0: 0.0, 143: 0.0, 144: 1.0})
        hidden = effect_figure({"IOI": [late, SPARSE]}, parts="heads").plotly
        assert hidden.layout.legend.y < 0  # below

    def test_multipliers_stand_above_their_lines(self) -> None:
        for parts in ("heads", "circuit_edges"):
            figure = effect_figure(FOUR, parts=parts).plotly
            # The large pair: 1000 * 100^0.8 against 10 * 10^(0.9 / 0.95).
            ratio = 1000 * 100**0.8 / 10 ** (1 + 0.9 / 0.95)
            assert labels(figure) == ["5.0x", "5.0x", f"{ratio:.1f}x", f"{ratio:.1f}x"]
            assert len(dashed(figure)) == 4
            for note in figure.layout.annotations:
                if note.text.endswith("x"):
                    assert note.xref.endswith(" domain") and note.x == 0.5
                    assert 0.9 < note.y < figure.layout.yaxis.range[1]

    def test_no_multiplier_where_a_curve_falls_short(self) -> None:
        short = curve("Sparse GPT-2", {0: 0.0, 144: 0.6})
        figure = effect_figure({"IOI": [DENSE, short], "One": [DENSE]}, parts="heads").plotly
        assert not labels(figure)
        assert not dashed(figure)


def of_seeds(name: str, *sizes: int) -> SeedCurves:
    """Curves of several seeds, which have 0.9 exactly at these sizes."""
    curves = [curve(name, {0: 0.0, size: 0.9, 10_000: 1.0}) for size in sizes]
    return SeedCurves(range(len(sizes)), curves)


class TestSeeds:
    DENSE = of_seeds("GPT-2", 400, 1000, 2000)
    SPARSE = of_seeds("Sparse GPT-2", 20, 100, 40)
    SHORT = SeedCurves(
        range(3),
        [*SPARSE.curves[:2], curve("Sparse GPT-2", {0: 0.0, 10_000: 0.8})],
    )

    def test_the_multiplier_is_the_median_of_the_seeds_own(self) -> None:
        figure = effect_figure({"IOI": [self.DENSE, self.SPARSE]}, parts="circuit_edges").plotly
        texts = [note.text for note in figure.layout.annotations]
        assert "20.0x (10 to 50)" in texts
        (dash,) = dashed(figure)
        # From one thick line to the other.
        ends = sorted(seeds.median.size_at(0.9) for seeds in (self.DENSE, self.SPARSE))
        assert dash.x == pytest.approx(ends)

    def test_a_seed_that_does_not_reach_the_level_is_told(self) -> None:
        panels = {"IOI": [self.DENSE, self.SHORT], "Docstring": [self.DENSE, self.SPARSE]}
        layout = effect_figure(panels, parts="circuit_edges").plotly.layout
        said = {note.text: note for note in layout.annotations}
        below, above = said["1 of 3 seeds: not reached"], said["15.0x (10 to 20)"]
        assert 1 < below.y < above.y < layout.yaxis.range[1]
        # A multiplier that stands alone is next to the curves.
        assert said["20.0x (10 to 50)"].y == pytest.approx(below.y)

    def test_no_multiplier_is_told_where_no_seed_has_one(self) -> None:
        short = SeedCurves(range(3), self.SHORT.curves[2:] * 3)
        figure = effect_figure({"IOI": [self.DENSE, short]}, parts="circuit_edges").plotly
        assert "3 of 3 seeds: not reached" in [note.text for note in figure.layout.annotations]
        assert not dashed(figure)


def test_models_of_one_name_in_two_pairs_are_listed_in_both_colours() -> None:
    panels = {"IOI": [DENSE, SPARSE], "Docstring": [DENSE, SPARSE_LARGE]}
    figure = effect_figure(panels, parts="heads").plotly
    listed = [(trace.name, trace.line.color) for trace in figure.data if trace.showlegend]
    (dense, sparse), (other_dense, other_sparse) = MODEL_PAIRS
    assert listed == [
        *(("GPT-2", dense), ("Sparse GPT-2", sparse)),
        *(("GPT-2", other_dense), ("Sparse OLMo-7B", other_sparse)),
    ]
