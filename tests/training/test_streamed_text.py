"""Runs on streamed text: interrupted and resumed, and by the command."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from short_runs import Killed
from tiny import tokenizer_of
from transformers import PreTrainedTokenizerFast

from sparse_tl.backend import Model, save_model
from sparse_tl.data import TextStream, TokenBatch, read_documents, token_windows
from sparse_tl.jobs import post_training, run_post_training
from sparse_tl.training.loop import pretrain

WORDS = ["<s>", *"abcdefghijkl"]


class Stopping(TextStream):
    """A stream during whose given step the process is killed."""

    at: int

    def batch(self, step: int) -> TokenBatch:
        if step == self.at:
            raise Killed
        return super().batch(step)


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


def _stream(book: Path, tokenizer: Any, at: int = -1) -> Stopping:
    stream = Stopping(read_documents(book), tokenizer, 8, 6, seed=1, shuffle=16)
    stream.at = at
    return stream


@pytest.mark.parametrize("stop", random.Random(0).sample(range(1, 40), 4))
def test_a_resumed_run_equals_an_uninterrupted_one(
    build_tiny: Callable[..., Model], book: Path, tokenizer: Any, tmp_path: Path, stop: int
) -> None:
    validation = TokenBatch.next_token(token_windows(read_documents(book), tokenizer, 8)[:4])
    settings: dict[str, Any] = {"steps": 40, "learning_rate": 1e-2, "evaluate_every": 20}
    settings |= {"validation": validation, "progress": False, "checkpoint_every": 3}
    whole, resumed = build_tiny(), build_tiny()
    pretrain(whole, _stream(book, tokenizer), **settings)
    settings["checkpoint"] = tmp_path / "checkpoint"
    with pytest.raises(Killed):
        pretrain(build_tiny(), _stream(book, tokenizer, stop), **settings)
    pretrain(resumed, _stream(book, tokenizer), **settings)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_a_run_refuses_a_text_that_has_changed(
    build_tiny: Callable[..., Model], book: Path, tokenizer: Any, tmp_path: Path
) -> None:
    validation = TokenBatch.next_token(token_windows(read_documents(book), tokenizer, 8)[:4])
    settings: dict[str, Any] = {"steps": 9, "validation": validation, "progress": False}
    settings |= {"checkpoint": tmp_path / "checkpoint", "checkpoint_every": 3}
    with pytest.raises(Killed):
        pretrain(build_tiny(), _stream(book, tokenizer, 5), **settings)
    book.write_text(" ".join(reversed(book.read_text().split())))
    with pytest.raises(ValueError, match="different tokens or rows"):
        pretrain(build_tiny(), _stream(book, tokenizer), **settings)


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
