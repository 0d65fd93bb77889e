"""A saved model with a tokenizer, for commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_model

from sparse_tl.lens import save_model

WORDS = ["<s>", "the", "cat", "sat", "on", "mat"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from jobs import tokenizer_of

    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = tokenizer_of(WORDS, folder)
    save_model(tiny_model("grouped", d_vocab=len(WORDS), tokenizer=tokenizer), folder)
    return folder
