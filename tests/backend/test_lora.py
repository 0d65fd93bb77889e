"""Low-rank adapters: they start as nothing, all of them are used, and weights are read with them.

The oracle is a model of transformers to whose weights ``2 B A`` is added by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from architectures import plain_transformer, random_pairs, random_tokens as tokens
from torch import Tensor, nn

from sparse_tl.backend import (
    adapt,
    add_lora,
    boot,
    load_model,
    merge_lora,
    merged_lora,
    save_model,
)
from sparse_tl.backend.lora import has_adapters, lora_layers, lora_off, lora_parameters
from sparse_tl.circuits import attribute_circuit_edges
from sparse_tl.gates import SparseTransformer
from sparse_tl.metrics import logit_difference

# Projections one by one, with biases, joint (in two layouts), beside experts, under a post-norm.
NAMES = ["llama", "qwen2", "gpt2", "phi3", "mixtral", "olmo2"]


def adapted(name: str, dtype: str = "float32") -> Any:
    """A model whose adapters are no longer at their start."""
    model = add_lora(boot(plain_transformer(name, dtype)), 4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_they_change_nothing_at_first_and_all_of_them_learn(name: str) -> None:
    model: Any = boot(plain_transformer(name))
    before = model(tokens()).detach()
    own = {id(p) for p in model.parameters()}
    assert add_lora(model, 4) is model
    assert torch.equal(model(tokens()), before)
    added = lora_parameters(model)
    assert {id(p) for p in model.parameters()} == own | {id(p) for p in added}
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in added}
    per_layer = 4 if name == "mixtral" else 6 if name == "gpt2" else 7  # experts are no modules
    assert len(added) == 2 * 3 * per_layer
    learnt: set[int] = set()
    for _ in range(2):  # A has no gradient while B is 0
        model.zero_grad()
        model(tokens()).square().mean().backward()
        learnt |= {id(p) for p in added if p.grad is not None and bool(p.grad.any())}
        with torch.no_grad():
            for parameter in added:
                assert parameter.grad is not None
                parameter.sub_(1e-3 * parameter.grad)
    assert learnt == {id(p) for p in added}


def test_they_start_the_same_every_time() -> None:
    state = torch.random.get_rng_state()
    first, second = (lora_parameters(add_lora(boot(plain_transformer("llama")))) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert {min(parameter.shape) for parameter in first} == {16}


def _delta(layer: Any) -> Tensor:
    return 2 * layer.lora_B.weight @ layer.lora_A.weight


@torch.no_grad()
def _llama_by_hand(model: Any) -> Any:
    plain = plain_transformer("llama")
    names = {"self_attn": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    names["mlp"] = ["gate_proj", "up_proj", "down_proj"]
    for bridged, layer in zip(model.original_model.model.layers, plain.model.layers, strict=True):
        for part, projections in names.items():
            for name in projections:
                there = getattr(getattr(bridged, part), name).original_component
                getattr(getattr(layer, part), name).weight += _delta(there)
    return plain


@torch.no_grad()
def _gpt2_by_hand(model: Any) -> Any:
    """Its q, k and v are one matrix, and all are stored as ``[in, out]``."""
    plain = plain_transformer("gpt2")
    for block, layer in zip(model.blocks, plain.transformer.h, strict=True):
        parts = [getattr(block.attn, slot).original_component for slot in "qkv"]
        layer.attn.c_attn.weight += torch.cat([_delta(part) for part in parts]).T
        layer.attn.c_proj.weight += _delta(block.attn.o.original_component).T
        layer.mlp.c_fc.weight += _delta(getattr(block.mlp, "in").original_component).T
        layer.mlp.c_proj.weight += _delta(block.mlp.out.original_component).T
    return plain


@pytest.mark.parametrize(("name", "by_hand"), [("llama", _llama_by_hand), ("gpt2", _gpt2_by_hand)])
def test_they_compute_what_weights_with_their_product_do(
    name: str, by_hand: Callable[[Any], Any], tmp_path: Path
) -> None:
    model = adapted(name)
    expected = by_hand(model)
    found = model(tokens())
    assert close(found, expected(tokens()).logits)
    assert not close(found, plain_transformer(name)(tokens()).logits)
    save_model(model, tmp_path)
    saved: Any = load_model(tmp_path)
    theirs = dict(expected.named_parameters())
    assert not has_adapters(saved)
    again = type(expected).from_pretrained(tmp_path)
    for where, parameter in again.named_parameters():
        assert torch.allclose(parameter, theirs[where], atol=1e-6), where
    assert torch.equal(model(tokens()), found), "the model goes on as it was"
    assert len(lora_layers(model)) == len(lora_parameters(model)) / 2 > 0


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_read_with_them(name: str) -> None:
    model = adapted(name)
    copied = adapt(model).copy()
    assert not has_adapters(copied)
    assert close(copied(tokens()), model(tokens()))
    one, other = adapt(model), adapt(copied)
    for layer in range(one.n_layers):
        assert torch.allclose(one.W_O(layer), other.W_O(layer), atol=1e-6)
        for slot in ("q", "k", "v"):
            assert torch.allclose(one.qkv(layer, slot)[0], other.qkv(layer, slot)[0], atol=1e-6)
            assert torch.equal(one.qkv(layer, slot)[1], other.qkv(layer, slot)[1])
    assert one.graph == other.graph, "checked in numbers, with these weights"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_circuits_of_a_model_with_them_are_those_of_its_merged_copy(name: str) -> None:
    model, pairs = adapted(name), random_pairs()
    found, expected = (
        attribute_circuit_edges(one, pairs, logit_difference, progress=False).values
        for one in (model, adapt(model).copy())
    )
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("name", NAMES)
def test_merging_adds_them_to_the_weights(name: str) -> None:
    model: Any = boot(plain_transformer(name))
    n_own = len([*model.parameters()])
    names = [where for where, _ in model.original_model.named_parameters()]
    assert merge_lora(model) is model, "nothing to merge"
    model = adapted(name)
    before = model(tokens())
    assert merge_lora(model) is model
    assert not has_adapters(model)
    assert close(model(tokens()), before)
    assert len([*model.parameters()]) == n_own
    assert [where for where, _ in model.original_model.named_parameters()] == names
    assert all(parameter.requires_grad for parameter in model.parameters())
    add_lora(model, 2)
    assert len(lora_layers(model)) > 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_switched_off_they_leave_the_dense_model(name: str) -> None:
    model: Any = boot(plain_transformer(name))
    before, dense = model(tokens()), adapt(model).copy()
    model = adapted(name)
    chosen = lora_parameters(model)[:3]
    model.requires_grad_(False)
    for parameter in chosen:
        parameter.requires_grad_(True)
    with lora_off(model):
        assert torch.equal(model(tokens()), before)
        assert torch.equal(adapt(model).W_O(1), adapt(dense).W_O(1))
    assert not close(model(tokens()), before)
    flags = {id(p) for p in model.parameters() if p.requires_grad}
    assert flags == {id(p) for p in chosen}


def test_in_half_precision_they_are_float32() -> None:
    model = adapted("llama", "bfloat16")
    assert {p.dtype for p in lora_parameters(model)} == {torch.float32}
    assert model(tokens()).dtype == torch.bfloat16
    merged = adapt(model).copy()
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
    exact = adapted("llama")(tokens())
    for found in (model(tokens()), merged(tokens())):
        assert (found - exact).abs().mean() < 0.05 * exact.abs().mean()


def test_they_can_be_put_under_gates() -> None:
    model: Any = boot(plain_transformer("llama"))
    sparse = SparseTransformer(model, initial_bias=1.0)
    before = sparse(tokens())
    add_lora(model, 4)
    assert torch.equal(sparse(tokens()), before)


# What is refused.


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's
def test_adapters_on_a_model_that_has_some() -> None:
    model = add_lora(boot(plain_transformer("llama")), 4)
    with pytest.raises(ValueError, match=r"has some already.*merge_lora\(model\)"):
        add_lora(model, 4)
    plain = plain_transformer("llama")
    theirs: nn.Module = peft.get_peft_model(plain, peft.LoraConfig(target_modules=["q_proj"]))
    for one in (plain, theirs.base_model.model):
        with pytest.raises(ValueError, match=r"has adapters of peft.*merge_and_unload.*add_"):
            boot(one)


@pytest.mark.parametrize("name", NAMES)
def test_merged_projections_have_the_same_outputs_and_gradients(name: str) -> None:
    model = adapted(name, "float64")
    parameters = lora_parameters(model)

    def passed() -> list[Tensor]:
        model.zero_grad()
        output = model(tokens())
        output.square().mean().backward()
        return [output.detach(), *(p.grad.clone() for p in parameters if p.grad is not None)]

    expected = passed()
    with lora_off(model):
        dense = model(tokens()).detach()
    with merged_lora(model, None) as merge:
        found = passed()
        with lora_off(model):
            torch.testing.assert_close(model(tokens()).detach(), dense, rtol=0, atol=1e-12)
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(2)
        merge()
        changed = model(tokens()).detach()
    assert len(found) == len(expected) == 1 + len(parameters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(changed, model(tokens()).detach(), rtol=1e-9, atol=1e-12)
    assert not close(changed, expected[0])


def test_merged_projections_under_autocast_convert_weights_once() -> None:
    """What a pass returns is that of autocast, whose every pass converts all weights."""
    model = add_lora(boot(plain_transformer("llama")), 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(tokens()).float()
        with merged_lora(model, torch.bfloat16):
            assert model.unembed.original_component.forward.weight.dtype == torch.bfloat16
            found = model(tokens()).float()
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert model(tokens()).dtype == torch.float32
