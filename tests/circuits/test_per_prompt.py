"""What single prompts need: as a loop over pairs finds it, and what is said of pairs without it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparse_tl.backend import Model
from sparse_tl.circuits import (
    CircuitSizes,
    attribute_circuit_edges,
    circuit_sizes_per_prompt,
    evaluate_circuit_edges,
)
from sparse_tl.circuits.methods import search
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.metrics import NoEffectError, logit_difference


def one_by_one(model: Model, pairs: PromptPairs, level: float, **options: Any) -> list[float]:
    """The sizes of single pairs, by the functions that take any pairs."""
    found = []
    patch = options.get("patch", "corrupted")
    for row in range(len(pairs)):
        pair = pairs.select(slice(row, row + 1))
        try:
            scores = attribute_circuit_edges(
                model, pair, logit_difference, progress=False, **options
            )
            measured = evaluate_circuit_edges(
                model, pair, logit_difference, scores, patch=patch, progress=False
            )
            size = measured.curve("one").size_at(level)
        except NoEffectError:
            size = math.nan
        found.append(math.inf if size is None else size)
    return found


@pytest.mark.parametrize("method", ["eap", "eap-ig"])
def test_scores_by_pair_are_those_of_each_pair(
    model: Model, pairs: PromptPairs, method: str
) -> None:
    options = {"method": method, "steps": 3, "progress": False}
    found = attribute_circuit_edges(
        model, pairs, logit_difference, by_pair=True, batch_size=2, **options
    )
    assert found.values.shape == (len(pairs), *found.grid.exists.shape)
    for row, values in enumerate(found.values):
        pair = pairs.select(slice(row, row + 1))
        alone = attribute_circuit_edges(model, pair, logit_difference, **options)
        torch.testing.assert_close(values, alone.values, rtol=1e-9, atol=1e-9)
    together = attribute_circuit_edges(model, pairs, logit_difference, **options)
    torch.testing.assert_close(found.mean(), together.values, rtol=1e-9, atol=1e-9)
    assert found.values.std(dim=0).max() > 0.01


@pytest.mark.parametrize("patch", ["corrupted", "zero"])
def test_sizes_are_those_of_a_loop_over_pairs(model: Model, pairs: PromptPairs, patch: Any) -> None:
    """Also of a pair whose prompts are the same, which corruption leaves without an effect."""
    pairs = replace(pairs, corrupted=torch.cat([pairs.clean[:1], pairs.corrupted[1:]]))
    pairs = pairs.select(slice(0, 4))
    found = circuit_sizes_per_prompt(
        model,
        pairs,
        logit_difference,
        level=0.7,
        steps=2,
        patch=patch,
        batch_size=3,
        progress=False,
    )
    expected = one_by_one(model, pairs, 0.7, steps=2, patch=patch)
    torch.testing.assert_close(
        found.sizes, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0, equal_nan=True
    )
    assert int(found.sizes.isnan().sum()) == (patch == "corrupted")
    assert len(found.sizes[1:].unique()) > 1


def test_the_median_is_over_pairs_with_an_effect_and_counts_what_is_never_reached() -> None:
    found = CircuitSizes(torch.tensor([8.0, math.nan, 2.0, math.inf]), 0.9, 100)
    assert found.median == 8.0
    assert "1 not reached, 1 without an effect" in repr(found)
    assert found.to_pandas()["outcome"].tolist() == [
        "reached",
        "no effect",
        "reached",
        "not reached",
    ]
    assert CircuitSizes(torch.tensor([8.0, 2.0]), 0.9, 100).median == 5.0
    for sizes in ([math.nan], [math.inf, math.inf, 1.0], [1.0, math.inf]):
        assert CircuitSizes(torch.tensor(sizes), 0.9, 100).median is None


def test_a_pair_that_falls_short_is_infinite(model: Model, pairs: PromptPairs) -> None:
    ask = {"progress": False, "steps": 1}
    found = circuit_sizes_per_prompt(model, pairs, logit_difference, sizes=[0], **ask)
    assert found.sizes.tolist() == [math.inf] * len(pairs)


def test_sizes_beyond_all_edges_are_refused_before_any_pass(
    linear: Model, pairs: PromptPairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "attribute_circuit_edges", pytest.fail)
    with pytest.raises(ValueError, match=r"in 0\.\.\d+; it is 9999"):
        circuit_sizes_per_prompt(linear, pairs, logit_difference, sizes=[5, 9999], progress=False)
