"""HookedTransformers as folders of ours: every weight comes back, and what is wrong is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import hooked_alone
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sparse_tl.backend import Model, load_model, model_config, save_model
from sparse_tl.tasks.addition import addition_tokenizer

pytestmark = hooked_alone

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


def test_a_dtype_may_be_asked_for(build_tiny: Build, tmp_path: Path) -> None:
    folder = _save(build_tiny(), tmp_path / "model")
    loaded = load_model(folder, device="cpu", dtype="float64")
    assert loaded.embed.W_E.dtype == loaded.cfg.dtype == torch.float64
    with pytest.raises(ValueError, match="device_map cannot be chosen for a folder of a Hook"):
        load_model(folder, device_map="cpu")
