"""Small GGUF files, made on the spot: models with known weights, and headers of any content."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from made_tokenizers import byte_level
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

N_HEADS, N_KEY_VALUE_HEADS = 4, 2
TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
ONE_MORE = "gemma2", "gemma3", "nemotron"
"""Architectures whose norms multiply by one more than transformers' weights; GGUF has the sum."""


def tokenizer() -> Any:
    return byte_level(" the", " cat", " sat", before=None)


def write_llama(
    file: Path,
    kind: str = "Q8_0",
    *,
    tied: bool = False,
    vocabulary: bool = True,
    fields: dict[str, Any] | None = None,
    without: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> LlamaForCausalLM:
    """Write a small Llama as llama.cpp does; return it with the weights that the file holds.

    Args:
        file: where to write it.
        kind: type of the matrices; norms are float32.
        tied: whether the unembedding is the embedding.
        vocabulary: whether the file has a tokenizer.
        fields: metadata to add or change; None leaves a field out.
        without: tensors to leave out.
        extra: tensors to add, of 32 numbers each.
    """
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=N_HEADS,
        num_key_value_heads=N_KEY_VALUE_HEADS,
        intermediate_size=96,
        max_position_embeddings=64,
        rope_theta=5000.0,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
    )
    metadata = {
        "llama.context_length": 64,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": N_HEADS,
        "llama.attention.head_count_kv": N_KEY_VALUE_HEADS,
        "llama.rope.freq_base": 5000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": len(words),
        **({} if not vocabulary else vocabulary_fields()),
        **(fields or {}),
    }
    return write_model(file, "llama", config, metadata, kind, without, extra)


def write_model(
    file: Path,
    architecture: str,
    config: Any,
    metadata: dict[str, Any],
    kind: str = "F32",
    without: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> Any:
    """Write a model of transformers with random weights; arguments and result as above."""
    import gguf

    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, architecture)
    for name, value in metadata.items():
        if value is not None:
            _add(writer, name, value)
    quantised, plain = gguf.GGMLQuantizationType[kind], gguf.GGMLQuantizationType.F32
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            used = plain if "norm" in name else quantised
            drawn = 0.2 * torch.randn(parameter.shape, generator=generator)
            blocks = gguf.quants.quantize((drawn + float("norm" in name)).numpy(), used)
            values = torch.from_numpy(gguf.quants.dequantize(blocks, used).copy())
            less = architecture in ONE_MORE and name.endswith("norm.weight")
            parameter.copy_(values - 1 if less else values)
            theirs = names.get_name(name, (".weight", ".bias"))
            assert theirs is not None, name
            if theirs not in without:
                stored = _permuted(blocks, name) if architecture == "llama" else blocks
                writer.add_tensor(theirs, stored, raw_dtype=used)
    for name in extra:
        writer.add_tensor(name, np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _permuted(rows: np.ndarray, name: str) -> np.ndarray:
    """The rows of queries and keys as llama.cpp stores them: the two of each rotated pair together.

    Row i of a head and row i + d_head / 2 form a pair.
    """
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return rows
    heads = N_HEADS if "q_proj" in name else N_KEY_VALUE_HEADS
    d_head = len(rows) // heads
    order = [
        head * d_head + half * d_head // 2 + pair
        for head in range(heads)
        for pair in range(d_head // 2)
        for half in (0, 1)
    ]
    return np.ascontiguousarray(rows[order])


def vocabulary_fields() -> dict[str, Any]:
    words = tokenizer()
    inner = json.loads(words.backend_tokenizer.to_str())["model"]
    tokens = sorted(inner["vocab"], key=inner["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in ("<s>", "</s>") else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in inner["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def _add(writer: Any, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    """A metadata field: its type by number, and its value in bytes."""
    return text(name) + struct.pack("<I", kind) + value


def header(fields: Sequence[bytes]) -> bytes:
    """A file of metadata alone."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields)) + b"".join(fields)
