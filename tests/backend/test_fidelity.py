"""A bridge that computes something else than transformers does is refused, however it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, plain_transformer, random_tokens
from transformer_lens.model_bridge.sources import build_bridge_from_module

from sparse_tl import SparseTransformer, load_model
from sparse_tl.backend import adapt, boot, check_circuits, save_model

UNSCALED = r"not compute what transformers does.*off by"


def gpt2(**fields: Any) -> Any:
    config = transformers.GPT2Config(**{**ARCHITECTURES["gpt2"][1], **fields})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).eval()
    for weight in model.parameters():
        weight.data.mul_(5)
    return model


@pytest.mark.parametrize(
    "fields",
    [
        {"scale_attn_by_inverse_layer_idx": True},
        {"reorder_and_upcast_attn": True},
        {"activation_function": "relu", "n_inner": 20},
        {"tie_word_embeddings": False},
    ],
)
@torch.no_grad()
def test_settings_that_bridges_know(fields: dict[str, Any]) -> None:
    model = gpt2(**fields)
    expected = model(random_tokens(2, 7)).logits
    torch.testing.assert_close(boot(model)(random_tokens(2, 7)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_that_are_not_scaled(tmp_path: Path, dtype: str) -> None:
    """No version of TransformerLens asks a GPT-2 configuration whether they are."""
    model = gpt2(scale_attn_weights=False)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"cannot load {tmp_path}: .*{UNSCALED}"):
        load_model(tmp_path, device="cpu", dtype=dtype)
    with pytest.raises(ValueError, match=UNSCALED):
        load_model(model)


def test_a_bridge_that_somebody_else_made() -> None:
    model = gpt2(scale_attn_weights=False)
    model.set_attn_implementation("eager")
    bridge = build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config)
    with pytest.raises(ValueError, match=UNSCALED):
        SparseTransformer(bridge)
    with pytest.raises(ValueError, match=UNSCALED):
        _ = adapt(bridge).graph


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "gemma2"])
def test_processed_weights_are_analysed_and_not_copied(name: str, tmp_path: Path) -> None:
    model = boot(plain_transformer(name))
    model.enable_compatibility_mode()
    check_circuits(adapt(model))
    sparse = SparseTransformer(model)
    raw = "cannot be copied, trained or saved: without its raw weights.*no_processing=True"
    for use in (
        adapt(model).copy,
        sparse.dense_copy,
        lambda: sparse.save_pretrained(tmp_path / "s"),
    ):
        with pytest.raises(ValueError, match=raw):
            use()
    assert not (tmp_path / "s").exists()
    with pytest.raises(ValueError, match=raw):
        save_model(sparse.unwrap(), tmp_path)
    model = boot(plain_transformer(name))
    model.enable_compatibility_mode(no_processing=True)
    assert torch.equal(adapt(model).copy()(random_tokens(2, 7)), model(random_tokens(2, 7)))
