"""Models from our own folders and from Hugging Face ones, and what a bad folder is told."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from sparse_tl.data.batches import TokenBatch, per_label_loss
from sparse_tl.files import read_json, read_tensors, write_json, write_tensors
from sparse_tl.lens import Model, build_model, load_model, model_config, save_model
from sparse_tl.tasks.addition import addition_tokenizer

Build = Callable[..., Model]


def _save(model: Model, folder: Path) -> Path:
    folder.mkdir()
    save_model(model, folder)
    return folder


def _tokens(vocabulary: int = 13, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocabulary, (3, 9), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["plain", "float64", "grouped", "attention_only"])
def test_own_folder_round_trip_is_exact(build_tiny: Build, tmp_path: Path, kind: str) -> None:
    model = build_tiny(kind)
    loaded = load_model(_save(model, tmp_path / "model"), device="cpu")
    assert loaded.embed.W_E.dtype == model.embed.W_E.dtype
    assert torch.equal(loaded(_tokens()), model(_tokens()))
    assert model_config(loaded) == model_config(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_saved_folder_holds_json_and_safetensors_alone(build_tiny: Build, tmp_path: Path) -> None:
    folder = _save(build_tiny(tokenizer=addition_tokenizer()), tmp_path / "model")
    kinds = {path.suffix for path in folder.iterdir()}
    assert kinds <= {".json", ".safetensors"}
    assert "seed" not in read_json(folder / "tl_config.json")
    assert "device" not in read_json(folder / "tl_config.json")


@pytest.mark.parametrize("kind", ["own", "hugging_face"])
def test_loading_leaves_random_generators_alone(
    build_tiny: Build, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "model"
    if kind == "own":
        _save(build_tiny(seed=7), folder)
        write_json(folder / "tl_config.json", {**read_json(folder / "tl_config.json"), "seed": 7})
    else:
        _llama().save_pretrained(folder)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    load_model(folder, device="cpu")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()


def test_loaded_weights_can_be_trained(build_tiny: Build, tmp_path: Path) -> None:
    loaded = load_model(_save(build_tiny(), tmp_path / "model"), device="cpu")
    loaded(_tokens()).logsumexp(-1).mean().backward()
    assert all(p.requires_grad and p.grad is not None for p in loaded.parameters())


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_tokenizer_comes_back_as_it_was(
    build_tiny: Build, tmp_path: Path, adds_bos: bool
) -> None:
    words = {word: i for i, word in enumerate(["<s>", "a", "b", "c"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="<s>", pad_token="<s>"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = build_tiny(tokenizer=AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))
    loaded = load_model(_save(model, tmp_path / "model"), device="cpu")
    assert loaded.to_tokens("a b c").tolist() == model.to_tokens("a b c").tolist()
    assert loaded.to_tokens("a b c", prepend_bos=False).tolist() == [[1, 2, 3]]
    assert loaded.tokenizer.bos_token == "<s>"
    assert loaded.to_string(torch.tensor([1, 2])) == model.to_string(torch.tensor([1, 2]))


def test_the_addition_tokenizer_gets_no_bos(build_tiny: Build, tmp_path: Path) -> None:
    model = build_tiny(tokenizer=addition_tokenizer(), default_prepend_bos=False)
    loaded = load_model(_save(model, tmp_path / "model"), device="cpu")
    assert loaded.to_tokens("36+28=").tolist() == [[3, 6, 10, 2, 8, 11]]
    assert loaded.to_tokens("36+28=00064").shape == (1, 11)


# Hugging Face folders, made on the spot.


def _gpt2() -> Any:
    config = GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        n_positions=16,
        vocab_size=30,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def _llama() -> Any:
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        vocab_size=30,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def _neox() -> Any:
    config = GPTNeoXConfig(
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=24,
        vocab_size=30,
        max_position_embeddings=32,
        rotary_pct=0.5,
    )
    return GPTNeoXForCausalLM(config)


def _randomised(model: Any) -> Any:
    """Every weight random, biases and norms too: what is lost in conversion shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name or "ln_" in name else 0.0
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(centre * (not name.endswith("bias")) + 0.2 * noise)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param("small-gpt2", _gpt2),
        ("tiny-llama-7b", _llama),
        ("pythia", _neox),
    ],
)
def test_a_hugging_face_folder_gives_the_same_logits(
    tmp_path: Path, name: str, make: Callable[[], Any]
) -> None:
    original = _randomised(make())
    original.save_pretrained(tmp_path / name)
    model = load_model(tmp_path / name, device="cpu")
    tokens = _tokens(30)
    expected = original(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(model(tokens), expected, atol=1e-4, rtol=1e-4)
    assert model.cfg.model_name == name
    own = load_model(_save(model, tmp_path / "own"), device="cpu")
    assert torch.equal(own(tokens), model(tokens))


def test_grouped_query_attention_keeps_its_key_value_heads(tmp_path: Path) -> None:
    _llama().save_pretrained(tmp_path / "llama")
    model = load_model(tmp_path / "llama", device="cpu")
    assert (model.cfg.n_heads, model.cfg.n_key_value_heads) == (4, 2)


def test_an_old_gpt2_configuration(tmp_path: Path) -> None:
    """The folders of OpenAI's own models name the context ``n_ctx``."""
    original = _randomised(_gpt2())
    original.save_pretrained(tmp_path / "gpt2")
    config = read_json(tmp_path / "gpt2" / "config.json")
    write_json(tmp_path / "gpt2" / "config.json", {**config, "n_ctx": 16})
    model = load_model(tmp_path / "gpt2", device="cpu")
    torch.testing.assert_close(model(_tokens(30)), original(_tokens(30)).logits, atol=1e-4, rtol=0)


def test_stories260k_reads_stories(shared_data: Path) -> None:
    model = load_model(shared_data / "models" / "stories260K", device="cpu")
    text = (shared_data / "text" / "tinystories_val.txt").read_text(encoding="utf-8")
    stories = [part.strip() for part in text.split("<|endoftext|>") if part.strip()][:40]
    losses = []
    with torch.no_grad():
        for story in stories:
            batch = TokenBatch.next_token(model.to_tokens(story)[:, :512])
            losses.append(per_label_loss(model(batch.tokens), batch))
    assert 14_000 < sum(map(len, losses)) < 15_000
    assert torch.cat(losses).mean().item() == pytest.approx(1.273, abs=2e-3)


# Bad folders.


def _change_config(folder: Path, **changes: Any) -> None:
    config = read_json(folder / "tl_config.json")
    write_json(folder / "tl_config.json", {**config, **changes})


def _rename_weight(folder: Path) -> None:
    weights = read_tensors(folder / "model.safetensors")
    weights["blocks.0.attn.W_query"] = weights.pop("blocks.0.attn.W_Q")
    write_tensors(folder / "model.safetensors", weights)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        r"expected the weights in .*model\.safetensors; there is no such file",
    ),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:-4]
        ),
        r"expected a safetensors file at .*model\.safetensors",
    ),
    "wrong shape": (
        lambda f: _change_config(f, d_mlp=48),
        r"expected the weights in .*model\.safetensors to fit their tl_config\.json; .*W_in",
    ),
    "more layers": (
        lambda f: _change_config(f, n_layers=3),
        r"missing \['blocks\.2\..*unexpected \[\]",
    ),
    "fewer layers": (
        lambda f: _change_config(f, n_layers=1),
        r"missing \[\], unexpected \['blocks\.1\.",
    ),
    "other names": (_rename_weight, r"missing \['blocks\.0\.attn\.W_Q'\].*W_query"),
    "unknown field": (
        lambda f: _change_config(f, n_layres=2),
        "describe the architecture in .*n_layres",
    ),
    "no configuration": (
        lambda f: (f / "tl_config.json").unlink(),
        r"expected tl_config\.json .* or config\.json .*found \['model\.safetensors'\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused(build_tiny: Build, tmp_path: Path, damage: str) -> None:
    folder = _save(build_tiny(), tmp_path / "model")
    harm, message = DAMAGES[damage]
    harm(folder)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load_model(folder, device="cpu")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected tl_config\.json .*found \[\]"):
        load_model(tmp_path, device="cpu")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no/such-model"):
        load_model("no/such-model", device="cpu")


@pytest.mark.parametrize("damage", ["no weights", "not JSON", "truncated", "wrong shape", "layers"])
def test_a_damaged_hugging_face_folder_is_refused(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "llama"
    _llama().save_pretrained(folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    content = json.loads(config.read_text())
    if damage == "no weights":
        weights.unlink()
    elif damage == "not JSON":
        config.write_text("{")
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:200])
    elif damage == "wrong shape":
        config.write_text(json.dumps({**content, "intermediate_size": 32}))
    else:
        config.write_text(json.dumps({**content, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=str(folder)):
        load_model(folder, device="cpu")


def test_a_folder_behind_a_link(build_tiny: Build, tmp_path: Path) -> None:
    folder = _save(build_tiny(), tmp_path / "model")
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    linked = load_model(tmp_path / "link", device="cpu")
    assert torch.equal(linked(_tokens()), load_model(folder, device="cpu")(_tokens()))


def test_building_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="expected fields of HookedTransformerConfig"):
        build_model({"n_layers": 1, "layers": 2}, device="cpu")
