"""A saved model with a tokenizer, for commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sparse_tl.lens import save_model

WORDS = ["<s>", "the", "cat", "sat", "on", "mat"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<s>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<s>")
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    save_model(tiny_model("grouped", d_vocab=len(WORDS), tokenizer=tokenizer), folder)
    return folder
