"""Where patching everything changes nothing, every search and evaluation says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from analyses import call, taking
from random_models import random_pairs, shaken

from sparse_tl import PromptPairs, acdc, attribute_circuit_edges, evaluate, patch_exactly
from sparse_tl.backend import Model
from sparse_tl.circuits import Evaluation, MIBEvaluation, attribute_attention_edges
from sparse_tl.metrics import NoEffectError, logit_difference

Build = Callable[..., Model]
UNPATCHED = ("accuracy", "attribute_logits", "continuations", "head_behaviour", "measure_skill")
"""They run the prompts as they are, or divide by no effect."""
PATCHING = {
    name: function
    for name, function in taking(PromptPairs).items()
    if name not in ("gated", "ablate_heads", "GatedRun", *UNPATCHED)
}
"""All analyses that patch."""
OPTIONS = {"attribute_attention_edges": {"patch": "corrupted"}}
"""By default it patches zeros, whatever the corrupted prompts are."""


def equal_pairs() -> PromptPairs:
    pairs = random_pairs()
    pairs = pairs.select(pairs.positions == 3)
    return replace(pairs, corrupted=pairs.clean)


def effect_of(name: str, model: Model, pairs: PromptPairs, **options: Any) -> Any:
    found = call(PATCHING[name], model, pairs, **OPTIONS.get(name, {}), **options)
    if isinstance(found, MIBEvaluation):
        return found.cpr
    return found.effect if isinstance(found, Evaluation) else found


@pytest.fixture(scope="module")
def model(build_tiny: Build) -> Model:
    return shaken(build_tiny(dtype="float64"))


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("name", sorted(PATCHING))
def test_clean_equal_to_corrupted(model: Model, name: str) -> None:
    pairs = equal_pairs()
    with pytest.raises(NoEffectError, match="there is no effect to explain"):
        effect_of(name, model, pairs)
    behind = pairs.corrupted.clone()
    behind[:, 4:] = (behind[:, 4:] + 1) % 13  # after the position that is read
    with pytest.raises(NoEffectError, match="there is no effect to explain"):
        effect_of(name, model, replace(pairs, corrupted=behind))


@pytest.mark.every_case
@pytest.mark.parametrize("name", sorted(set(PATCHING) - {"prune_circuit_edges"}))
def test_a_metric_that_corruption_does_not_change(model: Model, name: str) -> None:
    """Prompts differ, but the metric is constant. Pruning has no metric."""
    pairs = random_pairs()
    pairs = pairs.select(pairs.positions == 3)
    with pytest.raises(NoEffectError, match="there is no effect to explain"):
        effect_of(name, model, pairs, metric=lambda logits, pairs: 0 * logits[:, 0])


@pytest.mark.parametrize("name", ["attribute_circuit_edges", "attribute_heads", "acdc"])
def test_the_mean_over_equal_prompts(model: Model, name: str) -> None:
    pairs = random_pairs(3, at=4)
    pairs = replace(pairs, clean=pairs.clean[:1].repeat(3, 1))
    with pytest.raises(NoEffectError):
        effect_of(name, model, pairs, patch="mean")


def test_effects_that_cancel_over_pairs_are_scored_by_pair(model: Model) -> None:
    """Of a pair and its opposite the mean effect is 0, but neither is without an effect."""
    pairs = random_pairs().select(slice(0, 1))
    both = {"clean": torch.cat([pairs.clean, pairs.corrupted])}
    both |= {"corrupted": both["clean"].flip(0), "positions": pairs.positions.repeat(2)}
    both |= {side: getattr(pairs, side).repeat(2, 1) for side in ("answers", "wrong")}
    scores = attribute_circuit_edges(
        model, PromptPairs(**both), logit_difference, method="eap", by_pair=True
    )
    alone = attribute_circuit_edges(model, pairs, logit_difference, method="eap")
    torch.testing.assert_close(scores.values[0], alone.values)
    with pytest.raises(NoEffectError):
        _ = evaluate(model, PromptPairs(**both), logit_difference, scores.top(5)).effect


def test_attention_that_is_closed_needs_no_corruption(model: Model) -> None:
    pairs = equal_pairs()
    assert attribute_attention_edges(model, pairs, logit_difference).values.abs().max() > 1e-3


def test_heads_that_do_nothing_are_a_result(build_tiny: Build) -> None:
    model, alike = shaken(build_tiny(dtype="float64")), random_pairs(at=5)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_O.zero_()
    for patch in ("zero", "resample", "corrupted"):
        exact = patch_exactly(model, alike, logit_difference, ["a0.h1"], patch=patch)
        assert exact["a0.h1"] == 0
        search = acdc(model, alike, threshold=1e-3, start="heads", patch=patch)
        assert len(search.circuit) == 0
