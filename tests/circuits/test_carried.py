"""What attention edges carry, against vectors that are written out, and numbers known on paper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from architectures import plain_transformer
from tiny import SHAPES
from torch import Tensor
from wiring import blank_model

from sparse_tl.backend import boot
from sparse_tl.circuits import trace_attention

TOKENS = torch.tensor([3, 5, 2, 7, 3, 8])


def by_hand(model: Any, layer: int, factor: Tensor | float = 1.0) -> Tensor:
    """Every edge's vector, one by one; `factor` is that of a norm of what attention writes."""
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS[None])
    values, pattern, stream = (
        cache[f"blocks.{layer}.{name}"][0]
        for name in ("attn.hook_v", "attn.hook_pattern", "hook_resid_pre")
    )
    n_heads, n = pattern.shape[:2]
    values = values.view(n, -1, model.cfg.d_head)
    written = torch.zeros(n_heads, n, n)
    for head in range(n_heads):
        value = values[:, head * values.shape[1] // n_heads] @ model.blocks[layer].attn.W_O[head]
        for query in range(n):
            for key in range(query + 1):
                vector = pattern[head, query, key] * value[key]
                if isinstance(factor, Tensor):
                    vector = vector * factor[query]
                written[head, query, key] = vector.norm()
    return written / (stream.norm(dim=1) + written.sum(dim=(0, 2)))[:, None]


@pytest.mark.parametrize("kind", [*SHAPES, "float64"])
def test_it_is_the_share_of_the_stream_that_an_edge_writes(build_tiny: Any, kind: str) -> None:
    model = build_tiny(kind)
    carried = trace_attention(model, TOKENS).edge_weights("carried")
    for layer in range(2):
        torch.testing.assert_close(carried[layer, :, :6, :6], by_hand(model, layer))
    assert not carried[..., 6, :].any() and not carried[..., 6].any()


@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_it_is_that_of_grouped_values_and_under_a_norm_of_what_is_written(name: str) -> None:
    model: Any = boot(plain_transformer(name))
    carried = trace_attention(model, TOKENS).edge_weights("carried")
    for layer in range(2):
        factor: Tensor | float = 1.0
        if name == "olmo2":
            norm = model.original_model.model.layers[layer].post_attention_layernorm
            with torch.no_grad():
                _, cache = model.run_with_cache(TOKENS[None])
            z = cache[f"blocks.{layer}.attn.hook_z"][0].view(6, -1, model.cfg.d_head)
            raw = torch.einsum("qhd,hde->qe", z, model.blocks[layer].attn.W_O)
            scale = (raw.square().mean(dim=-1, keepdim=True) + norm.variance_epsilon).sqrt()
            factor = (norm.weight / scale).detach()
        expected = by_hand(model, layer, factor).detach()
        torch.testing.assert_close(carried[layer, :, :6, :6], expected, rtol=1e-4, atol=1e-6)


def test_an_attended_sink_without_values_carries_nothing() -> None:
    """Token 0 embeds as (4, 0), token 1 as (0, 3); heads read scores from the first number, and
    values from the second. Token 0 gets 8 times the attention of a token 1: after 0, 1, 1

        attention 0.8, 0.1, 0.1;  written 0.8 * 0, 0.1 * 3 * 2 = 0.6, 0.6;  stream (0, 3)

    so the edge from the token before carries 0.6 / (3 + 1.2) = 1/7, and the edge from the token
    itself the same.
    """
    model: Any = blank_model(n_layers=1, n_heads=1, d_model=2, d_head=2, n_ctx=4, d_vocab=2)
    with torch.no_grad():
        model.embed.W_E[:] = torch.tensor([[4.0, 0.0], [0.0, 3.0]])
        attention = model.blocks[0].attn
        attention.b_Q[:] = 1.0
        attention.W_K[0, 0, 0] = math.sqrt(2) * math.log(8) / 4  # scores are divided by the root
        attention.W_V[0, 1, 0] = 1.0
        attention.W_O[0, 0, 1] = 2.0
    graph = trace_attention(model, torch.tensor([0, 1, 1]))
    exactly = {"rtol": 1e-6, "atol": 1e-9, "check_dtype": False}
    assert_close = torch.testing.assert_close
    assert_close(graph.attention[0, 0, 2, :3], torch.tensor([0.8, 0.1, 0.1]), **exactly)
    expected = torch.tensor([[0, 0, 0], [0, 2 / 11, 0], [0, 1 / 7, 1 / 7]])
    assert_close(graph.edge_weights("carried")[0, 0, :3, :3], expected, **exactly)
    assert graph.to_pandas()["carried"].tolist()[0] == 0, "the most attended edge"
