"""One contract for every kind of model: what an adapter says is what the model computes.

Tolerances are relative to the largest entry. In float64 transformers computes RMS norms, softmax
and rotary tables in float32: its logits agree to 1e-6, what the adapter computes itself to 1e-12.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from architectures import (
    ARCHITECTURES,
    D_MODEL,
    N_HEADS,
    VOCABULARY,
    off,
    plain_transformer,
    random_pairs as pairs,
    random_tokens as tokens,
)
from tiny import HAS_HOOKED, tiny_model
from torch import Tensor

from sparse_tl import (
    AttentionEdges,
    Circuit,
    CircuitEdges,
    GatedRun,
    SparseTransformer,
    gated,
)
from sparse_tl.backend import (
    EMBEDDED,
    OWN,
    Model,
    Order,
    adapt,
    attached,
    boot,
    hooks_besides,
    record,
)
from sparse_tl.gates import ClosedAttentionEdges

BRIDGES = list(ARCHITECTURES)
EVERY = [*(["hooked", "hooked_grouped"] if HAS_HOOKED else []), *BRIDGES]
POST_NORMS = {
    "olmo2": (False, True, False, True),
    **dict.fromkeys(("gemma2", "gemma3"), (True, True, True, True)),
}
EXACT = ("hooked", "hooked_grouped", "gpt2", "gpt_neox")
"""In float64 throughout."""
SPLIT = ("gpt2", "gpt_neox", "phi3")


def build(name: str, dtype: str = "float32", seed: int = 0) -> Model:
    if name.startswith("hooked"):
        kind = "plain" if name == "hooked" else "grouped"
        sizes = {"d_model": D_MODEL, "d_head": 8, "n_heads": N_HEADS, "n_layers": 3, "n_ctx": 40}
        return tiny_model(kind, seed, d_vocab=VOCABULARY, dtype=dtype, **sizes)
    return boot(plain_transformer(name, dtype, seed), name=name)


def last(prompts: Tensor) -> Tensor:
    read = torch.zeros_like(prompts, dtype=torch.bool)
    read[:, -2] = True
    return read


def generated(model: Any, prompts: Tensor) -> Tensor:
    """With a key-value cache."""
    return model.generate(
        prompts,
        max_new_tokens=6,
        do_sample=False,
        use_past_kv_cache=True,
        stop_at_eos=False,
        return_type="tokens",
        verbose=False,
    )


def continued(model: Any, prompts: Tensor) -> Tensor:
    """The same by whole passes."""
    for _ in range(6):
        prompts = torch.cat([prompts, model(prompts)[:, -1:].argmax(dim=-1)], dim=1)
    return prompts


# ---- what a model computes -----------------------------------------------------------------------


@pytest.mark.parametrize("name", BRIDGES)
@torch.no_grad()
def test_a_bridge_is_the_model_that_it_wraps(name: str) -> None:
    plain, prompts = plain_transformer(name), tokens()
    expected = plain(prompts).logits
    model = boot(plain, name=name)
    adapter = adapt(model)
    assert off(model(prompts), expected) < 2e-6
    assert off(adapter.logits(adapter.final(prompts)), expected) < 2e-6
    norms = adapter.block_norms  # type: ignore[attr-defined]
    stands = tuple(where in norms[0] for where in ("attn", "after_attn", "mlp", "after_mlp"))
    assert stands == POST_NORMS.get(name, (True, False, True, False))
    assert adapter.name == name and adapter.core is plain


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_parts_add_up(name: str) -> None:
    model, prompts = build(name, "float64"), tokens()
    adapter, small = adapt(model), 1e-12 if name in EXACT else 1e-6
    assert adapter.graph.n_layers == 3
    names = [*adapter.source_points(), *adapter.layer_points("hook_attn_out")]
    for layer in range(3):
        names += adapter.destination_points(layer) + adapter.residual_points(layer)
    kept, final = record(adapter, prompts, names)
    total = kept[EMBEDDED]
    for layer in range(3):
        residuals, destinations = adapter.residual_points(layer), adapter.destination_points(layer)
        normed = adapter.norm(layer, "attn")(kept[residuals[0]])
        for slot, point in zip("qkv", destinations, strict=False):
            weight, bias = adapter.qkv(layer, slot)  # type: ignore[arg-type]
            assert len(weight) == (adapter.n_heads if slot == "q" else adapter.n_kv_heads)
            rebuilt = torch.einsum("bpd,hde->bphe", normed, weight) + bias
            assert off(rebuilt, kept[point]) < small
        rebuilt = adapter.norm(layer, "mlp")(kept[residuals[1]])
        assert off(rebuilt, kept[destinations[3]]) < small
        written, z = kept[f"blocks.{layer}.hook_attn_out"], kept[adapter.heads_point(layer)]
        heads = adapter.heads_written(layer, z)
        rest = written - heads.sum(dim=0)
        assert (rest - rest[:1, :1]).abs().max() < small * written.abs().max()
        assert off(adapter.heads_written(layer, z, heads=[2, 0]), heads[[2, 0]]) < 1e-12
        total = total + written + kept[f"blocks.{layer}.hook_mlp_out"]
    assert off(total, final) < 1e-12
    assert off(adapter.logits(final), model(prompts)) < 1e-6


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_some_layers_some_positions_and_copies(name: str) -> None:
    model, prompts = build(name), tokens()
    adapter = adapt(model)
    names = adapter.layer_points("hook_resid_pre")
    kept, final = record(adapter, prompts, names)
    fired: list[str] = []
    notes = [(point, Order.LAST, lambda _, point=point: fired.append(point)) for point in names]
    for layer, point in enumerate(names):
        fired.clear()
        with attached(adapter, notes):
            assert torch.equal(adapter.final(kept[point], from_layer=layer), final)
        assert fired == names[layer:]
    read, rows = last(prompts), []
    points = [model.blocks[-1].mlp.hook_in] if name in BRIDGES else []
    assert off(adapter.final(prompts, read=read)[read], final[read]) < 1e-6
    for point in points:  # what is hooked inside sees every position
        handle = point.register_forward_hook(lambda _m, _a, value: rows.append(value.shape[:2]))
        assert off(adapter.final(prompts, read=read)[read], final[read]) < 1e-6
        handle.remove()
        assert rows == [prompts.shape]
    twice = final.repeat(2, 1, 1)
    assert off(adapter.final(prompts, copies=2), twice) < 1e-6
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(adapter.final(prompts), final)


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_padding_on_the_left(name: str) -> None:
    adapter, prompts = adapt(build(name)), tokens()
    final = adapter.final(prompts)
    padded = torch.cat([torch.zeros(3, 4, dtype=torch.long), prompts], dim=1)
    mask = (torch.arange(13) >= 4).long().expand(3, 13)
    point = "blocks.1.hook_resid_pre"
    kept, found = record(adapter, padded, [point], attention_mask=mask)
    assert off(found[:, 4:], final) < 2e-6
    entered = adapter.final(kept[point], from_layer=1, attention_mask=mask)
    assert off(entered[:, 4:], final) < 2e-6


@pytest.mark.parametrize("name", EVERY)
def test_gradients_at_what_destinations_read(name: str) -> None:
    """Against passes in which one destination alone reads something else."""
    model = build(name, "float64").requires_grad_(False)
    adapter, prompts = adapt(model), tokens(2, 7)
    generator = torch.Generator().manual_seed(5)
    shift = torch.randn(2, 7, D_MODEL, generator=generator, dtype=torch.float64)
    names = adapter.destination_points(1)
    residuals = adapter.residual_points(1)

    def metric(final: Tensor) -> Tensor:
        return adapter.logits(final)[:, -1, ::2].tanh().sum()

    kept, final = record(adapter, prompts, [*names, *residuals], differentiable=True)
    with torch.enable_grad():
        gradients = torch.autograd.grad(metric(final), [kept[point] for point in names])

    def reads(point: str, residual: Tensor) -> Tensor:
        if point.endswith("mlp_normalized"):
            return adapter.norm(1, "mlp")(residual)
        weight, bias = adapter.qkv(1, point[-1])  # type: ignore[arg-type]
        return torch.einsum("bpd,hde->bphe", adapter.norm(1, "attn")(residual), weight) + bias

    expected, found = [], []
    for point, gradient in zip(names, gradients, strict=True):
        start = kept[residuals[point.endswith("mlp_normalized")]].detach().requires_grad_()
        back = torch.autograd.grad(reads(point, start), start, gradient)[0]
        found.append((back * shift).sum().item())
        values = []
        for sign in (1, -1):
            moved = reads(point, start.detach() + sign * 1e-3 * shift)
            _, final = record(adapter, prompts, (), replaced={point: moved})
            values.append(metric(final).item())
        expected.append((values[0] - values[1]) / 2e-3)
    largest = max(map(abs, expected))
    assert all(abs(a - b) < 1e-2 * largest for a, b in zip(expected, found, strict=True))


# ---- gates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_gates_on_attention_edges(name: str) -> None:
    model, prompts = build(name), tokens(2, 8)
    plain = model(prompts)
    sparse = SparseTransformer(model)
    sparse.gates.bias.normal_(0, 1.5, generator=torch.Generator().manual_seed(0))
    logits, counts = sparse.run_with_counts(prompts, keep_gates=True)
    assert off(logits, plain) > 1e-3 and counts.gates is not None
    with sparse.opened(), gated(sparse, AttentionEdges(), counts.gates[:, 0]):
        assert off(sparse(prompts[:1]), logits[:1]) < 2e-6
    mask = torch.cat([torch.zeros(2, 3), torch.ones(2, 8)], dim=1).long()
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), prompts], dim=1)
    found, other = sparse.run_with_counts(padded, attention_mask=mask)
    assert off(found[:, 3:], logits) < 2e-6
    assert int(other.active.sum()) == int(counts.active.sum())
    assert int(other.possible.sum()) == int(counts.possible.sum())


@pytest.mark.parametrize("name", BRIDGES)
@torch.no_grad()
def test_edges_are_closed_by_their_columns_also_under_a_cache(name: str) -> None:
    """A layer with a sliding window shows the last keys alone, whatever their columns."""
    model, prompts = build(name), tokens(2, 6)
    edges = [(1, head, query, key) for head in (0, 2) for query in (6, 8, 9) for key in (4, 6)]
    by_hand, column = torch.ones(3, N_HEADS, 12, 12), tokens(2, 12)
    by_hand[tuple(zip(*edges, strict=True))] = 0
    with gated(model, AttentionEdges(), by_hand):
        expected = model(column)
    sparse = SparseTransformer(model, initial_bias=100.0)
    assert torch.equal(generated(sparse, prompts), continued(sparse, prompts))
    places = ClosedAttentionEdges(torch.tensor(edges))
    with sparse.opened(), gated(sparse, AttentionEdges(), places):
        assert off(sparse(column), expected) < 1e-6
    sparse.unwrap()
    early = ClosedAttentionEdges(torch.tensor([(1, 0, 5, 4), (1, 2, 5, 3)]))
    with gated(model, AttentionEdges(), early):
        assert torch.equal(generated(model, prompts), continued(model, prompts))


@pytest.mark.parametrize("name", EVERY)
def test_gates_and_weights_get_gradients(name: str) -> None:
    sparse = SparseTransformer(build(name), initial_bias=0.0)
    with sparse.sampled(torch.Generator().manual_seed(0)):
        logits, counts = sparse.run_with_counts(tokens(2, 8))
    (logits.logsumexp(-1).sum() + counts.expected.sum()).backward()
    adapter = adapt(sparse)
    every = adapter.parameters("all")
    assert sparse.gates.bias.grad is not None and sparse.gates.bias.grad.abs().min() > 0
    assert len({id(p) for p in every}) == len(every)
    assert all(p.grad is not None for p in every)
    unread = {id(p) for p in adapter.model.parameters()} - {id(p) for p in every}
    assert bool(unread) >= (name in SPLIT)
    assert {id(p) for p in adapter.parameters("qk")} <= {id(p) for p in every}


@pytest.mark.parametrize("name", EVERY)
def test_gates_on_circuit_edges(name: str) -> None:
    model, some = build(name), pairs()
    read = torch.zeros_like(some.clean, dtype=torch.bool)
    read[:, -1] = True
    run = GatedRun(model, CircuitEdges(), some.clean, read, "corrupted", reference=some.corrupted)
    shape = run.adapter.graph.exists.shape
    with torch.no_grad():
        plain, other = model(some.clean)[:, -1], model(some.corrupted)[:, -1]
        assert off(run.logits(torch.ones(shape)), plain) < 1e-6
        assert off(run.logits(torch.zeros(shape)), other) < 2e-6
    run = GatedRun(
        build(name, "float64"),
        CircuitEdges(),
        some.clean,
        read,
        "corrupted",
        reference=some.corrupted,
    )
    generator = torch.Generator().manual_seed(0)
    gates = torch.rand(shape, generator=generator, dtype=torch.float64).requires_grad_()
    way = torch.randn(shape, generator=generator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(run.logits(gates)[:, ::2].tanh().sum(), gates)
    with torch.no_grad():
        ends = [run.logits(gates + s * 1e-4 * way)[:, ::2].tanh().sum() for s in (1, -1)]
    assert (gradient * way).sum().item() == pytest.approx(
        (ends[0] - ends[1]).item() / 2e-4, rel=2e-2, abs=2e-3
    )


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_edges_that_lead_nowhere_have_no_effect(name: str) -> None:
    """Where what attention writes is normalised, a head whose own edges are closed moves others."""
    model, some = build(name), pairs()
    graph = adapt(model).graph
    mask = graph.exists.clone()
    mask[graph.source_index("a0.h1")] = False
    mask[graph.source_index("a2.h2")] = False
    mask[:, graph.destination_index("a1.h0<q>")] = False
    circuit = Circuit(graph, mask)
    found = []
    for kept in (circuit, circuit.connected()):
        with gated(model, CircuitEdges(), kept.mask, "corrupted", reference=some.corrupted):
            found.append(model(some.clean)[:, -1])
    assert off(found[1], found[0]) < 3e-6  # in float32, added up in another order


# ---- as a whole ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_copies_hold_what_was_trained(name: str) -> None:
    model, prompts = build(name), tokens()
    adapter, before = adapt(model), model(prompts)
    generator = torch.Generator().manual_seed(0)
    for parameter in adapter.parameters("qk"):
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    logits = model(prompts)
    assert off(logits, before) > 1e-3
    copied = adapter.copy()
    assert torch.equal(copied(prompts), logits) and adapt(copied).name == adapter.name
    own, others = ({p.data_ptr() for p in some.parameters()} for some in (model, copied))
    assert not own & others
    sparse = copy.deepcopy(SparseTransformer(model))
    del model, adapter, parameter
    gc.collect()
    assert torch.equal(copied(prompts), logits)
    with sparse.opened():
        assert torch.equal(sparse(prompts), logits)


def test_hooks_that_transformers_leaves_are_not_the_users() -> None:
    model: Any = tiny_model()
    model.run_with_cache(torch.arange(4)[None])  # from now on, transformers records attentions
    assert not hooks_besides(adapt(model), OWN)
    handle = model.blocks[0].hook_resid_post.register_forward_hook(lambda *_: None)
    assert hooks_besides(adapt(model), OWN) == {handle.id}
    handle.remove()
