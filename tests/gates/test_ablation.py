"""Heads taken out by hand write what was asked for, and everything is as before afterwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import SHAPES, in_pieces, tokenizer_of

from sparse_tl import PromptPairs
from sparse_tl.backend import Model
from sparse_tl.data.batches import TokenBatch, token_losses
from sparse_tl.gates import (
    GatedRun,
    Heads,
    SparseTransformer,
    ablate_attention_edges,
    ablate_heads,
)
from sparse_tl.head_roles import target_log_probabilities

Build = Callable[..., Model]
HEADS = [(0, 1), (1, 0)]


def _tokens(rows: int, length: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randint(13, (rows, length), generator=torch.Generator().manual_seed(seed))


def _z(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    _, cache = model.run_with_cache(tokens)
    return [cache[f"blocks.{layer}.attn.hook_z"] for layer in range(2)]


def test_a_call_without_with_warns_that_it_does_nothing(build_tiny: Build) -> None:
    with pytest.warns(UserWarning, match="only in a `with` block"):
        ablate_heads(build_tiny(), HEADS)


@torch.no_grad()
def test_every_pass_draws_reference_prompts_of_its_own(build_tiny: Build) -> None:
    """For each prompt one, at all heads: what two passes write are other rows of the reference."""
    model, tokens, reference = build_tiny(), _tokens(3), _tokens(40, seed=1)
    of_reference = [z[:, :, head] for z, (_, head) in zip(_z(model, reference), HEADS, strict=True)]
    drawn = []
    for seed in (3, 3, 4):
        with ablate_heads(model, HEADS, "resample", reference=reference, seed=seed):
            for _ in range(2):
                found = [
                    z[:, :, head] for z, (_, head) in zip(_z(model, tokens), HEADS, strict=True)
                ]
                same = [
                    (some[:, None] == every).flatten(2).all(dim=2)
                    for some, every in zip(found, of_reference, strict=True)
                ]
                assert torch.equal(*same) and same[0].any(dim=1).all()
                drawn.append(same[0].int().argmax(dim=1).tolist())
    assert drawn[:2] == drawn[2:4] and drawn[0] != drawn[1]
    assert drawn[4] not in drawn[:4]


def test_mean_heads_write_their_mean_position_by_position(build_tiny: Build) -> None:
    model, reference = build_tiny(), _tokens(5, 8, seed=1)
    expected = _z(model, reference)[0][:, :, 1].mean(dim=0)
    with ablate_heads(model, [(0, 1)], "mean", reference=reference):
        found = _z(model, _tokens(2))[0][:, :, 1]
    assert torch.allclose(found, expected[:6].expand(2, -1, -1))


@pytest.mark.parametrize("kind", ["zero", "mean", "resample"])
def test_a_key_value_cache_changes_nothing(build_tiny: Build, kind: str) -> None:
    model, tokens = build_tiny("float64"), _tokens(3)
    options = {} if kind == "zero" else {"reference": _tokens(5, seed=1)}
    with ablate_heads(model, HEADS, kind, **options):
        whole = model(tokens)
    with ablate_heads(model, HEADS, kind, **options):
        parts = list(in_pieces(model, (tokens[:, :4], tokens[:, 4:5], tokens[:, 5:])))
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-10)


@pytest.mark.parametrize("kind", ["zero", "mean", "resample"])
def test_gates_are_measured_under_an_ablation(build_tiny: Build, kind: str) -> None:
    model, tokens = build_tiny("float64"), _tokens(3)
    options = {} if kind == "zero" else {"reference": _tokens(5, seed=1)}
    rows = TokenBatch.next_token(tokens)
    with ablate_heads(model, HEADS, kind, **options):
        logits = model(tokens)
    with ablate_heads(model, HEADS, kind, **options):
        found = target_log_probabilities(model, rows, torch.ones(2, 2, 2).double())
    losses = token_losses(logits[rows.loss_mask], rows.loss_labels())
    expected = -losses.view(3, 5).sum(dim=1)
    assert torch.allclose(found, expected.expand(2, -1), atol=1e-10)


def test_heads_may_be_named(build_tiny: Build) -> None:
    model, tokens = build_tiny("float64"), _tokens(2)
    for by_pair, by_name in (([(0, 1), (1, 0)], ["a0.h1", "a1.h0"]), ([(0, 1)], [(0, 1), "a0.h1"])):
        with ablate_heads(model, by_pair):
            expected = model(tokens)
        with ablate_heads(model, by_name):
            assert torch.equal(model(tokens), expected)
    with ablate_attention_edges(model, heads=[(1, 0)], key=0):
        expected = model(tokens)
    with ablate_attention_edges(model, heads=["a1.h0"], key=0):
        assert torch.equal(model(tokens), expected)


# Attention edges

EDGES = [(0, 1, 4, 2), (0, 0, 5, 1), (0, 1, 5, 3), (1, 0, 5, 5)]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("sparse", [False, True])
def test_cut_edges_are_zero_in_the_pattern_and_nothing_else_is(
    build_tiny: Build, kind: str, sparse: bool
) -> None:
    model: Any = build_tiny(kind, dtype="float64")
    model = SparseTransformer(model, initial_bias=0.0) if sparse else model
    tokens = _tokens(3)
    plain = model(tokens)

    def by_hand(pattern: torch.Tensor, hook: Any) -> torch.Tensor:
        for layer, head, query, key in EDGES:
            if hook.layer() == layer:
                pattern[:, head, query, key] = 0
        return pattern

    points = [(f"blocks.{layer}.attn.hook_pattern", by_hand) for layer in (0, 1)]
    expected = model.run_with_hooks(tokens, fwd_hooks=points)
    named = ["a0.h1:2->4", "a0.h0:1->5", "a0.h1:3->5", "a1.h0:5->5"]
    for edges in (EDGES, named):
        with ablate_attention_edges(model, edges):
            assert torch.equal(model(tokens), expected)
    assert torch.equal(model(tokens), plain)
    # What comes before the first cut edge is read is as it was.
    assert torch.equal(expected[:, :4], plain[:, :4])


def test_an_edge_beyond_the_prompt_is_refused(build_tiny: Build) -> None:
    model = build_tiny()
    with (
        pytest.raises(ValueError, match="beyond the prompt of 6 tokens"),
        ablate_attention_edges(model, [(0, 0, 6, 0)]),
    ):
        model(_tokens(2))
    assert not model.hook_dict["blocks.0.attn.hook_pattern"].fwd_hooks


# Reference prompts of several lengths


def _pairs() -> PromptPairs:
    """Three pairs of 4 tokens and three of 6, padded to 8."""
    both = _tokens(6, 8), _tokens(6, 8, seed=1)
    answers = torch.ones(6, 1, dtype=torch.long)
    return PromptPairs(*both, answers, answers + 1, torch.tensor([3, 5] * 3))


@pytest.mark.parametrize("kind", ["mean", "resample"])
def test_columns_of_prompts_of_several_lengths_are_not_combined(
    build_tiny: Build, kind: Any
) -> None:
    model, pairs, read = build_tiny("float64"), _pairs(), torch.ones(6, 8, dtype=torch.bool)
    message = r"prompts of one length.*lengths of \[4, 6\] tokens.*by_length"
    with (
        pytest.raises(ValueError, match=message),
        ablate_heads(model, HEADS, kind, reference=pairs),
    ):
        pass
    with pytest.raises(ValueError, match=message):
        GatedRun(model, Heads(), pairs.clean, read, kind, reference=pairs)


def test_references_of_one_length_write_what_they_do_without_padding(build_tiny: Build) -> None:
    """By hand and in stacks, whatever follows their last token; longer prompts are refused."""
    model, pairs = build_tiny("float64"), _pairs()
    short, long = pairs.by_length()
    assert (short.clean.shape, long.clean.shape) == ((3, 4), (3, 6))
    padded = pairs.select(pairs.positions == 3)
    expected = _z(model, padded.clean[:, :4])[0][:, :, 1].mean(dim=0)
    for reference in (short, padded, short.clean):
        with ablate_heads(model, [(0, 1)], "mean", reference=reference):
            found = _z(model, short.clean)[0][:, :, 1]
            logits = model(short.clean)
        torch.testing.assert_close(found, expected.expand(3, -1, -1))
        if reference is not short.clean:
            with (
                ablate_heads(model, [(0, 1)], "mean", reference=reference),
                pytest.raises(ValueError, match="at least as long as the 6 tokens"),
            ):
                model(long.clean)
        heads = torch.ones(2, 2, dtype=torch.float64)
        heads[0, 1] = 0
        read = torch.ones(3, 4, dtype=torch.bool)
        stacked = GatedRun(model, Heads(), short.clean, read, "mean", reference=reference)
        torch.testing.assert_close(stacked.logits(heads), logits.flatten(0, 1))
    corrupted = _z(model, short.corrupted)[0][:, :, 1]
    with ablate_heads(model, [(0, 1)], "corrupted", reference=pairs):
        found = _z(model, pairs.clean)[0][::2, :4, 1]
    torch.testing.assert_close(found, corrupted)


@pytest.mark.parametrize(
    ("prompts", "refused"),
    [
        ([[1, 2, 3, 0], [1, 2, 0, 0]], "prompt 1 ends with 2 padding tokens, another with 1"),
        ([[1, 2, 3, 4], [1, 2, 0, 0]], "prompt 1 ends with 2 padding tokens, another with 0"),
        ([[0, 0, 1, 2], [0, 3, 1, 2]], "prompt 0 begins with 2 padding tokens, another with 1"),
        ([[1, 2, 3, 4], [1, 2, 3, 0]], None),  # it ends with EOS
        ([[0, 2, 3, 4], [1, 2, 3, 4]], None),  # a window of text that begins with EOS
        ([[1, 2, 0, 0], [3, 4, 0, 0]], None),  # of one length
    ],
)
def test_padded_tensors_are_known_by_the_padding_token(
    build_tiny: Build, tmp_path: Path, prompts: list[list[int]], refused: str | None
) -> None:
    tokenizer = tokenizer_of([f"w{token}" for token in range(13)], tmp_path)
    model, reference = build_tiny(tokenizer=tokenizer), torch.tensor(prompts)
    expected = nullcontext() if refused is None else pytest.raises(ValueError, match=refused)
    with expected, ablate_heads(model, HEADS, "mean", reference=reference):
        pass
    with ablate_heads(model, HEADS, "corrupted", reference=reference):  # row by row
        pass


def test_a_mask_token_in_the_place_of_padding_is_text(build_tiny: Build, tmp_path: Path) -> None:
    """The addition models' placeholder is their padding token as well."""
    tokenizer = tokenizer_of([f"w{token}" for token in range(13)], tmp_path)
    tokenizer.mask_token = tokenizer.pad_token
    model, rows = build_tiny(tokenizer=tokenizer), torch.tensor([[1, 2, 3, 0], [1, 2, 0, 0]])
    with ablate_heads(model, [(0, 1)], "mean", reference=rows):
        model(rows)
