"""Which attention edges are possible: those that transformers' own attention does not mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from architectures import (
    ARCHITECTURES,
    CONTEXT,
    D_MODEL,
    N_HEADS,
    VOCABULARY,
    hooked_transformer,
    plain_transformer,
)
from tiny import hooked_alone
from torch import Tensor
from transformers import DynamicCache

from sparse_tl import SparseTransformer
from sparse_tl.backend import boot, deferred
from sparse_tl.devices import SizeByDevice
from sparse_tl.gates.sparse import blockwise

LENGTH = 12
SMALL: dict[str, Any] = {
    "hidden_size": D_MODEL,
    "num_hidden_layers": 2,
    "num_attention_heads": N_HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomConfig", {"hidden_size": D_MODEL, "n_layer": 2, "n_head": N_HEADS}),
    # Position biases within the mask, one row for each head.
    "falcon with alibi": ("FalconConfig", {**SMALL, "alibi": True}),
    # Masks that are true where a pair is masked.
    "mpt": ("MptConfig", {"d_model": D_MODEL, "n_layers": 2, "n_heads": N_HEADS}),
    # Attention that chooses four keys for each query by itself.
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        {
            **SMALL,
            **LATENT,
            "num_key_value_heads": N_HEADS,
            "index_topk": 4,
            "index_head_dim": 8,
            "index_n_heads": 2,
            "mlp_layer_types": ["dense", "dense"],
        },
    ),
}
PADDED = torch.tensor([0, 3, 7])
"""Padding tokens of the prompts."""


def _plain(name: str) -> Any:
    if name in ARCHITECTURES:
        return plain_transformer(name)
    kind, fields = MORE[name]
    config = getattr(transformers, kind)(vocab_size=VOCABULARY, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        ).eval()


def _tokens() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (3, LENGTH), generator=generator)


def _real(side: str) -> Tensor:
    real = (torch.arange(LENGTH) >= PADDED[:, None]).long()
    return {"none": torch.ones_like(real), "left": real, "right": real.flip(1)}[side]


@torch.no_grad()
def _attended(plain: Any, real: Tensor) -> Tensor:
    """Where a model of transformers attends, ``[layer, prompt, head, query, key]``."""
    found = plain(_tokens(), attention_mask=real, output_attentions=True, use_cache=False)
    return torch.stack(found.attentions) > 0


@pytest.fixture(params=["whole", "by blocks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How attention is computed: as whole patterns, or a few queries at a time."""
    if request.param == "by blocks":
        monkeypatch.setattr(deferred, "LONG", LENGTH)
        monkeypatch.setattr(blockwise, "QUERIES_AT_ONCE", 5)
        monkeypatch.setattr(blockwise, "EDGES_AT_ONCE", SizeByDevice(150, 1))
    return request.param


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", [*ARCHITECTURES, *MORE])
@torch.no_grad()
def test_possible_edges_are_where_transformers_attends(name: str, side: str, way: str) -> None:
    """A query that is padding has none, and its key none either, whichever way they are counted."""
    if (name, side, way) == ("glm_moe_dsa", "left", "by blocks"):
        pytest.skip("its padding is NaN by blocks, where no key that it chose is within the block")
    plain, real = _plain(name), _real(side)
    expected = _attended(plain, real) & real[None, :, None, :, None].bool()
    sparse = SparseTransformer(boot(plain, name=name))
    with sparse.opened():
        counts = sparse.run_with_counts(_tokens(), attention_mask=real)[1]
        kept = sparse.run_with_counts(_tokens(), attention_mask=real, keep_gates=True)[1].gates
    assert torch.equal(kept, expected)
    for found in (counts.possible, counts.active, counts.expected.long()):
        assert torch.equal(found, expected.sum(dim=(-2, -1)))
    assert torch.equal(counts.tokens, real.sum(dim=1))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@torch.no_grad()
def test_pieces_under_a_key_value_cache_have_the_edges_of_the_whole(name: str) -> None:
    """Queries of a later piece; a layer with a window keeps its last keys alone."""
    sparse = SparseTransformer(boot(plain_transformer(name), name=name))
    cache = DynamicCache(config=sparse.original_model.config)
    expected = sparse.count_attention_edges(_tokens()).possible
    found = torch.zeros_like(expected)
    for piece in _tokens().split(5, dim=1):
        found += sparse.run_with_counts(piece, past_key_values=cache, use_cache=True)[1].possible
    assert torch.equal(found, expected)


@hooked_alone
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_possible_edges_of_a_hooked_transformer(name: str, side: str, way: str) -> None:
    real = _real(side)
    expected = _attended(plain_transformer(name), real) & real[None, :, None, :, None].bool()
    sparse = SparseTransformer(hooked_transformer(name))
    counts = sparse.run_with_counts(_tokens(), attention_mask=real)[1]
    assert torch.equal(counts.possible, expected.sum(dim=(-2, -1)))
    assert torch.equal(counts.tokens, real.sum(dim=1))
