"""A model and a text that every command can afford."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import WORDS
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sparse_tl.lens import Model, save_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, build_tiny: Callable[..., Model]) -> Path:
    """A model of our own format with a tokenizer of a dozen words."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="."))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<s>")
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    save_model(build_tiny("grouped", d_vocab=len(WORDS), tokenizer=tokenizer), folder)
    return folder


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty stories of eleven words: ninety windows of eight tokens."""
    path = tmp_path_factory.mktemp("text") / "story.txt"
    choice = random.Random(0)
    stories = [" ".join(choice.choices(WORDS[1:], k=11)) for _ in range(60)]
    path.write_text("\n<|endoftext|>\n".join(stories), encoding="utf-8")
    return path
