"""Models by name, from Hugging Face folders and from objects, and what a bad folder is told."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import CONTEXT, plain_transformer
from made_tokenizers import byte_level, word_level
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from sparse_tl import (
    PromptPairs,
    SparseTransformer,
    evaluate_held_out,
    logit_lens,
    trace_attention,
)
from sparse_tl.backend import adapt, load_model, save_model
from sparse_tl.data.batches import TokenBatch, token_losses
from sparse_tl.storage.files import read_json, write_json

FAMILIES = ["gpt2", "gpt_neox", "llama", "qwen2", "olmo", "gemma2"]


def _tokens() -> torch.Tensor:
    return torch.randint(30, (3, 9), generator=torch.Generator().manual_seed(0))


def _hugging_face(family: str) -> Any:
    return plain_transformer(family, vocab_size=30)


def _tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, 30))]
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return word_level(*words, unknown="w3", **special)


def _folder(folder: Path, family: str = "llama", tokenizer: bool = False) -> Path:
    _hugging_face(family).save_pretrained(folder)
    if tokenizer:
        _tokenizer().save_pretrained(folder)
    return folder


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 0.1
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


def _saved(model: Any, folder: Path) -> Path:
    folder.mkdir()
    save_model(model, folder)
    return folder


# Hugging Face folders, made on the spot.


@pytest.mark.parametrize("with_tokenizer", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hugging_face_folder_gives_the_same_logits(
    tmp_path: Path, family: str, with_tokenizer: bool
) -> None:
    folder = _folder(tmp_path / "some-llama-7b", family, with_tokenizer)
    expected = _hugging_face(family)(_tokens()).logits
    model = load_model(folder, device="cpu")
    assert isinstance(model, TransformerBridge)
    _close(model(_tokens()), expected)
    assert model.cfg.model_name == "some-llama-7b"
    assert (model.tokenizer is not None) == with_tokenizer
    if with_tokenizer:
        assert model.to_tokens("w7 w9", prepend_bos=False).tolist() == [[7, 9]]


def test_a_chat_template_is_loaded_and_saved(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", tokenizer=True)
    template = "{% for message in messages %}{{ message.content }}<s>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    model = load_model(folder, device="cpu")
    assert model.tokenizer.chat_template == template
    save_model(model, tmp_path / "again")
    again = load_model(tmp_path / "again", device="cpu")
    assert again.tokenizer.chat_template == template
    rows = [{"clean": "w5 w6", "corrupted": "w7 w6", "answer": " w8"}]
    pairs = PromptPairs.from_texts(again, rows, chat=True)
    assert pairs.start == "Continue the text.<s>"


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "gpt_neox"])
@pytest.mark.parametrize(("before", "behind"), [(None, None), ("<s>", None), ("<s>", "</s>")])
def test_prompts_begin_as_the_tokenizer_begins_them(
    tmp_path: Path, family: str, before: str | None, behind: str | None
) -> None:
    """Whatever TransformerLens's default for the architecture; SmolLM2, a Llama, lost by it."""
    tokenizer = byte_level("a", " b", " c", before=before, behind=behind)
    plain_transformer(family, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    bare = tokenizer("a b", add_special_tokens=False)["input_ids"]
    own = [tokenizer.bos_token_id] if before else []
    row = {"clean": "a b", "corrupted": "a b", "answer": " c"}

    def prompts(model: Any) -> list[list[int]]:
        """The same text in every way that leads to a prompt."""
        assert model.cfg.default_prepend_bos == (model.to_tokens("a b").shape[1] == 3)
        copy = SparseTransformer(adapt(model).copy(), initial_bias=5.0)
        folder = copy.save_pretrained(tmp_path / "saved")
        again = SparseTransformer.from_pretrained(folder, device="cpu")
        graph, lens = trace_attention(again, "a b"), logit_lens(model, "a b", answer=" c")
        expected = model.tokenizer.batch_decode([[token] for token in model.to_tokens("a b")[0]])
        assert list(graph.input_tokens[:-1]) == lens.tokens == expected
        return [
            model.to_tokens("a b")[0].tolist(),
            again.to_tokens("a b")[0].tolist(),
            PromptPairs.from_texts(model, [row]).clean[0].tolist(),
            PromptPairs.from_texts(again, [row]).clean[0].tolist(),
        ]

    for asked, start in ((None, own), (True, [tokenizer.bos_token_id]), (False, [])):
        model = load_model(tmp_path / "model", prepend_bos=asked, device="cpu")
        assert prompts(model) == [[*start, *bare]] * 4
        assert PromptPairs.from_texts(model, [row]).start == ("<s>" if start else "")
    other = PromptPairs.from_texts(model, [row], prepend_bos=True)  # of this one, without
    assert other.clean[0].tolist() == [tokenizer.bos_token_id, *bare]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_bridge_is_a_hugging_face_folder(tmp_path: Path, family: str) -> None:
    model = load_model(_folder(tmp_path / "first", family, tokenizer=True), device="cpu")
    model.cfg.model_name, model.cfg.default_prepend_bos = "second", False
    with torch.no_grad():  # as after training: what a pass reads is what is saved
        model.blocks[1].attn.q.original_component.weight.mul_(1.5)
    expected = model(_tokens())
    folder = _saved(model, tmp_path / "saved")
    found = {file.suffix or file.name for file in folder.iterdir()}
    assert found <= {".json", ".safetensors"}
    loaded = load_model(folder, device="cpu")
    assert torch.equal(loaded(_tokens()), expected)
    assert (loaded.cfg.model_name, loaded.cfg.default_prepend_bos) == ("second", False)
    assert loaded.to_tokens("w7 w9").tolist() == [[7, 9]]
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    _close(plain(_tokens()).logits, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_saved_bridge_keeps_its_dtype(tmp_path: Path, dtype: str) -> None:
    model = load_model(_folder(tmp_path / "model"), device="cpu", dtype=dtype)
    assert model.embed.W_E.dtype == model.cfg.dtype == getattr(torch, dtype)
    loaded = load_model(_saved(model, tmp_path / "saved"), device="cpu")
    assert loaded.embed.W_E.dtype == getattr(torch, dtype)
    for ours, theirs in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    again = load_model(tmp_path / "saved", device="cpu", dtype=torch.float32)
    assert again.embed.W_E.dtype == torch.float32


def test_a_bridge_saved_over_a_hooked_transformer_is_what_loads(tmp_path: Path) -> None:
    model = load_model(_folder(tmp_path / "model"), device="cpu")
    (tmp_path / "saved").mkdir()
    write_json(tmp_path / "saved" / "tl_config.json", {"n_layers": 1})
    save_model(model, tmp_path / "saved")
    assert torch.equal(load_model(tmp_path / "saved", device="cpu")(_tokens()), model(_tokens()))


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}])
def test_a_device_map_is_handed_on(tmp_path: Path, device_map: Any) -> None:
    folder = _folder(tmp_path / "model", "gpt2")
    model = load_model(folder, device_map=device_map)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert torch.equal(model(_tokens()), load_model(folder, device="cpu")(_tokens()))
    with pytest.raises(ValueError, match="`device` or `device_map`, not both"):
        load_model(folder, device="cpu", device_map=device_map)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_loading_leaves_random_generators_alone(
    tmp_path: Path, family: str, unchecked_types: None
) -> None:
    # beartype draws which members of a list it checks
    folder = _folder(tmp_path / "model", family)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    load_model(folder, device="cpu")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()


def test_an_old_gpt2_configuration(tmp_path: Path) -> None:
    """The folders of OpenAI's own models name the context ``n_ctx``, too."""
    folder = _folder(tmp_path / "gpt2", "gpt2")
    write_json(folder / "config.json", {**read_json(folder / "config.json"), "n_ctx": CONTEXT})
    _close(load_model(folder, device="cpu")(_tokens()), _hugging_face("gpt2")(_tokens()).logits)


def test_weights_in_several_files(tmp_path: Path) -> None:
    model = _hugging_face("llama")
    for parameter in model.parameters():
        parameter.data = parameter.data.half()
    model.save_pretrained(tmp_path / "model", max_shard_size="2KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    loaded = load_model(tmp_path / "model", device="cpu")
    assert loaded.embed.W_E.dtype == torch.float32
    _close(loaded(_tokens()), model.float()(_tokens()).logits)


def test_constants_of_old_checkpoints_are_no_weights(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "gpt2", "gpt2")

    def as_published(weights: dict[str, torch.Tensor]) -> None:
        plain = {name.removeprefix("transformer."): weights.pop(name) for name in list(weights)}
        weights.update(plain, **{"h.0.attn.bias": torch.ones(1, 1, CONTEXT, CONTEXT)})

    _change_weights(folder, as_published)
    _close(load_model(folder, device="cpu")(_tokens()), _hugging_face("gpt2")(_tokens()).logits)


def test_stories260k_reads_stories(shared_data: Path) -> None:
    model = load_model(shared_data / "models" / "stories260K", device="cpu")
    text = (shared_data / "text" / "tinystories_val.txt").read_text(encoding="utf-8")
    stories = [part.strip() for part in text.split("<|endoftext|>") if part.strip()][:8]
    losses = []
    with torch.no_grad():
        for story in stories:
            batch = TokenBatch.next_token(model.to_tokens(story)[:, :512])
            logits = model(batch.tokens)[batch.loss_mask]
            losses.append(token_losses(logits, batch.loss_labels()))
    # As of transformers' Llama with these weights: 1.2729 on the first 40 stories, as published.
    assert sum(map(len, losses)) == 2821
    assert torch.cat(losses).mean().item() == pytest.approx(1.2347, abs=2e-4)


# Objects.


def test_a_model_of_transformers_becomes_a_bridge() -> None:
    plain = _hugging_face("olmo")
    expected = plain(_tokens()).logits
    model = load_model(plain, tokenizer=_tokenizer())
    assert isinstance(model, TransformerBridge)
    assert model.original_model is plain
    _close(model(_tokens()), expected)
    assert model.to_tokens("w7", prepend_bos=False).tolist() == [[7]]
    assert model.cfg.model_name == "olmo"
    assert load_model(model) is model


# Bad folders.


def _change_config(folder: Path, **fields: Any) -> None:
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def _change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no safetensors"),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:200]
        ),
        "SafetensorError",
    ),
    "missing": (
        lambda f: _change_weights(f, lambda w: (w.pop(NORM), w.update(x=torch.ones(32)))),
        rf"missing \['{NORM}'\]",
    ),
    "whole numbers": (
        lambda f: _change_weights(f, lambda w: w.update({NORM: w[NORM].to(torch.int8)})),
        f"{NORM} is of type I8",
    ),
    "narrower": (lambda f: _change_config(f, intermediate_size=20), "(?i)mismatch"),
    "another layer": (
        lambda f: _change_config(f, num_hidden_layers=4),
        r"missing \['model.layers.3",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: str) -> None:
    folder = _folder(tmp_path / "model")
    harm, message = DAMAGES[damage]
    harm(folder)
    with pytest.raises(ValueError, match=f"(?s){message}") as caught:
        load_model(folder, device="cpu")
    assert str(folder) in str(caught.value)


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model")
    _change_weights(folder, lambda w: w.update({NORM: torch.full((32,), float("nan"))}))
    with pytest.raises(ValueError, match=rf"{folder}: the logits .* are NaN"):
        load_model(folder, device="cpu")


def test_nan_is_neither_measured_nor_saved(tmp_path: Path) -> None:
    """Of one token, which checks of the model do not meet."""
    model, rows = tiny_model(d_vocab=5000), TokenBatch.next_token(torch.tensor([[1, 4999, 3]]))
    evaluate_held_out(model, rows)
    with torch.no_grad():
        model.embed.W_E[4999] = torch.nan
    for call in (lambda: evaluate_held_out(model, rows), lambda: save_model(model, tmp_path / "m")):
        with pytest.raises(ValueError, match="NaN"):
            call()
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("place", ["folder", "argument"])
def test_a_tokenizer_of_another_model(tmp_path: Path, place: str) -> None:
    plain_transformer("gpt2", vocab_size=20).save_pretrained(tmp_path)
    if place == "folder":
        _tokenizer().save_pretrained(tmp_path)
    message = "has 30 tokens .* the model has 20 tokens. It belongs to another model"
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, device="cpu", tokenizer=_tokenizer() if place == "argument" else None)


def test_a_padding_token_that_the_model_lacks(tmp_path: Path) -> None:
    """Added to a tokenizer whose model was not resized, as many on the hub are."""
    tokenizer = _tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<padding>"})
    model = load_model(_hugging_face("llama"), tokenizer=tokenizer)
    assert int(model.to_tokens(["w4 w5", "w6"]).max()) < 30
