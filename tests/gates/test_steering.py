"""Steering is what a plain hook would add, and is gone afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import D_MODEL, plain_transformer
from torch import Tensor

from sparse_tl import (
    HookPoints,
    SparseTransformer,
    ablate_heads,
    gated,
    load_addition_models,
    steer,
)
from sparse_tl.backend import Model, boot

Build = Callable[..., Model]
TOKENS = torch.randint(13, (3, 6), generator=torch.Generator().manual_seed(0))


def added(vector: Tensor, positions: list[int]) -> Callable[..., Tensor]:
    def add(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        for place in positions:
            value[:, place] += vector
        return value

    return add


def test_it_composes_with_gates_and_with_a_sparse_model(build_tiny: Build) -> None:
    sparse, name = SparseTransformer(build_tiny(), initial_bias=0.0), "blocks.1.hook_resid_pre"
    vector = torch.ones(sparse.cfg.d_model)
    hooks = [(name, added(2 * vector, [5]))]
    with ablate_heads(sparse, [(1, 0)]):
        expected = sparse.run_with_hooks(TOKENS, fwd_hooks=hooks)
        with steer(sparse, name, vector, scale=2.0, positions=[-1]):
            torch.testing.assert_close(sparse(TOKENS), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "olmo2", "gemma2"])
@torch.no_grad()
def test_the_stream_between_attention_and_mlp_is_edited_whole(name: str) -> None:
    """On a bridge, ``hook_resid_mid`` is the MLP's input; attention adds to the whole stream."""
    model, vector = boot(plain_transformer(name)), torch.ones(D_MODEL)
    point, every = "blocks.1.hook_resid_mid", list(range(6))
    hooks = [("blocks.1.hook_attn_out", added(2 * vector, every))]
    expected = model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    with steer(model, point, vector, scale=2.0):
        torch.testing.assert_close(model(TOKENS), expected)
    before: list[Tensor] = []
    cancel: Any = [
        ("blocks.1.hook_resid_pre", lambda value, hook: before.append(value)),
        ("blocks.1.hook_attn_out", lambda value, hook: -before[-1]),
    ]
    expected = model.run_with_hooks(TOKENS, fwd_hooks=cancel)
    with gated(model, HookPoints((point,), ()), torch.zeros(1)):
        torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-5)


def test_a_hook_point_that_never_fires_is_refused() -> None:
    """A model with rotary embeddings adds none at positions."""
    model = boot(plain_transformer("llama"))
    with (
        pytest.raises(ValueError, match="hook_pos_embed .* never fired"),
        steer(model, "hook_pos_embed", torch.ones(D_MODEL)),
    ):
        model(TOKENS)


def test_a_vector_can_be_learned(build_tiny: Build) -> None:
    model = build_tiny().requires_grad_(False)
    vector = torch.zeros(model.cfg.d_model, requires_grad=True)
    with steer(model, "blocks.0.hook_resid_pre", vector):
        model(TOKENS)[:, -1, 3].sum().backward()
    assert vector.grad is not None and vector.grad.abs().max() > 0


def test_the_difference_of_two_prompts_turns_one_into_the_other() -> None:
    """At the last layer's input, where each position is read for itself in the sparse adder."""
    _, sparse = load_addition_models()
    name, prompts = "blocks.3.hook_resid_post", ["36+28=?????", "36+21=?????"]
    first, second = (sparse.run_with_cache(prompt)[1][name][0, -1] for prompt in prompts)
    with steer(sparse, name, second - first, positions=[-1]):
        found = sparse(prompts[0])[0, -1]
    assert sparse.tokenizer.decode(found.argmax()) == "7"
