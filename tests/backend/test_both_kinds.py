"""A bridge and a HookedTransformer of the same weights: the same numbers, whatever is asked.

Scores are compared relative to the largest one.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from architectures import (
    CONTEXT,
    D_MODEL,
    N_HEADS,
    VOCABULARY,
    hooked_transformer,
    off,
    plain_transformer,
    random_pairs,
    random_tokens,
)
from tiny import hooked_alone

from sparse_tl import (
    ShuffledStream,
    SparseTransformer,
    TargetDataset,
    TokenBatch,
    acdc,
    attribute_circuit_edges,
    attribute_heads,
    evaluate_circuit_edges,
    fit_head_gates,
    logit_difference,
    patch_exactly,
    post_train,
)
from sparse_tl.backend import Model, boot

pytestmark = hooked_alone

CHANGED: dict[str, dict[str, Any]] = {"olmo": {"num_key_value_heads": 4}}
"""TransformerLens converts an OLMo whose heads have keys and values of their own."""
_ROTARY: dict[str, Any] = {
    "n_layers": 2,
    "n_heads": N_HEADS,
    "d_model": D_MODEL,
    "d_head": 8,
    "d_mlp": 48,
    "d_vocab": VOCABULARY,
    "n_ctx": CONTEXT,
    "positional_embedding_type": "rotary",
    "rotary_dim": 8,
    "gated_mlp": True,
}
BY_HAND: dict[str, dict[str, Any]] = {
    "olmo": {**_ROTARY, "act_fn": "silu", "normalization_type": "LN"},
    "gemma": {
        **_ROTARY,
        "n_key_value_heads": 2,
        "act_fn": "gelu_pytorch_tanh",
        "normalization_type": "RMS",
        "final_rms": True,
        "eps": 1e-6,
    },
}
"""What TransformerLens knows by the names of published models alone."""
BOTH = ("gpt2", "gpt_neox", "llama", "qwen2", "qwen3", "mistral", "mixtral", "phi3", *BY_HAND)
"""What 3.9 makes a HookedTransformer of that circuits are defined on."""


def twins(name: str, dtype: str = "float32") -> tuple[Model, Model]:
    changed = {"n_layer" if name == "gpt2" else "num_hidden_layers": 2, **CHANGED.get(name, {})}
    bridge = boot(plain_transformer(name, dtype, **changed), name=name)
    return bridge, hooked_transformer(name, dtype, BY_HAND.get(name), **changed)


@pytest.mark.parametrize("name", BOTH)
@torch.no_grad()
def test_logits(name: str) -> None:
    """In float64: in float32 HookedTransformer's own rounding is up to 1.4e-6 (Phi-3)."""
    # It chooses experts in float32 alone.
    bridge, hooked = twins(name, "float32" if name == "mixtral" else "float64")
    assert off(bridge(random_tokens()), hooked(random_tokens())) < 1e-6


@pytest.mark.parametrize("name", BOTH)
def test_scores_and_circuits(name: str) -> None:
    bridge, hooked = twins(name)
    some, quiet = random_pairs(6), {"progress": False}
    scores: list[Any] = []
    for method in ("eap", "eap-ig"):
        for attribute in (attribute_heads, attribute_circuit_edges):
            scores = [
                attribute(model, some, logit_difference, method=method, **quiet)
                for model in (bridge, hooked)
            ]
            assert off(scores[0].values, scores[1].values) < 2e-5
    exact = [
        torch.tensor(patch_exactly(model, some, logit_difference, **quiet).to_numpy())
        for model in (bridge, hooked)
    ]
    assert off(*exact) < 2e-5
    effects = [
        evaluate_circuit_edges(model, some, logit_difference, scores[1], [5, 20, 50], **quiet)
        for model in (bridge, hooked)
    ]
    assert off(effects[0].effect, effects[1].effect) < 2e-5
    found = [acdc(model, some, threshold=0.01, size=30, **quiet) for model in (bridge, hooked)]
    assert 0 < len(found[0].circuit) <= 30
    assert torch.equal(found[0].circuit.mask, found[1].circuit.mask)
    assert len(found[0].history) == len(found[1].history)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_head_gates(name: str) -> None:
    dataset = TargetDataset.from_tokens(random_tokens(40, 6).tolist(), [(3, 5)] * 40)
    settings = {"seeds": 3, "updates": 6, "batch_size": 8, "record_every": 2, "progress": False}
    roles = [fit_head_gates(model, dataset, **settings) for model in twins(name)]
    for kind in ("facilitation", "irrelevance", "interference"):
        one, other = (found.score(kind) for found in roles)
        assert off(one, other) < 2e-5


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_post_training(name: str) -> None:
    """Of queries and keys: they have the same parameters on both kinds."""
    training, validation = (TokenBatch.next_token(random_tokens(n, seed=n)) for n in (64, 32))
    histories = []
    for model in twins(name):
        outcome = post_train(
            SparseTransformer(model, initial_bias=1.0),
            ShuffledStream(training, 16),
            target_loss="+0.2",
            validation=validation,
            steps=6,
            learning_rate={"gates": 1e-2, "qk": 1e-2},
            progress=False,
        )
        histories.append(outcome.history.drop(columns="seconds"))
    assert list(histories[0]["step"]) == list(range(7))
    pd.testing.assert_frame_equal(*histories, rtol=1e-5, atol=1e-6)
