"""A folder from a stranger: nothing in it runs, nothing is asked, and what is wrong is named."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import plain_transformer
from jinja2.exceptions import SecurityError
from tiny import HAS_HOOKED, tiny_model
from tokenizers import Tokenizer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from sparse_tl.backend import load_model, save_model
from sparse_tl.gates import SparseTransformer
from sparse_tl.storage.files import read_json
from sparse_tl.tasks.addition import addition_tokenizer

TEMPLATE = "{{ ''.__class__.__mro__ }}"
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).touch()
class Config(LlamaConfig):
    model_type = "stranger"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
def generate(*args, **kwargs):
    pass
"""
AUTO_MAP = {
    "AutoConfig": "code.Config",
    "AutoModelForCausalLM": "code.Model",
    "AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"],
}

KERNELS = {
    "_attn_implementation": "stranger/kernel",
    "attn_implementation": {"": "stranger/kernel"},
    "experts_implementation": "sonicmoe",
}


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a stranger's code makes; whoever is asked says yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return tmp_path / "marker"


def _change(file: Path, **fields: Any) -> None:
    content = read_json(file) if file.exists() else {}
    file.write_text(json.dumps({**content, **fields}))  # NaN too, which Python reads


def _add_code(folder: Path, marker: Path) -> None:
    for file in (folder / "code.py", folder / "custom_generate" / "generate.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(CODE.format(marker=str(marker)))


def _stranger_tokenizer(folder: Path, marker: Path, tokenizer_class: str) -> None:
    addition_tokenizer().save_pretrained(folder)
    _add_code(folder, marker)
    _change(
        folder / "tokenizer_config.json",
        auto_map=AUTO_MAP,
        trust_remote_code=True,
        tokenizer_class=tokenizer_class,
        bos_token="0",
        chat_template=TEMPLATE,
    )


def _own(folder: Path, **fields: Any) -> Path:
    """A folder that `save_model` wrote; one of a HookedTransformer where TransformerLens has it."""
    folder.mkdir(exist_ok=True)
    save_model(tiny_model(), folder)
    named = "tl_config.json" if HAS_HOOKED else "config.json"
    _change(folder / named, **fields)
    return folder


def _own_sparse(folder: Path) -> Path:
    return SparseTransformer(tiny_model()).save_pretrained(folder)


def _llama(folder: Path, **fields: Any) -> Path:
    plain_transformer("llama").save_pretrained(folder)
    _change(folder / "config.json", **fields)
    return folder


def test_code_beside_our_own_files_is_not_run(tmp_path: Path, marker: Path) -> None:
    folder = _own(tmp_path / "model", trust_remote_code=True)
    _stranger_tokenizer(folder, marker, "TokenizersBackend")
    fields = {"model_type": "stranger"} if HAS_HOOKED else {"custom_generate": "code"}
    _change(folder / "config.json", auto_map=AUTO_MAP, **fields)
    model = load_model(folder, device="cpu")
    assert not marker.exists()
    assert model.to_tokens("12", prepend_bos=False).tolist() == [[1, 2]]
    # A chat template is text until it is rendered, in a sandbox.
    assert model.tokenizer.chat_template == TEMPLATE
    with pytest.raises(SecurityError):
        model.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("tokenizer_class", [None, "Tokenizer", "GPT2Tokenizer"])
@pytest.mark.parametrize("model_type", ["llama", "stranger"])
def test_code_in_a_hugging_face_folder_is_not_run(
    tmp_path: Path, marker: Path, model_type: str, tokenizer_class: str | None
) -> None:
    folder = _llama(tmp_path / "model", auto_map=AUTO_MAP, model_type=model_type, **KERNELS)
    _change(folder / "config.json", trust_remote_code=True, _name_or_path=str(folder))
    _add_code(folder, marker)
    if tokenizer_class:
        _stranger_tokenizer(folder, marker, tokenizer_class)
    if model_type == "stranger" or tokenizer_class == "Tokenizer":
        with pytest.raises(ValueError, match="needs code of its own.* pass the result"):
            load_model(folder, device="cpu")
    else:
        model = load_model(folder, device="cpu")
        assert type(model.original_model) is LlamaForCausalLM
        assert model.original_model.config._attn_implementation == "eager"
        assert type(model.tokenizer).__name__ == (tokenizer_class or "NoneType")
    assert not marker.exists()


@pytest.mark.parametrize("model_type", ["llama", "align_text_model"])  # AutoModel lacks the second
def test_code_of_a_part_is_not_run(tmp_path: Path, marker: Path, model_type: str) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 30}
    seeing = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **sizes}
    parts = {"vision_config": seeing, "text_config": LlamaConfig(**sizes)}
    config = LlavaConfig(**parts, image_token_index=5)
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    _add_code(tmp_path / "model", marker)
    said = tmp_path / "model" / "config.json"
    code = {"AutoModel": "code.Model", **AUTO_MAP}
    part = {"model_type": model_type, "_name_or_path": str(said.parent), "auto_map": code}
    _change(said, text_config={**read_json(said)["text_config"], **part})
    with nullcontext() if model_type == "llama" else pytest.raises(ValueError, match="AutoModel"):
        load_model(said.parent, device="cpu")
    assert not marker.exists()


class _Pickled:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_pickled_weights_are_refused(tmp_path: Path, marker: Path) -> None:
    folder = _llama(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"weights": _Pickled(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=f"safetensors in {folder}.*pickle can run code"):
        load_model(folder, device="cpu")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("adapter_config.json", {"base_model_name_or_path": "x"}, "{folder} holds an adapter"),
        ("config.json", {"quantization_config": {"bits": 4}}, "{folder}; .*quantised"),
        ("config.json", {"architectures": ["Stranger"]}, "{folder}; .*no .'Stranger'"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, file: str, fields: dict[str, Any], message: str
) -> None:
    folder = _llama(tmp_path / "model")
    _change(folder / file, **fields)
    with pytest.raises(ValueError, match=message.format(folder=folder)):
        load_model(folder, device="cpu")


def test_a_sparse_folder_is_no_dense_model(tmp_path: Path) -> None:
    folder = _own_sparse(tmp_path / "sparse")
    with pytest.raises(ValueError, match=r"gates\.json.*SparseTransformer\.from_pretrained"):
        load_model(folder, device="cpu")


def test_gpt2_comes_with_its_tokenizer(shared_data: Path, tmp_path: Path) -> None:
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=16, vocab_size=50257)
    original = GPT2LMHeadModel(config).eval()
    original.save_pretrained(tmp_path / "gpt2")
    shutil.copytree(shared_data / "tokenizers" / "gpt2", tmp_path / "gpt2", dirs_exist_ok=True)
    model = load_model(tmp_path / "gpt2", device="cpu")
    words = Tokenizer.from_file(str(tmp_path / "gpt2" / "tokenizer.json")).encode("The war lasted")
    tokens = model.to_tokens("The war lasted")
    assert tokens.tolist() == [words.ids]
    assert model.to_tokens("The war lasted", prepend_bos=False).tolist() == [words.ids]
    torch.testing.assert_close(model(tokens), original(tokens).logits, atol=1e-4, rtol=1e-4)
    (tmp_path / "own").mkdir()
    save_model(model, tmp_path / "own")
    own = load_model(tmp_path / "own", device="cpu")
    assert own.to_tokens("The war lasted").tolist() == tokens.tolist()
    assert torch.equal(own(tokens), model(tokens))
    assert str(tmp_path / "gpt2") not in (tmp_path / "own" / "tokenizer_config.json").read_text()


def test_a_folder_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def forbidden(*args: Any, **_: Any) -> None:
        asked.append(args)
        raise OSError("no network")

    folder = _own_sparse(tmp_path / "gpt2")  # as a model of the hub is called
    addition_tokenizer().save_pretrained(folder)
    monkeypatch.setattr("socket.getaddrinfo", forbidden)
    monkeypatch.setattr("socket.socket.connect", forbidden)
    assert SparseTransformer.from_pretrained(folder, device="cpu").tokenizer is not None
    (folder / "gates.json").unlink()
    load_model(folder, device="cpu")
    load_model(_llama(tmp_path / "mixtral"), device="cpu")
    load_model(plain_transformer("gpt2"))
    assert not asked


# Names on the hub.


def test_what_is_in_the_cache_loads_without_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker: Path, offline: None
) -> None:
    """Also a model whose code TransformerLens would trust by its name."""
    place = tmp_path / "cache" / "models--microsoft--phi-2"
    folder = place / "snapshots" / ("0" * 40)
    _add_code(folder, marker)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    for file in _llama(place / "blobs", auto_map=AUTO_MAP).iterdir():
        (folder / file.name).symlink_to(Path("../../blobs") / file.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    model = load_model("microsoft/phi-2", device="cpu")
    assert (model.cfg.model_name, model.cfg.n_layers) == ("phi-2", 3)
    assert not marker.exists()


def test_only_data_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def download(name: str, **options: Any) -> str:
        fetched.append((name, options))
        return str(_llama(tmp_path / "snapshot"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_model("gpt2-small", device="cpu").cfg.model_name == "gpt2"
    assert [name for name, _ in fetched] == ["gpt2"]
    data = {"*.json", "*.txt", "*.yaml", "*.safetensors", "chat_template.jinja"}
    assert set(fetched[0][1]["allow_patterns"]) == data
