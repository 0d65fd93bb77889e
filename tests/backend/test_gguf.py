"""GGUF files: the weights and tokenizer that they hold, and what a damaged one is told."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from made_gguf import (
    TEMPLATE,
    field,
    header,
    tokenizer,
    write_llama,
)
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM

from sparse_tl.backend import check_folder, load_model, save_model
from sparse_tl.storage.files import read_json

pytest.importorskip("gguf", reason="the package gguf is not installed (pip install gguf)")

TEXT = "  the cat sat\n, and the naïve 漢字 12 don't"
F32, Q8_0 = 0, 8


def _logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(250, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(tokens)
    return found if isinstance(found, torch.Tensor) else found.logits


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("kind", "tied"), [("F32", False), ("F16", True), ("Q8_0", False), ("Q4_1", True)]
)
def test_the_model_has_the_weights_of_the_file(tmp_path: Path, kind: str, tied: bool) -> None:
    expected = write_llama(tmp_path / "small-llama.Q.gguf", kind, tied=tied)
    model = load_model(tmp_path / "small-llama.Q.gguf", device="cpu")
    assert isinstance(model, TransformerBridge)
    assert model.cfg.model_name == "small-llama.Q"
    assert (_logits(model) - _logits(expected)).abs().max() < 1e-5
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.original_model.config.bos_token_id == 0


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    expected = write_llama(tmp_path / "model.gguf")
    (tmp_path / "notes.txt").write_text("hello")
    check_folder(tmp_path)
    model = load_model(str(tmp_path), device="cpu", dtype="bfloat16")
    save_model(model, tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, weight in expected.named_parameters():
        assert torch.equal(plain.get_parameter(name), weight.bfloat16()), name
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"several GGUF files.*\['model.gguf', 'other.gguf'\]"):
        load_model(tmp_path, device="cpu")


def test_the_tokenizer_of_the_file(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf")
    model, expected = load_model(tmp_path / "model.gguf", device="cpu"), tokenizer()
    assert model.tokenizer(TEXT).input_ids == expected(TEXT).input_ids
    assert model.tokenizer.decode(expected(TEXT).input_ids) == TEXT
    assert (model.tokenizer.bos_token, model.tokenizer.eos_token) == ("<s>", "</s>")
    assert model.tokenizer.chat_template == TEMPLATE
    assert not model.cfg.default_prepend_bos
    assert model.to_tokens("the").tolist() == [expected("the").input_ids]
    write_llama(tmp_path / "bos.gguf", fields={"tokenizer.ggml.add_bos_token": True})
    model = load_model(tmp_path / "bos.gguf", device="cpu")
    assert model.cfg.default_prepend_bos
    assert model.to_tokens("the").tolist() == [[0, *expected("the").input_ids]]


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf", vocabulary=False)
    assert load_model(tmp_path / "model.gguf", device="cpu").tokenizer is None
    assert load_model(tmp_path / "model.gguf", tokenizer=tokenizer(), device="cpu").tokenizer


def test_it_is_saved_as_a_plain_folder(tmp_path: Path) -> None:
    expected = write_llama(tmp_path / "model.gguf", "Q4_1")
    model = load_model(tmp_path / "model.gguf", device="cpu")
    save_model(model, tmp_path / "saved")
    assert "quantization_config" not in read_json(tmp_path / "saved" / "config.json")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
    weights = dict(expected.named_parameters())
    assert {name for name, _ in plain.named_parameters()} == weights.keys()
    for name, weight in plain.named_parameters():
        assert torch.equal(weight, weights[name]), name
    again = load_model(tmp_path / "saved", device="cpu")
    assert torch.equal(_logits(again), _logits(model))
    assert again.cfg.model_name == "model"
    assert again.tokenizer(TEXT).input_ids == model.tokenizer(TEXT).input_ids
    assert again.tokenizer.chat_template == TEMPLATE


def test_one_of_several_files_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(header([field("split.count", 2, struct.pack("<H", 3))]))
    with pytest.raises(ValueError, match="one of 3 parts. Join them first"):
        load_model(file, device="cpu")


def test_wherever_a_file_is_cut_off_it_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_llama(file)
    whole = file.read_bytes()
    for share in (0.001, 0.01, 0.1, 0.5, 0.9, 0.999):
        file.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ValueError, match="is not a whole GGUF file"):
            load_model(file, device="cpu")
        with pytest.raises(ValueError, match="is not a whole GGUF file"):
            check_folder(tmp_path)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"fields": {"llama.feed_forward_length": 64}}, "the weights do not fit .*mismatched"),
        ({"extra": ["rope_freqs.weight"]}, "takes .* of its .* weights, so that it would be"),
        (
            {"without": ["blk.1.attn_norm.weight"], "extra": ["a", "b"]},
            r"the weights do not fit .*missing \['model.layers.1.input_layernorm.weight'\]",
        ),
    ],
)
def test_a_file_that_is_no_whole_model(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    write_llama(tmp_path / "model.gguf", **change)
    with pytest.raises(ValueError, match=why):
        load_model(tmp_path / "model.gguf", device="cpu")


SPLITS = {
    "gpt-2": ["ByteLevel"],
    "smollm": ["Digits", "ByteLevel"],
    "starcoder": ["Digits", "ByteLevel"],
    "llama-bpe": ["Split", "ByteLevel"],
    "qwen2": ["Split", "ByteLevel"],
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", SPLITS)
def test_texts_are_split_as_the_file_says(tmp_path: Path, name: str) -> None:
    write_llama(tmp_path / "model.gguf", fields={"tokenizer.ggml.pre": name})
    found = load_model(tmp_path / "model.gguf", device="cpu")
    save_model(found, tmp_path / "saved")
    for model in (found, load_model(tmp_path / "saved", device="cpu")):
        parts = json.loads(model.tokenizer.backend_tokenizer.to_str())
        split = parts["pre_tokenizer"]
        kinds = [part["type"] for part in split.get("pretokenizers", [split])]
        assert kinds == SPLITS[name]
        assert parts["model"]["ignore_merges"] == (name == "llama-bpe")
        assert (parts["normalizer"] or {}).get("type") == ("NFC" if name == "qwen2" else None)


@pytest.mark.parametrize("name", ["no-such-rule", "default", "bloom"])
def test_an_unknown_split_is_refused(tmp_path: Path, name: str) -> None:
    write_llama(tmp_path / "model.gguf", fields={"tokenizer.ggml.pre": name})
    with pytest.raises(ValueError, match=f"'{name}'.*tokenizer=") as refused:
        load_model(tmp_path / "model.gguf", device="cpu")
    assert "\n" not in str(refused.value)
    own = tokenizer()
    assert load_model(tmp_path / "model.gguf", tokenizer=own, device="cpu").tokenizer is own
