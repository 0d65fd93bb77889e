"""Circuits of models with gates on MLPs: gates are decided anew by what is patched.

Everything is compared with the slow oracle, run on the gated model: hooks of TransformerLens see
what gates leave, and an MLP that is shown a patched input decides by that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from architectures import plain_transformer
from double_precision import DoublePrecision
from oracle import run_patched, run_patched_each, run_split, slow_scores, written_by
from random_models import KINDS, shaken
from torch import Tensor

from sparse_tl.backend import Model, adapt, boot, record, source_outputs
from sparse_tl.circuits import (
    Circuit,
    acdc,
    attribute_attention_edges,
    attribute_circuit_edges,
    attribute_heads,
    evaluate,
    patch_exactly,
    trace_attention,
)
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import BernoulliGate, SigmoidGate, SparseTransformer
from sparse_tl.metrics import divergence, logit_difference

Build = Callable[..., Model]
GATED = {
    name: kind for name, kind in KINDS.items() if name in ("sequential", "parallel", "grouped")
}
SHALLOW: dict[str, dict[str, Any]] = {
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {"num_hidden_layers": 2},
}
"""What MLPs write is normalised there; OLMo 2's read the residual stream as it is."""
NAMES = [*GATED, *SHALLOW]


def gated_model(build_tiny: Build, name: str, distribution: Any = None) -> SparseTransformer:
    """In float64, about half of the MLP outputs open, and most attention edges."""
    if name in GATED:
        model = shaken(build_tiny(**GATED[name], dtype="float64"))
    else:
        model = boot(plain_transformer(name, "float64", **SHALLOW[name]), name=name)
    settings: dict[str, Any] = {"distribution": distribution or BernoulliGate()}
    sparse = SparseTransformer(model, mlps=True, initial_bias=1.0, **settings)
    assert sparse.mlp_gates is not None
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        weight = sparse.mlp_gates.weight
        weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        weight.div_(weight.shape[1] ** 0.5)
        sparse.mlp_gates.bias.fill_(0.1)
    return sparse.requires_grad_(False)


@pytest.fixture(params=NAMES)
def sparse(request: pytest.FixtureRequest, build_tiny: Build) -> Iterator[SparseTransformer]:
    with DoublePrecision():
        yield gated_model(build_tiny, request.param)


def metric_of(model: Any, tokens: Tensor, pairs: PromptPairs) -> float:
    with torch.no_grad():
        return logit_difference(pairs.read(model(tokens)), pairs).mean().item()


def test_the_example_closes_mlps(sparse: SparseTransformer, pairs: PromptPairs) -> None:
    clean, corrupted = (
        sparse.run_with_counts(tokens, keep_gates=True)[1].mlp_gates
        for tokens in (pairs.clean, pairs.corrupted)
    )
    assert clean is not None and corrupted is not None
    assert 0.2 < clean.double().mean() < 0.8
    assert (clean != corrupted).any()


def test_sources_add_up_to_the_final_residual_stream(
    sparse: SparseTransformer, pairs: PromptPairs
) -> None:
    adapter = adapt(sparse)
    _, counts = sparse.run_with_counts(pairs.clean, keep_gates=True)
    kept, final = record(adapter, pairs.clean, adapter.source_points())
    outputs = source_outputs(adapter, kept)
    rest = final - outputs.sum(dim=0)  # biases of W_O, which are nobody's
    torch.testing.assert_close(rest, rest[:1, :1].expand_as(rest), rtol=1e-9, atol=1e-9)
    assert counts.mlp_gates is not None
    for layer in range(adapter.n_layers):
        written = outputs[adapter.graph.source_index(f"m{layer}")]
        assert torch.equal(written.abs().sum(dim=-1) > 0, counts.mlp_gates[layer])


def test_tracing_a_prompt_tells_which_mlps_write(sparse: SparseTransformer) -> None:
    tokens = torch.arange(5) % adapt(sparse).d_vocab
    graph = trace_attention(sparse, tokens, positions=[3])  # read at column 2, the last that runs
    _, counts = sparse.run_with_counts(tokens[None, :3], keep_gates=True)
    assert graph.mlps is not None and counts.mlp_gates is not None
    assert torch.equal(graph.mlps[:, :3], counts.mlp_gates[:, 0])
    assert graph.mlps.shape[1] == 5 and not graph.mlps[:, 3:].any()
    assert f"{int(graph.mlps.sum())} of {graph.mlps.numel()} MLP outputs open" in repr(graph)
    assert trace_attention(sparse.unwrap(), tokens).mlps is None


@pytest.mark.parametrize("distribution", [BernoulliGate(), SigmoidGate()])
@pytest.mark.parametrize("name", NAMES)
def test_attribution_equals_the_slow_oracle(
    build_tiny: Build, pairs: PromptPairs, name: str, distribution: Any
) -> None:
    """Through smooth gates gradients reach what the MLP reads; through hard ones they do not."""
    with DoublePrecision():
        sparse = gated_model(build_tiny, name, distribution)
        graph = adapt(sparse).graph
        for method, shares in (("eap", [1.0]), ("eap-ig", [0.5, 1.0])):
            found = attribute_circuit_edges(
                sparse, pairs, logit_difference, method=method, steps=2
            ).values
            slow = [slow_scores(sparse, graph, pairs, logit_difference, s) for s in shares]
            expected = sum(slow) / len(slow)
            assert isinstance(expected, Tensor)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_exact_patching_equals_the_slow_oracle(
    sparse: SparseTransformer, pairs: PromptPairs
) -> None:
    graph = adapt(sparse).graph
    some = [str(edge) for edge in graph.edges if str(edge).startswith("m") or "->m" in str(edge)]
    found = patch_exactly(sparse, pairs, logit_difference, some, progress=False)
    clean = metric_of(sparse, pairs.clean, pairs)
    masks = graph.exists.repeat(len(some), 1, 1)
    for mask, name in zip(masks, some, strict=True):
        mask[graph.index(name)] = False
    for name, logits in zip(some, run_patched_each(sparse, graph, pairs, masks), strict=True):
        slow = logit_difference(logits, pairs).mean().item() - clean
        assert found[name] == pytest.approx(slow, rel=1e-7, abs=1e-9), name
    assert found.abs().max() > 0.01


def test_an_edge_of_an_mlp_ablated_by_hand(build_tiny: Build, pairs: PromptPairs) -> None:
    """``m0->m1``: MLP 1 reads what MLP 0 wrote in the corrupted prompts, and decides by that."""
    sparse = gated_model(build_tiny, "sequential")
    names = [f"blocks.{layer}.hook_mlp_out" for layer in (0, 1)]
    _, clean = sparse.run_with_cache(pairs.clean)
    _, corrupted = sparse.run_with_cache(pairs.corrupted)
    stream = clean["blocks.1.hook_resid_pre"] + clean["blocks.1.hook_attn_out"]
    patched = stream - clean[names[0]] + corrupted[names[0]]
    read = adapt(sparse).norm(1, "mlp")(patched)
    assert sparse.mlp_gates is not None
    gates = (sparse.mlp_gates.logits(1, read) > 0)[..., None]
    with torch.no_grad():
        mlp: Any = sparse.blocks[1].mlp
        written = gates * (torch.nn.functional.gelu(read @ mlp.W_in + mlp.b_in) @ mlp.W_out)
        written = written + gates * mlp.b_out
        logits = adapt(sparse).logits(stream + written)
    assert (
        gates[..., 0] != (sparse.mlp_gates.logits(1, adapt(sparse).norm(1, "mlp")(stream)) > 0)
    ).any()
    expected = logit_difference(pairs.read(logits), pairs).mean().item()
    found = patch_exactly(sparse, pairs, logit_difference, ["m0->m1"], progress=False)
    clean_value = metric_of(sparse, pairs.clean, pairs)
    assert found["m0->m1"] == pytest.approx(expected - clean_value, rel=1e-6)


def test_a_first_order_change_is_the_slope_of_exact_patching(
    build_tiny: Build, pairs: PromptPairs
) -> None:
    """EAP's score of an edge is ``- d m / d gate`` of that edge, by central differences."""
    sparse = gated_model(build_tiny, "sequential", SigmoidGate())
    graph = adapt(sparse).graph
    scores = attribute_circuit_edges(sparse, pairs, logit_difference, method="eap")
    names = ("m0->m1", "m0->logits", "input->m1", "a0.h1->m0", "m0->a1.h0<v>")
    gates = graph.exists.double().repeat(len(names), 2, 1, 1)
    for of_edge, name in zip(gates, names, strict=True):
        of_edge[0][graph.index(name)] += 1e-4
        of_edge[1][graph.index(name)] -= 1e-4
    logits = run_patched_each(sparse, graph, pairs, gates.flatten(0, 1))
    ends = torch.stack([logit_difference(each, pairs).mean() for each in logits])
    for name, (more, less) in zip(names, ends.view(-1, 2).tolist(), strict=True):
        assert (less - more) / 2e-4 == pytest.approx(scores[name], rel=1e-4, abs=1e-7)


def test_all_edges_are_the_model_and_none_are_the_corrupted_one(
    sparse: SparseTransformer, pairs: PromptPairs
) -> None:
    graph = adapt(sparse).graph
    generator = torch.Generator().manual_seed(0)
    some = graph.exists & (torch.rand(graph.exists.shape, generator=generator) < 0.6)
    masks = [graph.exists, torch.zeros_like(graph.exists), some]
    found = evaluate(
        sparse, pairs, logit_difference, [Circuit(graph, mask) for mask in masks], progress=False
    ).values
    for values, tokens in zip(found, (pairs.clean, pairs.corrupted), strict=False):
        with torch.no_grad():
            expected = logit_difference(pairs.read(sparse(tokens)), pairs)
        torch.testing.assert_close(values, expected.to(values), rtol=1e-7, atol=1e-9)
    slow = logit_difference(run_patched(sparse, graph, pairs, some), pairs)
    torch.testing.assert_close(found[2], slow.to(found), rtol=1e-7, atol=1e-9)


def test_acdc_agrees_with_the_slow_oracle(sparse: SparseTransformer, pairs: PromptPairs) -> None:
    graph = adapt(sparse).graph
    with torch.no_grad():
        clean, corrupted = (pairs.read(sparse(tokens)) for tokens in (pairs.clean, pairs.corrupted))
        threshold = divergence(corrupted, clean).mean().item() / 50
    found = acdc(sparse, pairs, threshold=threshold, progress=False)
    logits = run_patched(sparse, graph, pairs, found.circuit.mask)
    assert found.searched.values.mean().item() == pytest.approx(
        divergence(logits, clean).mean().item(), rel=1e-7
    )
    assert 0 < len(found.circuit) < graph.n_edges


def test_scores_of_heads_and_attention_edges_are_slopes(
    build_tiny: Build, pairs: PromptPairs
) -> None:
    sparse = gated_model(build_tiny, "sequential", SigmoidGate())
    heads = attribute_heads(sparse, pairs, logit_difference, method="eap", patch="zero").values
    edges = attribute_attention_edges(sparse, pairs, logit_difference, method="eap").values
    z, pattern = "blocks.0.attn.hook_z", "blocks.0.attn.hook_pattern"

    def slope(name: str, place: tuple[Any, ...]) -> float:
        ends = []
        for gate in (1 + 1e-4, 1 - 1e-4):

            def close(value: Tensor, hook: Any, gate: float = gate) -> Tensor:
                value = value.clone()
                value[place] *= gate
                return value

            with sparse.hooks([(name, close)]):
                ends.append(metric_of(sparse, pairs.clean, pairs))
        return (ends[1] - ends[0]) / 2e-4

    every = slice(None)
    assert heads[0, 1].item() == pytest.approx(slope(z, (every, every, 1)), rel=1e-4)
    found = edges[:, 0, 1, 2, 1].mean().item()
    assert found == pytest.approx(slope(pattern, (every, 1, 2, 1)), rel=1e-4)


def test_the_oracle_sees_gated_outputs(build_tiny: Build, pairs: PromptPairs) -> None:
    """Else all of the above would compare what is not gated."""
    sparse = gated_model(build_tiny, "sequential")
    graph = adapt(sparse).graph
    _, counts = sparse.run_with_counts(pairs.clean, keep_gates=True)
    assert counts.mlp_gates is not None
    written = written_by(sparse, graph, pairs.clean)[graph.source_index("m1")]
    assert torch.equal(written.abs().sum(dim=-1) > 0, counts.mlp_gates[1])
    split = run_split(sparse, graph, pairs.clean, lambda destination, written: written.sum(0))
    torch.testing.assert_close(split, sparse(pairs.clean), rtol=1e-9, atol=1e-9)
