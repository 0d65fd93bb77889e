"""Models in bfloat16: all analyses run, and say about what they say in float32."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import (
    ARCHITECTURES,
    plain_transformer,
    random_pairs as pairs,
    random_tokens as tokens,
)

from sparse_tl import (
    ShuffledStream,
    SparseTransformer,
    TargetDataset,
    TokenBatch,
    acdc,
    attribute_circuit_edges,
    fit_head_gates,
    load_model,
    logit_difference,
    patch_exactly,
    post_train,
)
from sparse_tl.backend import Model, adapt, boot, checkpointed_activations

pytestmark = pytest.mark.long

SOME = ("gpt2", "llama", "olmo", "olmo2")
"""OLMo's rotary tables make k float32, v stays as it is: both meet in a key-value cache alone."""


@pytest.fixture(params=SOME)
def halves(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Model, Model]:
    """A model in bfloat16 from its folder, and the same weights in float32."""
    plain_transformer(request.param, "bfloat16").save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu", dtype="bfloat16")
    return model, load_model(tmp_path, device="cpu")


def test_scores_are_those_of_float32(halves: tuple[Model, Model]) -> None:
    options: dict[str, Any] = {"method": "eap-ig", "steps": 3, "progress": False}
    scores, exact = (
        attribute_circuit_edges(model, pairs(), logit_difference, **options) for model in halves
    )
    found, expected = scores.values.float(), exact.values.float()
    # Eight bits: logits differ by 2 %, and scores are differences of their differences.
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()
    assert torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1] > 0.99
    names = ["a0.h1", "a1.h2->m2"]
    effects = [patch_exactly(m, pairs(), logit_difference, names, progress=False) for m in halves]
    # The largest logits are about 8, where numbers of eight bits lie 0.06 apart.
    assert (effects[0] - effects[1]).abs().max() < 0.12
    kept = acdc(halves[0], pairs(), start=scores.top(25), size=20, progress=False).circuit
    assert int(kept.mask.sum()) <= 20


@pytest.mark.parametrize(
    ("name", "writes"),
    [("gpt2", "transformer.h.{}.mlp.c_proj"), ("gpt_neox", "gpt_neox.layers.{}.mlp.dense_4h_to_h")],
)
def test_large_activations_that_later_layers_take_back(
    name: str, writes: str, tmp_path: Path
) -> None:
    """As in real models: bfloat16 rounds 20,000 to a multiple of 128, so the order of sums counts.

    What layer 1 adds to such an activation is lost; a sum in another order would still have it.
    """
    plain = plain_transformer(name, "bfloat16")
    for layer, value in ((0, 20000), (1, -20000)):
        plain.get_submodule(writes.format(layer)).bias.data[5] = value
    plain.save_pretrained(tmp_path)
    options: dict[str, Any] = {"method": "eap-ig", "steps": 3, "progress": False}
    found, expected = (
        attribute_circuit_edges(
            load_model(tmp_path, device="cpu", dtype=dtype), pairs(), logit_difference, **options
        ).values.float()
        for dtype in ("bfloat16", "float32")
    )
    assert torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1] > 0.95


def test_gates_are_trained(halves: tuple[Model, Model]) -> None:
    model, _ = halves
    sparse = SparseTransformer(model)
    with sparse.opened(), torch.no_grad():
        assert torch.equal(sparse(tokens(4)), sparse.dense_copy()(tokens(4)))
    batch = TokenBatch.next_token(tokens(8))
    outcome = post_train(
        sparse,
        ShuffledStream(batch, 4),
        validation=batch,
        target_loss="+1",
        steps=3,
        progress=False,
    )
    assert sparse.gates.bias.dtype == torch.float32
    assert outcome.history["step"].iloc[-1] == 3
    assert adapt(sparse).dtype == torch.bfloat16
    assert sparse(tokens(4)).isfinite().all()


def test_head_gates_are_fitted(halves: tuple[Model, Model]) -> None:
    dataset = TargetDataset(TokenBatch.next_token(tokens(16)))
    with warnings.catch_warnings(action="ignore"):  # three updates fit nothing
        roles = fit_head_gates(halves[0], dataset, seeds=2, updates=3, batch_size=4, progress=False)
    assert bool(roles.score("facilitation").isfinite().all())


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_architecture_is_gated(name: str) -> None:
    """And with checkpointed activations alike: some models need a key-value cache to run at all."""
    model = boot(plain_transformer(name, "bfloat16"))
    sparse = SparseTransformer(model, initial_bias=0.0)
    assert adapt(model).graph.n_layers == 3
    gradients = []
    for kept in (nullcontext(), checkpointed_activations(sparse)):
        sparse.zero_grad()
        with kept, sparse.sampled(torch.Generator().manual_seed(0)):
            logits, counts = sparse.run_with_counts(tokens(2))
            (logits.float().logsumexp(-1).sum() + counts.expected.sum()).backward()
        gradients += [sparse.gates.bias.grad]
    assert gradients[0] is not None
    assert gradients[0].isfinite().all() and gradients[0].abs().min() > 0
    torch.testing.assert_close(*gradients)
