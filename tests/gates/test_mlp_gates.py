"""Gates on MLPs: what is decided, multiplied and counted, against formulas and hooks by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from architectures import plain_transformer
from double_precision import DoublePrecision
from finite_differences import derivative
from tiny import HAS_HOOKED, tiny_model
from torch import Tensor

from sparse_tl import SparseTransformer
from sparse_tl.backend import Model, adapt, boot, checkpointed_activations, read_parameters
from sparse_tl.gates import (
    HookPoints,
    MLPGates,
    SigmoidGate,
    gated,
)

TINY: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"kind": "grouped"},
    "parallel": {"parallel_attn_mlp": True},
}
POST_NORM = ("gemma2", "gemma3", "olmo2")
KINDS = [*TINY, *POST_NORM]
NO_CACHE: dict[str, Any] = {} if HAS_HOOKED else {"use_cache": False}


def build(kind: str, dtype: str = "float32") -> Model:
    """A model whose MLPs write at different places of a block, always the same."""
    if kind in POST_NORM:
        return boot(plain_transformer(kind, dtype), name=kind)
    return tiny_model(**TINY[kind], dtype=dtype)


def sparse_of(kind: str, dtype: str = "float32", **settings: Any) -> SparseTransformer:
    """Gates on MLPs that tell positions apart, about half of them open."""
    sparse = SparseTransformer(build(kind, dtype), mlps=True, **settings)
    assert sparse.mlp_gates is not None
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        weight = sparse.mlp_gates.weight
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        weight.copy_(drawn / weight.shape[1] ** 0.5)
        sparse.mlp_gates.bias.zero_()
    return sparse


def gates_of(sparse: SparseTransformer) -> MLPGates:
    assert sparse.mlp_gates is not None
    return sparse.mlp_gates


def layers_of(model: Model, tokens: Tensor) -> list[dict[str, Tensor]]:
    """What each layer reads and writes, by hooks of TransformerLens alone."""
    seen: dict[str, Tensor] = {}
    places = ("hook_resid_pre", "hook_attn_out", "hook_mlp_out", "hook_resid_post")
    names = [f"blocks.{layer}.{at}" for layer in range(model.cfg.n_layers) for at in places]

    def keep(name: str) -> Any:
        return name, lambda value, hook: seen.update({name: value.detach().clone()})

    model.run_with_hooks(tokens, fwd_hooks=[keep(name) for name in names])
    return [
        {at: seen[f"blocks.{layer}.{at}"] for at in places} for layer in range(model.cfg.n_layers)
    ]


def read_by_mlp(model: Model, layer: int, at: dict[str, Tensor]) -> Tensor:
    """The residual stream before an MLP, normalised."""
    adapter = adapt(model)
    stream = at["hook_resid_pre"]
    return adapter.norm(layer, "mlp")(stream if adapter.parallel else stream + at["hook_attn_out"])


# What is decided and multiplied.


@pytest.mark.parametrize("kind", KINDS)
def test_open_gates_are_the_model_bit_for_bit(tokens: Tensor, kind: str) -> None:
    model = build(kind)
    dense = model(tokens)
    sparse = SparseTransformer(model, initial_bias=1e4, mlps=True)
    assert torch.equal(sparse(tokens), dense)  # b = 2 and w = 0: all open
    assert sparse.count_attention_edges(tokens).active_mlps_per_prompt == sparse.cfg.n_layers * 8
    gates_of(sparse).bias.data.fill_(-1.0)
    assert not torch.equal(sparse(tokens), dense)
    with sparse.opened():
        assert torch.equal(sparse(tokens), dense)
        logits, counts = sparse.run_with_counts(tokens)
    assert torch.equal(logits, dense)
    for name in ("active_mlps", "expected_mlps", "possible_mlps"):
        assert torch.equal(getattr(counts, name).long(), torch.full((sparse.cfg.n_layers, 3), 8))
    assert torch.equal(sparse.unwrap()(tokens), dense)


@pytest.mark.parametrize("kind", KINDS)
def test_gates_are_the_sign_of_what_the_mlp_reads(tokens: Tensor, kind: str) -> None:
    sparse = sparse_of(kind, initial_bias=1e4)
    gates = gates_of(sparse)
    _, counts = sparse.run_with_counts(tokens, keep_gates=True)
    assert counts.mlp_gates is not None and counts.active_mlps is not None
    at = layers_of(sparse, tokens)
    with sparse.opened():
        plain = layers_of(sparse, tokens)
    for layer, here in enumerate(at):
        logits = read_by_mlp(sparse, layer, here) @ gates.weight[layer] + gates.bias[layer]
        expected = logits > 0
        assert expected.any() and not expected.all()
        assert torch.equal(counts.mlp_gates[layer], expected)
        assert torch.equal(counts.active_mlps[layer], expected.sum(dim=-1))
        torch.testing.assert_close(
            counts.expected_mlps[layer], torch.sigmoid(logits).sum(dim=-1), rtol=1e-5, atol=1e-5
        )
        written = here["hook_resid_post"] - here["hook_resid_pre"] - here["hook_attn_out"]
        torch.testing.assert_close(written, here["hook_mlp_out"], rtol=1e-4, atol=1e-5)
        assert not bool(here["hook_mlp_out"][~expected].any())
        if layer == 0:  # reads the same, whatever gates say
            assert torch.equal(here["hook_mlp_out"][expected], plain[0]["hook_mlp_out"][expected])


@pytest.mark.parametrize("kind", KINDS)
def test_smooth_gates_and_their_gradients_equal_hooks_by_hand(tokens: Tensor, kind: str) -> None:
    sparse = sparse_of(kind, "float64", distribution=SigmoidGate(), initial_bias=1e4)
    gates, twin = gates_of(sparse), build(kind, "float64")
    weight, bias = (p.detach().clone().requires_grad_() for p in (gates.weight, gates.bias))
    adapter, seen = adapt(twin), dict[int, Tensor]()

    def read(layer: int) -> Any:
        def note(stream: Tensor, hook: Any) -> None:
            seen[layer] = adapter.norm(layer, "mlp")(stream)

        at = "hook_resid_pre" if adapter.parallel else "hook_resid_mid"
        return f"blocks.{layer}.{at}", note

    def write(layer: int) -> Any:
        def close(output: Tensor, hook: Any) -> Tensor:
            logits = torch.einsum("bpd,d->bp", seen[layer], weight[layer]) + bias[layer]
            return torch.sigmoid(logits)[..., None] * output

        return f"blocks.{layer}.hook_mlp_out", close

    layers = range(twin.cfg.n_layers)
    with DoublePrecision():
        found = sparse(tokens)
        expected = twin.run_with_hooks(
            tokens, fwd_hooks=[hook(layer) for layer in layers for hook in (read, write)]
        )
        found.logsumexp(dim=-1).sum().backward()
        expected.logsumexp(dim=-1).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gates.weight.grad, weight.grad, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(gates.bias.grad, bias.grad, rtol=1e-7, atol=1e-9)
    theirs = read_parameters(twin)
    for name, parameter in read_parameters(sparse.model).items():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-7, atol=1e-9)
    assert gates.weight.grad.abs().max() > 1e-3


def test_edits_to_what_an_mlp_reads_move_its_gate(tokens: Tensor) -> None:
    sparse = SparseTransformer(build("plain"), mlps=True)
    gates = gates_of(sparse)
    gates.bias.data.fill_(-1.0)
    gates.weight.data.fill_(1.0)
    name = "blocks.1.ln2.hook_normalized" if HAS_HOOKED else "blocks.1.mlp.hook_in"

    def lift(value: Tensor, hook: Any) -> Tensor:
        value = torch.zeros_like(value)
        value[:, 5] += 1.0
        return value

    with sparse.hooks(fwd_hooks=[(name, lift)]):
        found = sparse.run_with_counts(tokens, keep_gates=True)[1].mlp_gates
    assert found is not None
    assert torch.equal(found[1], (torch.arange(8) == 5).expand(3, 8))


def test_a_patch_at_the_output_is_shown_whatever_the_gate_says(tokens: Tensor) -> None:
    """A closed gate of another site shows its patch; the learned gate comes before it."""
    sparse = SparseTransformer(build("plain"), mlps=True)
    gates_of(sparse).bias.data.fill_(-1e4)
    name = "blocks.0.hook_mlp_out"
    patch = {name: torch.randn(3, 8, sparse.cfg.d_model)}
    seen = []
    closed = torch.zeros(1, 8)
    closed[0, 2:] = 1
    with gated(sparse, HookPoints((name,), (1,)), closed, patch):
        sparse.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: seen.append(x.clone()))])
    assert torch.equal(seen[0][:, :2], patch[name][:, :2])
    assert not bool(seen[0][:, 2:].any())


# What is drawn and counted.


@pytest.mark.parametrize("kind", ["plain", "grouped", "parallel"])
def test_expected_count_is_the_mean_of_sampled_ones(tokens: Tensor, kind: str) -> None:
    sparse = sparse_of(kind, initial_bias=1e4)
    expected = sparse.count_attention_edges(tokens).expected_mlps
    assert expected is not None
    name, runs = "blocks.0.hook_mlp_out", 400
    with sparse.sampled(torch.Generator().manual_seed(0)), torch.no_grad():
        _, cache = sparse.run_with_cache(tokens.repeat(runs, 1), names_filter=name)
    total = cache[name].any(dim=-1).sum(dim=-1).view(runs, 3).sum(dim=0)
    # 8 positions: a standard deviation of at most 1.5 per run, 0.07 for the mean over 400.
    torch.testing.assert_close(total / runs, expected[0], atol=0.3, rtol=0)


def test_the_expected_count_has_the_gradient_of_finite_differences(tokens: Tensor) -> None:
    sparse = sparse_of("plain", "float64", initial_bias=0.3)
    gates = gates_of(sparse)

    def expected() -> Tensor:
        counts = sparse.run_with_counts(tokens)[1]
        assert counts.expected_mlps is not None
        return counts.expected_mlps[0].sum()

    expected().backward()
    weight = sparse.model.pos_embed.W_pos
    for parameter, index in ((weight, (1, 3)), (gates.weight, (0, 5)), (gates.bias, (0,))):
        assert parameter.grad is not None
        analytic = parameter.grad[index].item()
        assert analytic == pytest.approx(derivative(expected, parameter, index), rel=1e-6)
        assert abs(analytic) > 1e-4


def test_pressure_pulls_at_gates_that_are_wide_open(tokens: Tensor) -> None:
    sparse = SparseTransformer(build("plain"), mlps=True)
    gates = gates_of(sparse)
    gates.bias.data.fill_(50.0)
    found = {}
    for pressure in (0.0, 0.2):
        gates.zero_grad()
        counts = sparse.run_with_counts(tokens, pressure=pressure)[1]
        assert counts.expected_mlps is not None
        assert counts.expected_mlps.sum().item() == 2 * 3 * 8
        counts.expected_mlps.sum().backward()
        assert gates.bias.grad is not None
        found[pressure] = gates.bias.grad.clone()
    assert found[0.0].abs().max() < 1e-10
    torch.testing.assert_close(found[0.2], torch.full((2,), 0.2 * 3 * 8))


@pytest.mark.parametrize("kind", ["plain", "grouped"])
@pytest.mark.parametrize("left", [True, False])
def test_padding_counts_for_nothing(tokens: Tensor, kind: str, left: bool) -> None:
    sparse = sparse_of(kind, initial_bias=0.0)
    pad, plain = torch.zeros(3, 4, dtype=torch.long), sparse.count_attention_edges(tokens)
    padded = torch.cat([pad, tokens] if left else [tokens, pad], dim=1)
    mask = torch.ones_like(padded)
    mask[:, slice(0, 4) if left else slice(-4, None)] = 0
    found = sparse.count_attention_edges(padded, attention_mask=mask)
    for name in ("active_mlps", "possible_mlps"):
        assert torch.equal(getattr(found, name), getattr(plain, name)), name
    torch.testing.assert_close(found.expected_mlps, plain.expected_mlps)
    gates = sparse.run_with_counts(padded, attention_mask=mask, keep_gates=True)[1].mlp_gates
    assert gates is not None and not bool(gates[:, mask == 0].any())


def test_counts_of_batches_are_counts_of_all(tokens: Tensor) -> None:
    sparse = sparse_of("plain")
    whole, parts = (sparse.count_attention_edges(tokens, batch_size=n) for n in (3, 2))
    for name in ("active_mlps", "possible_mlps"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))
    torch.testing.assert_close(whole.expected_mlps, parts.expected_mlps)
    assert whole.active_mlps is not None
    assert f"{whole.active_mlps_per_prompt:.2f} active of 16 MLP outputs" in repr(whole)


# Passes that run twice, in pieces, or in other precision.


def test_checkpointed_activations_have_the_same_gradients(tokens: Tensor) -> None:
    def gradients(checkpointed: bool) -> tuple[list[Tensor], int]:
        sparse = sparse_of("plain", "float64", initial_bias=0.5)
        kept = checkpointed_activations(sparse) if checkpointed else nullcontext()
        with kept, sparse.sampled(torch.Generator().manual_seed(1)):
            logits, counts = sparse.run_with_counts(tokens, pressure=0.1, **NO_CACHE)
        assert counts.expected_mlps is not None
        size = counts.expected.sum() + counts.expected_mlps.sum()
        (logits.logsumexp(-1).sum() + size).backward()
        found = [p.grad for p in sparse.parameters() if p.grad is not None]
        return found, len(counts.expected_mlps)

    (found, layers), (expected, _) = gradients(True), gradients(False)
    assert layers == 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_generation_with_a_key_value_cache_equals_whole_passes(
    tokens: Tensor, generate_both_ways: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    found, expected = generate_both_ways(sparse_of("grouped", initial_bias=0.0), tokens)
    assert torch.equal(found, expected)


def test_only_the_positions_that_are_read(tokens: Tensor) -> None:
    """The last MLP may be left out elsewhere: logits and counts stay what they are."""
    sparse = sparse_of("plain", initial_bias=0.5)
    read = torch.zeros(3, 8, dtype=torch.bool)
    read[:, -1] = True
    whole, counts = sparse.run_with_counts(tokens)
    with adapt(sparse).only_at(read) as logits_at:
        logits, again = sparse.run_with_counts(tokens)
    torch.testing.assert_close(logits_at(logits), whole[read])
    assert torch.equal(again.active_mlps, counts.active_mlps)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_models_have_gates_in_float32(tokens: Tensor, dtype: str) -> None:
    sparse = sparse_of("plain", dtype, initial_bias=0.5)
    assert gates_of(sparse).weight.dtype == torch.float32
    logits, counts = sparse.run_with_counts(tokens, keep_gates=True)
    assert logits.dtype == getattr(torch, dtype) and counts.mlp_gates is not None
    here = layers_of(sparse, tokens)[0]
    assert here["hook_mlp_out"].dtype == getattr(torch, dtype)
    assert torch.equal(here["hook_mlp_out"].any(dim=-1), counts.mlp_gates[0])


def test_autocast_leaves_the_gates_precise(tokens: Tensor) -> None:
    sparse = sparse_of("plain")
    read = torch.randn(2, 5, sparse.cfg.d_model, generator=torch.Generator().manual_seed(0))
    plain = gates_of(sparse).logits(0, read)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gates_of(sparse).logits(0, read), plain)


# The wrapper.


@pytest.mark.parametrize("kind", KINDS)
def test_copies_have_gates_of_their_own(tokens: Tensor, kind: str) -> None:
    sparse = sparse_of(kind, initial_bias=1e4)
    before = sparse(tokens)
    twin = copy.deepcopy(sparse)
    assert torch.equal(twin(tokens), before)
    gates_of(twin).bias.data.fill_(1e4)
    assert torch.equal(sparse(tokens), before)
    assert torch.equal(twin(tokens), sparse.dense_copy()(tokens))
    twin.gates.bias.data.fill_(-1e4)
    assert torch.equal(sparse(tokens), before)
    assert not any(p.requires_grad for p in sparse.dense_copy().parameters())
    assert {"mlp_gates.weight", "mlp_gates.bias"} <= set(read_parameters(twin))


# Bad input.


def test_gates_of_another_model_are_refused() -> None:
    def new(n_layers: int, d_model: int) -> MLPGates:
        return MLPGates(torch.zeros(n_layers), None, torch.zeros(n_layers, d_model))

    model = build("plain")
    for wrong in (new(3, 16), new(2, 15)):
        with pytest.raises(ValueError, match=r"the model needs \[\(2,\), \(2, 16\)\]"):
            SparseTransformer(model, mlp_gates=wrong)
    gates = new(2, 16)
    assert SparseTransformer(model, mlp_gates=gates).mlp_gates is gates


def test_an_mlp_that_writes_by_another_way_is_refused() -> None:
    model = build("plain")
    point: Any = adapt(model).place("blocks.1.hook_resid_post")
    point.__dict__["forward"] = lambda stream: stream + stream.roll(1, dims=-1)
    with pytest.raises(ValueError, match="that in layer 1 of 'tiny' does not"):
        SparseTransformer(model, mlps=True)
