"""Scores beside exact effects: which parts are drawn, what is compared, and how well it agrees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from sparse_tl.backend import Model, adapt
from sparse_tl.circuits import (
    ScoreCheck,
    Scores,
    attribute_circuit_edges,
    attribute_heads,
    check_scores,
    evaluate_heads,
    patch_exactly,
)
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.metrics import logit_difference

Build = Callable[..., Model]


def test_the_strongest_parts_and_others_are_patched_exactly(
    model: Model, pairs: PromptPairs
) -> None:
    scores = attribute_circuit_edges(model, pairs, logit_difference, progress=False)
    found = check_scores(model, pairs, logit_difference, scores, n=5, progress=False)
    exact = patch_exactly(model, pairs, logit_difference, progress=False)
    strongest, drawn = _parts(found)
    assert strongest == set(sorted(exact.index, key=lambda name: -abs(scores[name]))[:5])
    assert len(strongest | drawn) == 10
    for row in found.table.itertuples():
        assert row.score == scores[row.part]
        assert row.exact == pytest.approx(exact[row.part], rel=1e-9, abs=1e-12)
        assert row.miss == row.score - row.exact
    assert found.table["miss"].abs().is_monotonic_decreasing
    others = check_scores(model, pairs, logit_difference, scores, n=5, seed=1, progress=False)
    assert _parts(others)[0] == strongest and _parts(others)[1] != drawn


def _parts(found: ScoreCheck) -> tuple[set[str], set[str]]:
    """The strongest parts, and those drawn at random."""
    halves = dict(iter(found.table.groupby("drawn")["part"]))
    return set(halves["strongest"]), set(halves["random"])


def test_scores_that_are_exact_agree(linear: Model, pairs: PromptPairs) -> None:
    for attribute in (attribute_circuit_edges, attribute_heads):
        scores = attribute(linear, pairs, logit_difference, method="eap", progress=False)
        n = adapt(linear).n_heads
        found = check_scores(linear, pairs, logit_difference, scores, n=n, progress=False)
        assert found.to_pandas()["miss"].abs().max() < 1e-9
        # Of edges without effect, rounding has ranks and signs of its own.
        strongest = found.agreement().loc["strongest"]
        assert strongest[["pearson", "spearman", "sign"]].tolist() == pytest.approx([1, 1, 1])


def test_agreement_by_hand(tmp_path: Path) -> None:
    """Ranks 1 2 3 4 against 2 1 3 4: 1 - 6 * 2 / (4 * 15) = 0.8."""
    found = ScoreCheck(
        "eap",
        "heads",
        3,
        pd.DataFrame(
            {
                "part": ["a0.h0", "a0.h1", "a1.h0", "a1.h1", "a2.h0", "a2.h1"],
                "drawn": ["strongest"] * 4 + ["random"] * 2,
                "score": [1.0, 2.0, 3.0, 4.0, 0.5, 0.0],
                "exact": [2.0, -1.0, 3.0, 6.0, -0.5, 0.0],
            }
        ),
    )
    table = found.agreement()
    assert table.index.tolist() == ["strongest", "random"]
    # Deviations -1.5 -0.5 0.5 1.5 and -0.5 -3.5 0.5 3.5: 8 / sqrt(5 * 25).
    assert table.loc["strongest"].tolist() == pytest.approx([4, 8 / 125**0.5, 0.8, 0.75])
    assert table.loc["random", "sign"] == 0  # one has no effect
    assert "strongest r 0.72, rank correlation 0.80, sign 75%" in repr(found)


def test_exact_effects_rank_heads(model: Model, pairs: PromptPairs) -> None:
    """Scores of any origin are cut and evaluated like those of attribution."""
    heads = adapt(model).graph.heads
    exact = patch_exactly(model, pairs, logit_difference, heads.names(heads.places), progress=False)
    scores = Scores.of(heads, exact, "exact")
    order = sorted(exact.index, key=lambda name: -abs(exact[name]))
    assert scores.to_pandas()["head"].tolist() == order
    assert scores[order[0]] == exact[order[0]]
    found = evaluate_heads(model, pairs, logit_difference, scores, [1], progress=False)
    assert found.sizes == (1,)
    with pytest.raises(ValueError, match="a9.h9"):
        Scores.of(heads, {"a9.h9": 1.0}, "exact")


@pytest.mark.parametrize("positions", ["tokens", "spans"])
def test_edges_at_positions(model: Model, pairs: PromptPairs, positions: str) -> None:
    pairs = pairs.select(pairs.positions == pairs.positions[0]).with_spans({"END": -1})
    scores = attribute_circuit_edges(
        model, pairs, logit_difference, positions=positions, progress=False
    )
    found = check_scores(model, pairs, logit_difference, scores, n=2, progress=False)
    exact = patch_exactly(
        model, pairs, logit_difference, [*found.table["part"]], positions=positions, progress=False
    )
    assert found.table["exact"].tolist() == exact.tolist()
