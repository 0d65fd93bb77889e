"""The oracle itself: its ends are plain runs, and its slope is attribution patching."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import explained, run_patched, run_patched_each
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


def test_a_circuit_that_carries_nothing_is_the_corrupted_run(
    model: Model, pairs: PromptPairs
) -> None:
    """Of no edges; of all but those into the logits; of all but the input's, as all follows it."""
    graph = adapt(model).graph
    nothing = torch.zeros_like(graph.exists)
    no_logits, no_input = graph.exists.clone(), graph.exists.clone()
    no_logits[:, -1] = False
    no_input[0] = False
    expected = _plain(model, pairs, pairs.corrupted)
    for mask in (nothing, no_logits, no_input):
        found = run_patched(model, graph, pairs, mask)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert explained(model, graph, pairs, logit_difference, nothing) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("patch", ["corrupted", "mean", "zero"])
def test_the_slope_at_a_gate_is_attribution_patching(
    model: Model, pairs: PromptPairs, patch: Any
) -> None:
    """``- d m / d gate`` where all gates are 1, by central differences, edge by edge."""
    graph = adapt(model).graph
    pairs = replace(pairs, positions=torch.full((5,), 4))  # a mean over prompts asks for it
    scores = attribute_circuit_edges(model, pairs, logit_difference, method="eap", patch=patch)
    edges = graph.edges[1 :: graph.n_edges // 4]
    gates = graph.exists.double().repeat(len(edges), 2, 1, 1)
    for of_edge, edge in zip(gates, edges, strict=True):
        of_edge[0][graph.index(edge)] += 1e-4
        of_edge[1][graph.index(edge)] -= 1e-4
    logits = run_patched_each(model, graph, pairs, gates.flatten(0, 1), patch)
    together = logits[3], run_patched(model, graph, pairs, gates[1, 1], patch)
    torch.testing.assert_close(*together, rtol=1e-9, atol=1e-9)
    ends = torch.stack([logit_difference(each, pairs).mean() for each in logits])
    for edge, (more, less) in zip(edges, ends.view(-1, 2).tolist(), strict=True):
        assert (less - more) / 2e-4 == pytest.approx(scores[edge], rel=1e-4, abs=1e-7)
