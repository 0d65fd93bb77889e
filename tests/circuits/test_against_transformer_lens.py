"""Scores and circuits are those of TransformerLens's own attribution patching, where it has it.

It names one edge for each position, where ours is one for all of them, and goes the other way: it
runs the corrupted prompt and moves towards the clean one. Ours is the same with the two swapped.
It has no integrated gradients, and refuses models whose heads share keys and values.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from architectures import VOCABULARY, plain_transformer
from torch import Tensor

from sparse_tl import (
    Circuit,
    PromptPairs,
    attribute_circuit_edges,
    evaluate,
    logit_difference,
)
from sparse_tl.backend import adapt, boot

theirs = pytest.importorskip("transformer_lens.tools.analysis.attribution_patching")
try:
    EDGES = theirs.EdgeAttributionConfig(granularity="edge")
except NotImplementedError as error:
    pytest.skip(f"not in this TransformerLens: {error}", allow_module_level=True)

MODELS = ("gpt2", "gpt_neox")
"""In float64, with a key-value head for each head: all that it takes."""
RIGHT, WRONG, LENGTH = 7, 11, 8
NAMES = {
    "embed": "input",
    "attn_head_out": "a{0.layer}.h{0.head}",
    "mlp_out": "m{0.layer}",
    "q_input": "a{0.layer}.h{0.head}<q>",
    "k_input": "a{0.layer}.h{0.head}<k>",
    "v_input": "a{0.layer}.h{0.head}<v>",
    "mlp_in": "m{0.layer}",
    "logits": "logits",
}


def ours(edge: tuple[Any, Any]) -> str:
    """The name of one of its edges, whatever its position."""
    return "->".join(NAMES[node.kind].format(node) for node in edge)


def metric(logits: Tensor) -> Tensor:
    last = logits.squeeze(0)[-1]
    return last[RIGHT] - last[WRONG]


def pairs(n: int) -> PromptPairs:
    generator = torch.Generator().manual_seed(3)
    clean = torch.randint(3, VOCABULARY, (n, LENGTH), generator=generator)
    corrupted = clean.clone()
    corrupted[:, [3, 6]] = torch.randint(3, VOCABULARY, (n, 2), generator=generator)
    answers = torch.tensor([[RIGHT]]).expand(n, 1), torch.tensor([[WRONG]]).expand(n, 1)
    return PromptPairs(clean, corrupted, *answers, torch.full((n,), LENGTH - 1))


@pytest.mark.parametrize("name", MODELS)
def test_attribution(name: str) -> None:
    model, some = boot(plain_transformer(name, "float64"), name=name), pairs(3)
    found = theirs.attribution_patch(model, some.clean, some.corrupted, metric, EDGES)
    summed: dict[str, float] = defaultdict(float)
    for edge, score in found.edge_scores.items():
        summed[ours(edge)] += score
    swapped = PromptPairs(some.corrupted, some.clean, some.answers, some.wrong, some.positions)
    scores = attribute_circuit_edges(model, swapped, logit_difference, method="eap", progress=False)
    graph = adapt(model).graph
    expected = {str(edge): scores.values[graph.index(edge)].item() for edge in graph.edges}
    assert summed.keys() == expected.keys()
    largest = max(map(abs, expected.values()))
    assert largest > 1e-3
    assert all(abs(summed[edge] - score) < 1e-12 * largest for edge, score in expected.items())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_explained_effect_of_a_circuit(name: str, share: float) -> None:
    model, some = boot(plain_transformer(name, "float64"), name=name), pairs(1)
    graph = adapt(model).graph
    kept = torch.rand(graph.exists.shape, generator=torch.Generator().manual_seed(0)) < share
    circuit = Circuit(graph, graph.exists & kept)
    names = {str(edge) for edge in circuit.edges}
    every = theirs.attribution_patch(model, some.clean, some.corrupted, metric, EDGES)
    within = [edge for edge in every.edge_scores if ours(edge) in names]
    expected = theirs.faithfulness(model, some.clean, some.corrupted, metric, within).recovered
    found = evaluate(model, some, logit_difference, circuit, progress=False)
    assert found.effect[0].item() == pytest.approx(expected, rel=1e-9)
