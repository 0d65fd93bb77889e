"""Nothing that follows a prompt's last token changes any number; padding on the left is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from analyses import call, check_same, choices, of_prompts, taking
from architectures import plain_transformer
from random_models import random_pairs, shaken
from tiny import tokenizer_of

from sparse_tl import (
    PromptPairs,
    SparseTransformer,
    evaluate_heads,
    logit_difference,
    patch_exactly,
)
from sparse_tl.backend import Model, boot
from sparse_tl.circuits import attribute_heads, find_circuit

Build = Callable[..., Model]
ANALYSES = of_prompts()
REFERENCED = set(taking(PromptPairs)) - set(ANALYSES)


def mixed_pairs() -> PromptPairs:
    """Two pairs of each of three lengths, all with padding, and with a span."""
    pairs = replace(random_pairs(6, length=8), positions=torch.tensor([3, 4, 6] * 2))
    return pairs.with_spans({"first": range(2), "END": -1})


def with_other_padding(pairs: PromptPairs) -> PromptPairs:
    """The same prompts with other tokens behind the last one."""
    behind = torch.arange(pairs.clean.shape[1]) > pairs.positions[:, None]
    more = torch.randint(1, 13, pairs.clean.shape, generator=torch.Generator().manual_seed(9))
    changed = {
        side: torch.where(behind, (getattr(pairs, side) + more) % 13, getattr(pairs, side))
        for side in ("clean", "corrupted")
    }
    return replace(pairs, **changed)


def outcome(function: Any, model: Any, pairs: PromptPairs, options: dict[str, Any]) -> Any:
    """The result, or why prompts of several lengths are refused."""
    try:
        return call(function, model, pairs, **options)
    except ValueError as error:
        assert "one length" in str(error) or "one token length" in str(error)
        return str(error)


def test_analyses_are_found_by_their_signatures() -> None:
    assert {"acdc", "evaluate_mib", "patch_exactly", "fit_head_gates"} <= set(ANALYSES)
    assert {"ablate_heads", "gated", "GatedRun", "continuations"} == REFERENCED
    assert {"patch": "resample"} in list(choices(evaluate_heads))


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("name", sorted(ANALYSES))
def test_padding_changes_no_number(build_tiny: Build, name: str, unchecked_types: None) -> None:
    model, pairs = shaken(build_tiny(dtype="float64")), mixed_pairs()
    for options in choices(ANALYSES[name]):
        both = (pairs, with_other_padding(pairs))
        found = [outcome(ANALYSES[name], model, some, options) for some in both]
        check_same(*found)
        if isinstance(found[0], str):
            asked = {"mean", "tokens"} & set(options.values())
            assert asked or name == "patch_activations", "refused without need"
            alike = [some.select(some.positions == 4) for some in both]
            check_same(*(call(ANALYSES[name], model, some, **options) for some in alike))


@cache
def long_rope(dtype: str = "float64") -> Model:
    """Its rotary positions are others in passes of more than five tokens."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 100.0}
    rope = {"rope_type": "longrope", **factors}
    changed = {"original_max_position_embeddings": 5, "rope_parameters": rope}
    changed |= {"num_key_value_heads": 4}
    return boot(plain_transformer("phi3", dtype, **changed), name="long")


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("name", sorted(ANALYSES))
def test_padding_that_would_change_numbers_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="'long' uses other rotary positions|of one length"):
        call(ANALYSES[name], long_rope(), mixed_pairs())


def test_plain_calls_and_counts_of_long_and_short_prompts_are_refused() -> None:
    model, pairs = long_rope(), mixed_pairs()
    sparse, mask = SparseTransformer(model, initial_bias=4.0), pairs.attention_mask
    assert mask is not None
    for attention_mask in (mask, mask.flip(1)):
        with pytest.raises(ValueError, match="'long' uses other rotary positions"):
            sparse(pairs.clean, attention_mask=attention_mask)
    sparse(pairs.clean[:, :5], attention_mask=mask[:, :5])
    with pytest.raises(ValueError, match="'long' uses other rotary positions"):
        sparse.count_attention_edges(pairs)


def test_a_longer_prompt_before_does_not_change_what_is_measured() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    changed = {"max_position_embeddings": 8, "rope_parameters": rope}
    model = boot(plain_transformer("llama", "float64", **changed), name="grown")
    pairs = random_pairs(2, length=8)
    before = attribute_heads(model, pairs, logit_difference)
    model(torch.ones(1, 20, dtype=torch.long))
    with pytest.raises(ValueError, match="'grown' are still scaled"):
        attribute_heads(model, pairs, logit_difference)
    model(pairs.clean[:, :4])
    check_same(attribute_heads(model, pairs, logit_difference), before)


def test_resampled_prompts_are_others_of_the_same_length(build_tiny: Build) -> None:
    """Two of each length, so that each is the other's donor: by plain hooks, without padding."""
    model, pairs = shaken(build_tiny(dtype="float64")), mixed_pairs()
    name, change, score = "blocks.0.attn.hook_z", [], []
    for row, other in enumerate([3, 4, 5, 0, 1, 2]):
        end = int(pairs.positions[row]) + 1
        donor, alone = pairs.clean[other : other + 1, :end], pairs.clean[row : row + 1, :end]
        with torch.no_grad():
            _, cache = model.run_with_cache(donor)
        wanted = cache[name][:, :, 1]

        def patched(z: torch.Tensor, hook: Any, wanted: torch.Tensor = wanted) -> torch.Tensor:
            z = z.clone()
            z[:, :, 1] = wanted
            return z

        kept: list[torch.Tensor] = []

        def keep(z: torch.Tensor, hook: Any, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            kept.append(z.detach().requires_grad_())
            return kept[0]

        pair = pairs.select(slice(row, row + 1))
        clean = logit_difference(model.run_with_hooks(alone, fwd_hooks=[(name, keep)])[:, -1], pair)
        (slope,) = torch.autograd.grad(clean.sum(), kept)
        score.append(((wanted - kept[0][:, :, 1]) * slope[:, :, 1]).sum().item())
        with torch.no_grad():
            run = model.run_with_hooks(alone, fwd_hooks=[(name, patched)])
        change.append((logit_difference(run[:, -1], pair) - clean).item())
    exact = patch_exactly(model, pairs, logit_difference, ["a0.h1"], patch="resample")["a0.h1"]
    assert exact == pytest.approx(sum(change) / 6, rel=1e-9)
    found = attribute_heads(model, pairs, logit_difference, method="eap", patch="resample")
    assert found["a0.h1"] == pytest.approx(sum(score) / 6, rel=1e-9)
    assert abs(exact) > 1e-3


def test_a_prompt_without_another_of_its_length_is_not_resampled(build_tiny: Build) -> None:
    pairs = mixed_pairs().select(slice(0, 5))
    message = r"at least two prompt pairs of every length.*1 of 7 tokens\. Leave it out"
    with pytest.raises(ValueError, match=message):
        patch_exactly(build_tiny(), pairs, logit_difference, ["a0.h1"], patch="resample")


# Padding on the left

ROWS = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 5, 3, 2, 1, 1]])
"""Begin with BOS, which is the padding token as well."""
LEFT = torch.tensor([[0, 0, 0, 1, 2, 3], [0, 4, 3, 2, 1, 1]])


def _pairs_of(clean: torch.Tensor) -> PromptPairs:
    corrupted = torch.where(clean == 0, 0, clean % 5 + 1)
    ends, answers = torch.full((len(clean),), clean.shape[1] - 1), torch.ones(len(clean), 1).long()
    return PromptPairs(clean, corrupted, answers, answers + 1, ends)


@pytest.fixture(scope="module")
def reads_words(build_tiny: Build, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model with a tokenizer, of which token 0 is BOS, EOS and padding."""
    words = [f"w{token}" for token in range(13)]
    tokenizer = tokenizer_of(words, tmp_path_factory.mktemp("tokenizer"))
    return build_tiny(dtype="float64", tokenizer=tokenizer)


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("name", sorted(set(ANALYSES) & set(taking(PromptPairs))))
def test_pairs_padded_on_the_left_are_refused(reads_words: Model, name: str) -> None:
    message = "pair 0 begins with 3 padding tokens, 'w0'.*padded on the right"
    with pytest.raises(ValueError, match=message):
        call(ANALYSES[name], reads_words, _pairs_of(LEFT))


def test_the_pair_that_is_padded_on_the_left_is_named(reads_words: Model) -> None:
    """`find_circuit` shuffles pairs before it divides them."""
    pairs = _pairs_of(torch.cat([LEFT[:1], *[ROWS] * 4]))
    with pytest.raises(ValueError, match="pair 0 begins with"):
        find_circuit(reads_words, pairs, logit_difference, progress=False)


@pytest.mark.parametrize(
    ("clean", "refused"),
    [
        (ROWS, False),
        (ROWS[:, 1:], False),
        (torch.cat([ROWS[:1, 1:], LEFT[1:, :5]]), True),  # one token, where no prompt has BOS
        (LEFT[:1], True),
        (torch.tensor([[5, 5, 5, 1], [1, 1, 2, 5]]), False),  # prompts that repeat a token
    ],
)
def test_what_padding_on_the_left_is(
    reads_words: Model, clean: torch.Tensor, refused: bool
) -> None:
    pairs = _pairs_of(clean)
    if refused:
        with pytest.raises(ValueError, match="padded on the right"):
            patch_exactly(reads_words, pairs, logit_difference, ["a0.h1"])
    else:
        assert len(patch_exactly(reads_words, pairs, logit_difference, ["a0.h1"]))


def test_a_mask_token_is_text(build_tiny: Build, tmp_path: Path) -> None:
    """Also where it is the padding token, as in the addition models' vocabulary."""
    tokenizer = tokenizer_of([f"w{token}" for token in range(13)], tmp_path)
    tokenizer.mask_token = tokenizer.pad_token
    model = build_tiny(tokenizer=tokenizer)
    assert len(patch_exactly(model, _pairs_of(LEFT), logit_difference, ["a0.h1"]))
