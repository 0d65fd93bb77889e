"""A saved model with a tokenizer, for commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import save_tiny

WORDS = ["<s>", "the", "cat", "sat", "on", "mat"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", WORDS)
