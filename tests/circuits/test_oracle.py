"""The oracle itself: its ends are plain runs, and its slope is attribution patching."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import explained, mask_of, run_patched
from torch import Tensor

from sparse_tl.backend import Model, adapt
from sparse_tl.circuits import attribute_circuit_edges
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.metrics import logit_difference


def _plain(model: Model, pairs: PromptPairs, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return pairs.read(model(tokens))


def test_all_edges_kept_is_the_clean_run(model: Model, pairs: PromptPairs) -> None:
    found = run_patched(model, adapt(model).graph, pairs, adapt(model).graph.exists)
    torch.testing.assert_close(found, _plain(model, pairs, pairs.clean), rtol=1e-9, atol=1e-9)


def test_all_edges_patched_is_the_corrupted_run(model: Model, pairs: PromptPairs) -> None:
    graph = adapt(model).graph
    nothing = torch.zeros_like(graph.exists)
    found = run_patched(model, graph, pairs, nothing)
    torch.testing.assert_close(found, _plain(model, pairs, pairs.corrupted), rtol=1e-9, atol=1e-9)
    assert explained(model, graph, pairs, logit_difference, nothing) == pytest.approx(0, abs=1e-9)


def test_patching_only_the_logits_is_the_corrupted_run(model: Model, pairs: PromptPairs) -> None:
    graph = adapt(model).graph
    mask = graph.exists.clone()
    mask[:, -1] = False
    found = run_patched(model, graph, pairs, mask)
    torch.testing.assert_close(found, _plain(model, pairs, pairs.corrupted), rtol=1e-9, atol=1e-9)


def test_patched_input_edges_are_the_corrupted_run(model: Model, pairs: PromptPairs) -> None:
    """Sources upstream are recomputed: with the corrupted input alone, all else follows from it."""
    graph = adapt(model).graph
    mask = graph.exists.clone()
    mask[0] = False
    found = run_patched(model, graph, pairs, mask)
    torch.testing.assert_close(found, _plain(model, pairs, pairs.corrupted), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("patch", ["corrupted", "mean", "zero"])
def test_the_slope_at_a_gate_is_attribution_patching(
    model: Model, pairs: PromptPairs, patch: Any
) -> None:
    """``- d m / d gate`` where all gates are 1, by central differences, edge by edge."""
    graph = adapt(model).graph
    same = torch.full_like(pairs.positions, 4)  # a mean over prompts asks for it
    pairs = PromptPairs(pairs.clean, pairs.corrupted, pairs.answers, pairs.wrong, same)
    scores = attribute_circuit_edges(model, pairs, logit_difference, method="eap", patch=patch)
    for edge in graph.edges[1 :: graph.n_edges // 4]:
        ends = []
        for gate in (1 + 1e-4, 1 - 1e-4):
            gates = graph.exists.double()
            gates[graph.index(edge)] = gate
            logits = run_patched(model, graph, pairs, gates, patch)
            ends.append(logit_difference(logits, pairs).mean().item())
        assert (ends[1] - ends[0]) / 2e-4 == pytest.approx(scores[edge], rel=1e-4, abs=1e-7)


def test_no_hook_stays(model: Model, pairs: PromptPairs) -> None:
    graph = adapt(model).graph
    run_patched(model, graph, pairs, mask_of(graph, ["input->logits"]))
    assert not any(point.fwd_hooks for point in model.hook_dict.values())
