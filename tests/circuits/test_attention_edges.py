"""Scores of attention edges are the slope of a gate on the pattern, also under a sparse model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from architectures import plain_transformer
from torch import Tensor

from sparse_tl.backend import Model, boot
from sparse_tl.circuits import attribute_attention_edges
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import SparseTransformer
from sparse_tl.metrics import logit_difference

Build = Callable[..., Model]
EDGES = [(0, 1, 2, 1), (1, 0, 3, 3), (1, 1, 2, 0)]


def _metric_with_gate(
    model: Model, pairs: PromptPairs, edge: tuple[int, int, int, int], gate: Tensor
) -> Tensor:
    """The metric per pair with one attention edge multiplied by a gate."""
    layer, head, query, key = edge

    def close(pattern: Tensor, hook: object) -> Tensor:
        changed = pattern.clone()
        changed[:, head, query, key] *= gate
        return changed

    hooks = [(f"blocks.{layer}.attn.hook_pattern", close)]
    logits = model.run_with_hooks(pairs.clean, fwd_hooks=hooks)
    return logit_difference(pairs.read(logits), pairs)


@pytest.mark.parametrize("edge", EDGES)
def test_scores_are_the_slope_of_a_gate(
    model: Model, pairs: PromptPairs, edge: tuple[int, int, int, int]
) -> None:
    scores = attribute_attention_edges(model, pairs, logit_difference, method="eap", batch_size=2)
    step = torch.tensor(1e-5, dtype=torch.float64)
    with torch.no_grad():
        ends = [_metric_with_gate(model, pairs, edge, 1 + sign * step) for sign in (-1, 1)]
    slope = (ends[0] - ends[1]) / (2 * step)  # closing: the gate goes down
    torch.testing.assert_close(scores.values[(slice(None), *edge)], slope, rtol=1e-6, atol=1e-8)
    assert not scores.values.triu(1).any(), "nothing flows backwards"


def test_equal_prompts_change_nothing_under_the_corrupted_pattern(
    model: Model, pairs: PromptPairs
) -> None:
    same = replace(pairs, corrupted=torch.cat([pairs.corrupted[:1], pairs.clean[1:]]))
    scores = attribute_attention_edges(model, same, logit_difference, patch="corrupted")
    assert not scores.values[1:].any() and scores.values[0].any()
    other = attribute_attention_edges(model, pairs, logit_difference, patch="corrupted")
    assert other.values.abs().max() > 1e-3


def test_closed_gates_score_exactly_nothing(build_tiny: Build, pairs: PromptPairs) -> None:
    sparse = SparseTransformer(build_tiny(), initial_bias=0.0)
    scores = attribute_attention_edges(sparse, pairs, logit_difference)
    _, cache = sparse.run_with_cache(pairs.clean)
    patterns = torch.stack([cache[f"blocks.{layer}.attn.hook_pattern"] for layer in (0, 1)], 1)
    closed = patterns == 0
    assert 0 < closed.tril().sum() < closed.numel()
    assert not scores.values[closed].any()
    assert scores.values[~closed].any()
    table = scores.to_pandas(top=5)
    assert list(table) == ["edge", "layer", "head", "query", "key", "score"]
    assert table["score"].abs().is_monotonic_decreasing


def test_edges_beyond_a_window_do_not_exist(pairs: PromptPairs) -> None:
    model = boot(plain_transformer("gemma2"))
    scores = attribute_attention_edges(model, pairs, logit_difference)
    _, cache = model.run_with_cache(pairs.clean)
    patterns = [cache[f"blocks.{layer}.attn.hook_pattern"][0] for layer in range(3)]
    assert torch.equal(scores.grid.exists, torch.stack(patterns) > 0)
    assert scores.grid.n_parts < 3 * 4 * len(patterns[0][0]) * (len(patterns[0][0]) + 1) / 2
    with pytest.raises(ValueError, match=r"has no a0\.h0:0->4"):
        scores["a0.h0:0->4"]
    assert scores["a1.h0:0->4"] != 0  # layers in between have no window
