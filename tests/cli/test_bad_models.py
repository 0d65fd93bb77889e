"""Every command that takes a model, given a bad one: a clear paragraph before any work."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command_line import no_training, run_command
from safetensors.torch import load_file, save_file

from sparse_tl import SparseTransformer, load_model
from sparse_tl.tasks.addition import addition_tokenizer

COMMANDS = {
    "post-train": ["--text", "STORY", "--target-loss", "+1", "--window", "8"],
    "circuits": ["--sparse", "MODEL", "--tasks", "ioi"],
    "head-roles": ["--tasks", "text=STORY"],
    "doctor": [],
}
SIZES: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}


@pytest.fixture(autouse=True)
def plain(offline: None, unchecked_types: None) -> None:
    """As on a machine without a network, and without the checks of annotations."""


def llama(folder: Path) -> Path:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


def own(folder: Path) -> Path:
    """As a HookedTransformer is saved; that its weights are absent is seen last."""
    folder.mkdir()
    sizes = {"n_layers": 1, "n_ctx": 16, "d_model": 16, "d_head": 8, "d_mlp": 32, "d_vocab": 13}
    (folder / "tl_config.json").write_text(json.dumps({**sizes, "act_fn": "gelu"}))
    save_file({"embed.W_E": torch.ones(13, 16)}, folder / "model.safetensors")
    return folder


def changed(folder: Path, name: str, **fields: Any) -> None:
    said = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**said, **fields}))


def without(folder: Path, weight: str) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[f"{weight}.other"] = weights.pop(weight)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def unscaled(folder: Path) -> None:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 12}
    config = transformers.GPT2Config(**sizes, scale_attn_weights=False)
    model = transformers.GPT2LMHeadModel(config)
    for weight in model.parameters():
        weight.data.mul_(5)
    model.save_pretrained(folder)


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing weight": (
        lambda f: without(llama(f), "model.norm.weight"),
        r"weights do not fit their config.json; missing \['model.norm.weight'\], unexpected",
    ),
    "absurd size": (
        lambda f: changed(llama(f), "config.json", num_hidden_layers=10**7),
        "layers that the 12 weights can fill .* as num_hidden_layers; got 10000000",
    ),
    "wrong type": (
        lambda f: changed(llama(f), "config.json", hidden_size="wide"),
        "hidden_size' expected int, got str",
    ),
    "own missing weight": (own, "model.safetensors|expected .* to have the shape"),
    "own absurd size": (
        lambda f: changed(own(f), "tl_config.json", n_layers=10**7),
        "layers that the 1 weights can fill .* as n_layers; got 10000000",
    ),
    "own wrong type": (
        lambda f: changed(own(f), "tl_config.json", d_model="wide"),
        "a whole number from 1 as d_model in",
    ),
    "own unknown field": (
        lambda f: changed(own(f), "tl_config.json", colour=3),
        "only fields that describe the architecture in .*; got colour",
    ),
    "tokenizer of another": (
        lambda f: addition_tokenizer().save_pretrained(llama(f)),
        "a tokenizer of a model with 12 tokens; got one of 13",
    ),
    "a different model from that of transformers": (
        unscaled,
        "computes what transformers does; .*scale_attn_weights=False",
    ),
    "nothing": (lambda f: f.mkdir(), "Hugging Face folder"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_model_is_refused_at_once(
    name: str, command: str, story: Path, tmp_path: Path
) -> None:
    make, message = BAD[name]
    make(tmp_path / "model")
    outcome = told(command, tmp_path / "model", story, tmp_path)
    assert outcome.code == 1
    said = outcome.out if command == "doctor" else outcome.err
    assert re.search(message, said), said
    assert "Traceback" not in said and "bug in sparse_tl" not in said and len(said) < 4000
    if command != "doctor":
        assert said.startswith("Error: ") and str(tmp_path / "model") in said


def told(command: str, model: Path, story: Path, out: Path) -> Any:
    places: dict[str, object] = {"MODEL": model, "STORY": story, "text=STORY": f"text={story}"}
    words = [command, "--model", model]
    words += [places.get(word, word) for word in COMMANDS[command]]
    words += [] if command == "doctor" else ["--out", out / "out"]
    start = time.perf_counter()
    with no_training():
        outcome = run_command(*words)
    assert time.perf_counter() - start < 20
    return outcome


@pytest.mark.filterwarnings("ignore")
def test_models_that_one_command_cannot_use(story: Path, tmp_path: Path) -> None:
    sizes = {**SIZES, "vocab_size": 13}
    opt: Any = transformers.OPTConfig(
        **sizes, ffn_dim=24, word_embed_proj_dim=16, pad_token_id=0, bos_token_id=1
    )
    transformers.OPTForCausalLM(opt).save_pretrained(tmp_path / "opt")
    phi: Any = transformers.PhiConfig(**sizes)
    transformers.PhiForCausalLM(phi).save_pretrained(tmp_path / "phi")
    for name in ("opt", "phi"):
        addition_tokenizer().save_pretrained(tmp_path / name)
    outcome = told("post-train", tmp_path / "opt", story, tmp_path)
    assert outcome.code == 1
    assert "edits to its attention scores do not reach the pattern" in outcome.err
    sparse = SparseTransformer(load_model(tmp_path / "phi", device="cpu"))
    sparse.save_pretrained(tmp_path / "sparse")
    words = ["--model", tmp_path / "phi", "--sparse", tmp_path / "sparse", "--tasks", "ioi"]
    outcome = run_command("circuits", *words, "--out", tmp_path / "circuits")
    assert outcome.code == 1
    assert "its MLPs read what a normalisation makes for attention" in outcome.err
    outcome = told("post-train", tmp_path / "sparse", story, tmp_path)
    assert outcome.code == 1 and "expected a dense model" in outcome.err


def test_the_second_of_several_models_is_looked_at_first(story: Path, tmp_path: Path) -> None:
    addition_tokenizer().save_pretrained(llama(tmp_path / "good"))
    changed(llama(tmp_path / "bad"), "config.json", num_hidden_layers=3)
    models = ["--model", tmp_path / "good", "--model", tmp_path / "bad"]
    words = ["head-roles", *models, "--tasks", f"text={story}"]
    outcome = run_command(*words, "--out", tmp_path / "out")
    assert outcome.code == 1
    assert re.search(rf"{tmp_path / 'bad'}.* numbers; it holds", outcome.err), outcome.err
    assert not list((tmp_path / "out").rglob("*.json"))
