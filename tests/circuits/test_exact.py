"""Exact patching of single edges and heads equals the slow oracle, in any order and batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import run_patched_each
from torch import Tensor

from sparse_tl.backend import Model, adapt
from sparse_tl.circuits import attribute_circuit_edges, attribute_heads, patch_exactly
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.metrics import logit_difference

Build = Callable[..., Model]


def _metric(model: Model, tokens: Tensor, pairs: PromptPairs) -> float:
    with torch.no_grad():
        return logit_difference(pairs.read(model(tokens)), pairs).mean().item()


def test_every_edge_equals_the_slow_oracle(model: Model, pairs: PromptPairs) -> None:
    graph = adapt(model).graph
    found = patch_exactly(model, pairs, logit_difference, batch_size=23, progress=False)
    assert list(found.index) == [str(edge) for edge in graph.edges]
    clean = _metric(model, pairs.clean, pairs)
    masks = graph.exists.repeat(graph.n_edges, 1, 1)
    for mask, edge in zip(masks, graph.edges, strict=True):
        mask[graph.index(edge)] = False
    for edge, logits in zip(graph.edges, run_patched_each(model, graph, pairs, masks), strict=True):
        slow = logit_difference(logits, pairs).mean().item() - clean
        assert found[str(edge)] == pytest.approx(slow, rel=1e-9, abs=1e-9), edge
    assert found.abs().max() > 0.01


@pytest.mark.parametrize("patch", ["corrupted", "zero"])
def test_heads_equal_plain_hooks(model: Model, pairs: PromptPairs, patch: str) -> None:
    names = [f"a{layer}.h{head}" for layer in (1, 0) for head in (1, 0)]
    found = patch_exactly(
        model, pairs, logit_difference, names, patch=patch, batch_size=3, progress=False
    )
    _, cache = model.run_with_cache(pairs.corrupted)
    clean = _metric(model, pairs.clean, pairs)
    for name in names:
        layer, head = int(name[1]), int(name[4])

        def exchange(z: Tensor, hook: Any, head: int = head) -> Tensor:
            z[:, :, head] = cache[hook.name][:, :, head] if patch == "corrupted" else 0.0
            return z

        with model.hooks([(f"blocks.{layer}.attn.hook_z", exchange)]):
            slow = _metric(model, pairs.clean, pairs) - clean
        assert found[name] == pytest.approx(slow, rel=1e-9, abs=1e-9), name


def test_attribution_is_exact_for_a_linear_model(linear: Model, pairs: PromptPairs) -> None:
    scores = attribute_circuit_edges(linear, pairs, logit_difference, method="eap")
    exact = patch_exactly(linear, pairs, logit_difference, progress=False)
    found = scores.values[scores.grid.exists]
    torch.testing.assert_close(found, torch.tensor(exact.to_numpy()), rtol=1e-9, atol=1e-12)
    heads = attribute_heads(linear, pairs, logit_difference, method="eap")
    exact = patch_exactly(linear, pairs, logit_difference, ["a0.h1", "a1.h0"], progress=False)
    assert heads.values[0, 1].item() == pytest.approx(exact["a0.h1"], rel=1e-9)
    assert heads.values[1, 0].item() == pytest.approx(exact["a1.h0"], rel=1e-9)


def test_the_error_of_attribution_shrinks_quadratically(build_tiny: Build) -> None:
    """Half the corruption, a quarter of the error: attribution is right to first order."""
    model = build_tiny(dtype="float64", d_vocab=14)
    pairs = PromptPairs(
        torch.tensor([[1, 2, 3, 4]]),
        torch.tensor([[1, 13, 3, 4]]),
        torch.tensor([[5]]),
        torch.tensor([[6]]),
        torch.tensor([3]),
    )
    step = torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(0)).double()
    errors = []
    for size in (1e-2, 5e-3):
        with torch.no_grad():
            model.embed.W_E[13] = model.embed.W_E[2] + size * step
        scores = attribute_circuit_edges(model, pairs, logit_difference, method="eap")
        exact = patch_exactly(model, pairs, logit_difference, progress=False)
        error = scores.values[scores.grid.exists] - torch.tensor(exact.to_numpy())
        errors.append(error.abs().max().item())
    assert errors[0] > 1e-9
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
