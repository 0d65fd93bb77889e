"""Runs on streamed text: interrupted and resumed, and by the command."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import tokenizer_of
from transformers import PreTrainedTokenizerFast

from sparse_tl.backend import Model, save_model
from sparse_tl.data import TextStream, TokenBatch, read_documents, token_windows
from sparse_tl.jobs import post_training, run_post_training

WORDS = ["<s>", *"abcdefghijkl"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return tokenizer_of(WORDS, tmp_path_factory.mktemp("tokenizer"), unknown="a")


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """Forty stories: 100 windows of eight tokens."""
    draw = random.Random(0)
    stories = [" ".join(draw.choices(WORDS[1:], k=19)) for _ in range(40)]
    path = tmp_path / "book.txt"
    path.write_text("<|endoftext|>".join(stories), encoding="utf-8")
    return path


@pytest.mark.long
@pytest.mark.parametrize("steps", [20, 24])
def test_the_command_streams_what_it_does_not_hold(
    build_tiny: Callable[..., Model],
    book: Path,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
) -> None:
    """And trains on every window but those that it holds out."""
    monkeypatch.setattr(post_training, "WINDOW_TOKENS", 50 * 8)
    seen: list[list[int]] = []
    batch = TextStream.batch

    def noted(self: TextStream, step: int) -> TokenBatch:
        found = batch(self, step)
        seen.extend(found.tokens.tolist())
        return found

    monkeypatch.setattr(TextStream, "batch", noted)
    model = build_tiny(d_vocab=len(WORDS), tokenizer=tokenizer)
    save_model(model, tmp_path / "model")
    settings: dict[str, Any] = {"window": 8, "batch_size": 4, "steps": steps, "progress": False}
    settings |= {"model": str(tmp_path / "model"), "text": str(book), "target_loss": "+1"}
    windows = token_windows(read_documents(book), tokenizer, 8).tolist()
    assert len(windows) == 100
    if steps == 20:
        run_post_training(tmp_path / "out", **settings)
    else:  # the text is longer than what is held, and ends nevertheless
        with pytest.warns(UserWarning, match="uses 96 rows of book, which has 95"):
            run_post_training(tmp_path / "out", **settings)
        assert sorted(seen[:95]) == sorted(windows[:45] + windows[50:])
    assert len(seen) == 4 * steps
    assert all(row in windows[:45] + windows[50:] for row in seen)
