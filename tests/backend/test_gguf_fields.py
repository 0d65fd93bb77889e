"""The hyperparameters in GGUF files: they reach the model, or the file is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from made_gguf import tokenizer, vocabulary_fields, write_llama, write_model
from transformers import AutoConfig

from sparse_tl.backend import load_model

pytest.importorskip("gguf", reason="the package gguf is not installed (pip install gguf)")

THETA, WINDOW, DIMS = "rope.freq_base", "attention.sliding_window", "rope.dimension_count"
HEAD = {"head_dim": 32, "query_pre_attn_scalar": 32}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # fields of the file, and what they are in transformers; without a field, llama.cpp's default
    "starcoder2": ("starcoder2", {THETA: 1e6}, {"rope_theta": 1e6}),
    "starcoder2, window": ("starcoder2", {WINDOW: 7}, {"sliding_window": 7}),
    "stablelm": (
        "stablelm",
        {THETA: 1e6, DIMS: 8},
        {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
    ),
    "stablelm, defaults": ("stablelm", {}, {"partial_rotary_factor": 1.0}),
    "phi3": ("phi3", {WINDOW: 7, DIMS: 8}, {"sliding_window": 7, "partial_rotary_factor": 0.5}),
    "phi3, no window": ("phi3", {WINDOW: 0, "rope.scaling.original_context_length": 64}, {}),
    "nemotron": (
        "nemotron",
        {"attention.layer_norm_epsilon": 0.5, DIMS: 4, "rope.scaling.type": "none"},
        {"norm_eps": 0.5, "partial_rotary_factor": 0.25},
    ),
    "falcon": ("falcon", {"attention.layer_norm_epsilon": 0.5}, {"layer_norm_epsilon": 0.5}),
    "gemma2": ("gemma2", {WINDOW: 7, **CAPS}, {"sliding_window": 7, **CAPS, **HEAD}),
    "gemma2, defaults": ("gemma2", {}, HEAD),
    "gemma3": (
        "gemma3",
        {WINDOW: 7, THETA: 1e6, "rope.scaling.factor": 1.0},
        {"sliding_window": 7, **HEAD},
    ),
    "gemma3, others": (
        "gemma3",
        {WINDOW: 7, "rope.freq_base_swa": 77.0, "final_logit_softcapping": 3.0},
        {
            "sliding_window": 7,
            "rope_theta": 1e4,
            "rope_local_base_freq": 77.0,
            "final_logit_softcapping": 3.0,
            **HEAD,
        },
    ),
    "qwen3": ("qwen3", {THETA: 1e6}, {"rope_theta": 1e6, "head_dim": 128}),
}


def _write_other(file: Path, case: str, **changes: Any) -> Any:
    architecture, fields, settings = OTHERS[case]
    config = AutoConfig.for_model(
        "gemma3_text" if architecture == "gemma3" else architecture,
        vocab_size=len(tokenizer()),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        pad_token_id=0,
        rms_norm_eps=1e-5,
        **({} if architecture == "falcon" else {"num_key_value_heads": 2}),
        **settings,
    )
    layer_norm = architecture in ("falcon", "nemotron", "stablelm", "starcoder2")
    said = {
        "context_length": 64,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 256,
        "attention.head_count": 4,
        "attention.head_count_kv": 1 if architecture == "falcon" else 2,
        f"attention.layer_norm_{'' if layer_norm else 'rms_'}epsilon": 1e-5,
        **({"attention.key_length": head} if (head := settings.get("head_dim")) else {}),
        **fields,
        **changes,
    }
    metadata = {f"{architecture}.{name}": value for name, value in said.items()}
    padding = {"tokenizer.ggml.padding_token_id": 0}
    return write_model(file, architecture, config, metadata | vocabulary_fields() | padding)


def _error(file: Path, expected: Any) -> float:
    """How far the logits are from those of the model that the file was made from."""
    tokens = torch.randint(250, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = load_model(file, device="cpu")(tokens)
        return float((found - expected(tokens).logits).abs().max())


@pytest.mark.every_case
@pytest.mark.parametrize("case", OTHERS)
def test_the_model_has_the_hyperparameters_of_the_file(tmp_path: Path, case: str) -> None:
    expected = _write_other(tmp_path / "model.gguf", case)
    assert _error(tmp_path / "model.gguf", expected) < 2e-5


def test_a_gemma_3_file_must_say_its_window(tmp_path: Path) -> None:
    _write_other(tmp_path / "model.gguf", "gemma3", **{WINDOW: None})
    with pytest.raises(ValueError, match=f"it lacks .*gemma3.{WINDOW}"):
        load_model(tmp_path / "model.gguf", device="cpu")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("llama.rope.scaling.factor", 8.0, "'llama.rope.scaling.factor' = 8.0"),
        ("llama.attention.sliding_window", 8, "'llama.attention.sliding_window' = 8"),
        ("llama.attention.causal", False, "'llama.attention.causal' = False"),
        ("llama.attention.layer_norm_rms_epsilon", None, "it lacks .*rms_epsilon'"),
    ],
)
def test_a_field_that_would_be_ignored(tmp_path: Path, name: str, value: Any, why: str) -> None:
    write_llama(tmp_path / "model.gguf", fields={name: value})
    with pytest.raises(ValueError, match=why):
        load_model(tmp_path / "model.gguf", device="cpu")


def test_rotary_positions_that_are_not_scaled(tmp_path: Path) -> None:
    said = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 1.0}
    expected = write_llama(tmp_path / "model.gguf", fields=said)
    assert _error(tmp_path / "model.gguf", expected) < 1e-5
