"""Numbers that were once wrong: what is possible, what is counted, and what autograd loses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from double_precision import DoublePrecision
from tiny import hooked_alone
from torch.utils.checkpoint import checkpoint

from sparse_tl import HookPoints, SparseTransformer, evaluate_held_out, gated
from sparse_tl.backend import Model, adapt, checkpointed_activations, deferred
from sparse_tl.data import TokenBatch
from sparse_tl.gates.sparse import blockwise

Build = Callable[..., Model]
# A bridge keeps keys and values unless told otherwise; layers that run again would add them twice.


def _tokens(rows: int = 3, length: int = 7) -> torch.Tensor:
    return torch.randint(13, (rows, length), generator=torch.Generator().manual_seed(0))


@hooked_alone
@pytest.mark.every_case
@pytest.mark.parametrize("ignored", [-torch.inf, -1e5, torch.finfo(torch.float32).min])
def test_the_future_is_not_possible_whatever_it_is_masked_with(
    build_tiny: Build, ignored: float
) -> None:
    """Checkpoints of older TransformerLens carry a buffer of -1e5."""
    model = build_tiny()
    for block in model.blocks:
        block.attn.IGNORE = torch.tensor(ignored)
    sparse = SparseTransformer(model)
    counts = sparse.count_attention_edges(_tokens())
    assert counts.possible.unique().tolist() == [7 * 8 / 2]
    assert counts.tokens.tolist() == [7, 7, 7]
    dense = evaluate_held_out(sparse.unwrap(), TokenBatch.next_token(_tokens()))
    assert dense.possible_attention_edges == dense.active_attention_edges == 4 * 7 * 8 / 2


@pytest.mark.every_case
@pytest.mark.parametrize(("left", "lowest"), [(False, -1e5), (True, -1e5), (False, -torch.inf)])
def test_a_hook_on_scores_masks_nothing(build_tiny: Build, left: bool, lowest: float) -> None:
    """Only `attention_mask` says what is padding; scores may be as low for other reasons."""
    model, tokens = build_tiny(), _tokens()
    padding = torch.zeros_like(tokens, dtype=torch.bool)
    padding[:, slice(0, 2) if left else slice(-2, None)] = True

    def lower(scores: torch.Tensor, hook: Any) -> torch.Tensor:
        return scores.masked_fill(padding[:, None, None, :], lowest)

    for layer in range(2):
        model.add_hook(f"blocks.{layer}.attn.hook_attn_scores", lower, is_permanent=True)
    sparse = SparseTransformer(model, initial_bias=4.0)
    counts = sparse.count_attention_edges(tokens)
    assert counts.possible.unique().tolist() == [7 * 8 / 2]
    assert counts.active.unique().tolist() == [5 * 6 / 2 + (0 if left else 2 * 5)]
    counts = sparse.count_attention_edges(tokens, attention_mask=(~padding).long())
    assert counts.possible.unique().tolist() == counts.active.unique().tolist() == [5 * 6 / 2]
    assert counts.tokens.tolist() == [5, 5, 5]


@pytest.mark.every_case
@pytest.mark.parametrize("sharp", [1e3, 1e5, 1e7])
def test_a_vanishing_weight_is_still_possible(build_tiny: Build, sharp: float) -> None:
    """A sharp pattern has exact zeros; they are not the model's mask, however low their scores."""
    model = build_tiny()
    with torch.no_grad():
        model.blocks[0].attn.W_Q.mul_(sharp)
    assert SparseTransformer(model).count_attention_edges(_tokens()).possible.unique() == 28


def test_moving_a_wrapped_model_moves_its_configuration(build_tiny: Build) -> None:
    sparse = SparseTransformer(build_tiny())
    sparse.to(torch.float64)
    assert sparse.cfg.dtype == sparse.model.embed.W_E.dtype == torch.float64
    sparse.to("meta")
    assert str(sparse.cfg.device) == str(sparse.model.embed.W_E.device) == "meta"


LONG = 12
"""Tokens from which attention goes by blocks in these tests: more than a head has dimensions."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "QUERIES_AT_ONCE", 2)


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["plain", "grouped"])
def test_blocks_compute_what_whole_patterns_do(
    build_tiny: Build, monkeypatch: pytest.MonkeyPatch, blocks: list[Any], kind: str
) -> None:
    """Logits, counts and every gradient; `test_blockwise` has all architectures, of bridges."""
    found: list[list[torch.Tensor]] = []
    for long in (LONG + 1, LONG):
        monkeypatch.setattr(deferred, "LONG", long)
        sparse = SparseTransformer(build_tiny(kind, dtype="float64"), initial_bias=0.3)
        with DoublePrecision(), sparse.sampled(torch.Generator().manual_seed(0), 0.0):
            logits, counts = sparse.run_with_counts(_tokens(3, LONG), pressure=0.2)
        (logits.logsumexp(-1).sum() + 0.1 * counts.expected.sum()).backward()
        assert bool(blocks) == (long == LONG)
        gradients = [p.grad for p in sparse.parameters() if p.grad is not None]
        found.append([logits.detach(), counts.active, counts.expected.detach(), *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("at_once", [False, True], ids=["each", "together"])
@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("by_blocks", [False, True], ids=["whole", "by blocks"])
def test_checkpointed_activations_have_the_same_gradients(
    build_tiny: Build,
    monkeypatch: pytest.MonkeyPatch,
    blocks: list[Any],
    pieces: int,
    at_once: bool,
    by_blocks: bool,
) -> None:
    """Layers run again in the backward pass, when the block that sampled gates is left.

    Two of the rows are equal: only the order of the passes tells their draws apart.
    """
    tokens = _tokens(4, LONG)
    tokens[1] = tokens[0]
    if by_blocks:
        monkeypatch.setattr(deferred, "LONG", LONG)

    def gradients(checkpointed: bool) -> list[torch.Tensor]:
        sparse = SparseTransformer(build_tiny(dtype="float64"), initial_bias=0.0)
        generator = torch.Generator().manual_seed(1)
        cost = torch.linspace(0.5, 2.0, LONG)
        sums = []
        for some in tokens.split(4 // pieces):
            once_more = checkpointed_activations(sparse) if checkpointed else nullcontext()
            with once_more, sparse.sampled(generator):
                logits, counts = sparse.run_with_counts(some, pressure=0.1, edge_cost=cost)
            assert counts.cost is not None
            sums.append(logits.logsumexp(-1).sum() + counts.cost.sum())
            if not at_once:
                sums.pop().backward()
        if at_once:
            torch.stack(sums).sum().backward()
        return [p.grad for p in sparse.parameters() if p.grad is not None]

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert bool(blocks) == by_blocks


@pytest.mark.every_case
@pytest.mark.parametrize("by_blocks", [False, True], ids=["whole", "by blocks"])
@pytest.mark.parametrize("way", ["open", "kept gates"])
def test_what_is_computed_again_does_not_depend_on_the_settings_by_then(
    build_tiny: Build,
    monkeypatch: pytest.MonkeyPatch,
    by_blocks: bool,
    way: str,
) -> None:
    if by_blocks:
        monkeypatch.setattr(deferred, "LONG", LONG)
    tokens, found = _tokens(3, LONG), []
    for checkpointed in (False, True):
        sparse = SparseTransformer(build_tiny(dtype="float64"), initial_bias=0.0)
        once_more = checkpointed_activations(sparse) if checkpointed else nullcontext()
        with once_more:
            if way == "open":
                with sparse.opened():
                    logits = sparse(tokens)
            else:
                logits = sparse.run_with_counts(tokens, keep_gates=True)[0]
        logits.logsumexp(-1).sum().backward()
        found.append(sparse.model.embed.W_E.grad)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_a_copy_made_while_activations_are_checkpointed_is_one(build_tiny: Build) -> None:
    sparse = SparseTransformer(build_tiny())
    with checkpointed_activations(sparse):
        copied = sparse.dense_copy()
    before = copied(_tokens())
    with torch.no_grad():
        for parameter in sparse.model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(copied(_tokens()), before)


def test_a_checkpointed_pass_may_be_long_over(build_tiny: Build) -> None:
    sparse, found = SparseTransformer(build_tiny("float64", seed=1), initial_bias=0.0), []
    for kept in (nullcontext, lambda: checkpointed_activations(sparse)):
        sparse.zero_grad()
        with kept(), sparse.sampled(torch.Generator().manual_seed(0)):
            first = sparse(_tokens(2, 5)).logsumexp(-1).sum()
            for _ in range(9):
                sparse(_tokens(2, 5))
        first.backward()
        found.append(sparse.gates.bias.grad)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    assert found[0].abs().max() > 1e-6


def test_a_layer_that_other_code_repeats_is_refused(build_tiny: Build) -> None:
    sparse, tokens = SparseTransformer(build_tiny()), _tokens(2, 5)
    with sparse.sampled():
        logits = checkpoint(sparse, tokens, use_reentrant=False)
    with pytest.raises(RuntimeError, match="checkpointed_activations"):
        logits.sum().backward()


def test_a_model_that_ignores_its_hooks_is_not_wrapped(build_tiny: Build) -> None:
    model = build_tiny()
    attention = model.blocks[1].attn
    plain = attention.forward
    kept = {}

    def deaf(*args: Any, **kwargs: Any) -> torch.Tensor:
        """As attention that is handed to another library: hooks see it, and cannot move it."""
        kept["out"] = plain(*args, **kwargs)
        kwargs.pop("past_key_values", None)
        with torch.no_grad():
            return model_twin.blocks[1].attn(*args, **kwargs)

    model_twin = adapt(model).copy()
    attention.__dict__["forward"] = deaf  # a bridge would hand it on to what it wraps
    with pytest.raises(ValueError, match="layer 1 .* does not come from its heads"):
        SparseTransformer(model)


def test_a_pass_over_some_layers_need_not_reach_gates_on_others(build_tiny: Build) -> None:
    """Such a pass is how analyses run a HookedTransformer, also inside the block."""
    model, tokens = build_tiny(), _tokens()
    with gated(model, HookPoints(["blocks.0.hook_resid_post"], ()), torch.zeros(1)):
        model(tokens, stop_at_layer=0)
        adapt(model).final(model.embed(tokens), from_layer=1)
