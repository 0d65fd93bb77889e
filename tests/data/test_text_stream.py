"""Streams have all rows, or the windows of all text, in an order that step and seed decide."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_dataset
from made_tokenizers import word_level
from transformers import PreTrainedTokenizerFast

from sparse_tl import ShuffledStream, TextStream, TokenBatch, read_documents, token_windows
from sparse_tl.data import documents

VOCABULARY = 500


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each of the words w1, w2, ..., so that nearly all windows differ."""
    words = (f"w{number}" for number in range(1, VOCABULARY))
    return word_level("<s>", *words, unknown="<s>", bos_token="<s>")


class Forgetful:
    """A tokenizer that does not know one word."""

    def __init__(self, inner: PreTrainedTokenizerFast) -> None:
        self.inner, self.refused = inner, ""
        self.bos_token_id, self.is_fast = inner.bos_token_id, True

    def __call__(self, given: str, **options: Any) -> Any:
        if self.refused and self.refused in given:
            raise TypeError(f"no token for {self.refused}")
        return self.inner(given, **options)


def _texts(n: int, longest: int = 30, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [
        " ".join(f"w{draw.randrange(1, VOCABULARY)}" for _ in range(draw.randrange(1, longest)))
        for _ in range(n)
    ]


def _rows(stream: TextStream, steps: range) -> list[list[int]]:
    return [row for step in steps for row in stream.batch(step).tokens.tolist()]


def _as_json(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": some, "n": 1}) + "\n\n" for some in texts))
    return path


def _as_text(path: Path, texts: list[str], between: str = "\n<|endoftext|>\r\n") -> Path:
    path.write_bytes(between.join(texts).encode())
    return path


Source = Callable[[Path, list[str]], Any]
SOURCES: dict[str, Source] = {
    "list": lambda folder, texts: texts,
    "text": lambda folder, texts: read_documents(_as_text(folder / "a.txt", texts)),
    "files": lambda folder, texts: read_documents(
        [
            _as_text(folder / "a.txt", texts[:20]),
            _as_json(folder / "b.jsonl", texts[20:50]),
            _as_text(folder / "c.txt", texts[50:]),
        ]
    ),
    "dataset": lambda folder, texts: read_documents(_streamed(folder, texts)),
    "shuffled dataset": lambda folder, texts: read_documents(
        _streamed(folder, texts).shuffle(seed=0, buffer_size=10)
    ),
}


def _streamed(folder: Path, texts: list[str]) -> Any:
    files = [
        str(_as_json(folder / f"{half}.jsonl", some))
        for half, some in enumerate((texts[:40], texts[40:]))
    ]
    return load_dataset("json", data_files=files, split="train", streaming=True)


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return SOURCES[request.param](tmp_path, _texts(80))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that long documents have many pieces."""
    monkeypatch.setattr(documents, "PIECE", 60)


@pytest.mark.usefixtures("small_pieces")
def test_windows_and_epochs_are_those_of_the_whole_text(source: Any, tokenizer: Any) -> None:
    windows = token_windows(source, tokenizer, 8)
    n = len(windows)
    assert n > 100
    # In the order of the text, from the start again when it ends.
    in_order = TextStream(source, tokenizer, 8, 5, shuffle=1)
    expected = [windows[number % n].tolist() for number in range(3 * n)]
    assert _rows(in_order, range(3 * n // 5)) == expected[: 3 * n // 5 * 5]
    assert in_order.n_windows == n
    # With one block, it is the stream of the fixed set.
    whole = TextStream(source, tokenizer, 8, 5, seed=3, shuffle=n + 1)
    fixed = ShuffledStream(TokenBatch.next_token(windows), 5, seed=3)
    for step in (0, 1, 7, n // 5, n // 5 + 1, 2 * n // 5, 50):
        found, batch = whole.batch(step), fixed.batch(step)
        assert torch.equal(found.tokens, batch.tokens)
        assert torch.equal(found.labels, batch.labels)
        assert torch.equal(found.loss_mask, batch.loss_mask)


@pytest.mark.parametrize(
    ("n", "shuffle", "size"), [(30, 7, 4), (28, 7, 4), (28, 7, 28), (30, 4, 11), (5, 64, 12)]
)
def test_every_window_once_per_epoch_and_block(
    tokenizer: Any, n: int, shuffle: int, size: int
) -> None:
    text = _texts(1, longest=2)[:0] + [" ".join(f"w{i + 1}" for i in range(4 * n - 1))]
    windows = [tuple(row) for row in token_windows(text, tokenizer, 4).tolist()]
    assert len(set(windows)) == n
    stream = TextStream(text, tokenizer, 4, size, seed=1, shuffle=shuffle)
    rows = list(map(tuple, _rows(stream, range(4 * n // size + 1))))
    epochs = [rows[start : start + n] for start in range(0, 4 * n, n)]
    for epoch in epochs[:-1]:
        for start in range(0, n, shuffle):
            block = slice(start, min(n, start + shuffle))
            assert sorted(epoch[block]) == sorted(windows[block])
    assert len(set(map(tuple, epochs[:-1]))) == len(epochs) - 1, "each epoch is shuffled anew"
    assert epochs[0] != windows


@pytest.mark.usefixtures("small_pieces")
def test_any_step_in_any_order(source: Any, tokenizer: Any) -> None:
    expected = TextStream(source, tokenizer, 8, 6, shuffle=16)
    in_turn = [expected.batch(step).tokens.tolist() for step in range(60)]
    steps = list(range(60))
    random.Random(0).shuffle(steps)
    jumping = TextStream(source, tokenizer, 8, 6, shuffle=16)
    for step in [*steps, *steps[:10]]:
        assert jumping.batch(step).tokens.tolist() == in_turn[step], step


def test_held_out_windows_are_left_out(tokenizer: Any) -> None:
    windows = token_windows(_texts(80), tokenizer, 8)
    stream = TextStream(_texts(80), tokenizer, 8, 4, shuffle=16, left_out=range(10, 50))
    n = len(windows) - 40
    rows = _rows(stream, range(n // 4 + 2))[:n]
    assert stream.n_windows == n
    assert sorted(rows) == sorted(windows[:10].tolist() + windows[50:].tolist())


@pytest.mark.long
def test_a_streamed_dataset_is_read_by_several_threads(tmp_path: Path) -> None:
    """As two streams do, or one that is stopped while its thread still reads."""
    texts = [f"w{number}" for number in range(80)]
    streamed = _streamed(tmp_path, texts).shuffle(seed=0, buffer_size=10)
    parts = [read_documents(some) for some in (streamed, streamed.skip(20), streamed.take(20))]

    def read(part: int) -> list[str]:
        return list(parts[part])

    expected, before = [read(part) for part in range(3)], sys.getswitchinterval()
    assert expected[0] == expected[2] + expected[1]
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            for _ in range(8):
                assert list(pool.map(read, (0, 1, 2))) == expected
                assert list(pool.map(read, (0, 0, 0))) == expected[:1] * 3
    finally:
        sys.setswitchinterval(before)


# What is refused, and where.


def test_all_text_held_out(tokenizer: Any) -> None:
    stream = TextStream(["w1 w2 w3 w4"] * 4, tokenizer, 8, 4, left_out=range(100))
    with pytest.raises(ValueError, match="all windows of the text are left out"):
        stream.batch(0)


def test_what_the_thread_meets_is_raised_again(tokenizer: Any) -> None:
    texts = _texts(80)
    texts[70] = "w1 strange w2"
    stream = TextStream(texts, Forgetful(tokenizer), 8, 4, shuffle=16)
    stream.tokenizer.refused = "strange"
    steps = iter(range(100))
    for _ in range(2):  # and not taken for the end of the text
        with pytest.raises(TypeError, match="no token for strange"):
            for step in steps:
                stream.batch(step)
    assert next(steps) > 21, "the batches before were given"


def test_forked_processes_read_the_same(tokenizer: Any) -> None:
    """As with `accelerate.notebook_launcher`, of a stream from an earlier cell of the notebook."""
    expected = _rows(TextStream(_texts(400), tokenizer, 8, 4, shuffle=64), range(200))
    stream = TextStream(_texts(400), tokenizer, 8, 4, shuffle=64)

    def check() -> None:
        for _ in range(2):
            assert _rows(stream, range(200)) == expected

    forked = [get_context("fork").Process(target=check) for _ in range(3)]
    for process in forked:
        process.start()
    for process in forked:
        process.join()
    assert [process.exitcode for process in forked] == [0, 0, 0]


# The thread, and memory.


def test_the_thread_has_a_tokenizer_of_its_own(tokenizer: Any) -> None:
    """Other calls set truncation and padding on the object, which would cut documents."""
    given = Forgetful(tokenizer)
    stream = TextStream(_texts(80), given, 8, 4)
    given.refused = "w"
    assert stream.batch(0).tokens.shape == (4, 8)


@pytest.mark.long
def test_a_process_ends_although_the_thread_is_at_work() -> None:
    script = """
from sparse_tl.data import TextStream

class Slow:
    bos_token_id, is_fast = None, False
    def __call__(self, text, **options):
        import time
        time.sleep(0.01)
        return {"input_ids": [1] * 8}

stream = TextStream(["a"] * 1000, Slow(), 8, 4, shuffle=16)
stream.batch(0)
raise KeyboardInterrupt
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=300)
    assert done.stderr.decode().strip().endswith("KeyboardInterrupt")


@pytest.mark.long
def test_memory_does_not_grow_with_the_text(tmp_path: Path, tokenizer: Any) -> None:
    def peak(n: int) -> int:
        path = _as_text(tmp_path / "a.txt", _texts(200) * n, "<|endoftext|>")
        stream = TextStream(read_documents(path), tokenizer, 8, 4, shuffle=64)
        tracemalloc.start()
        for step in range(80 * n):
            stream.batch(step)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(1)
    # Four times the text; some 50 kB wait for the garbage collector or do not.
    small = peak(2)
    assert small < 600_000 and peak(8) < 2.4 * small


# A fixed set of rows.


def _numbered(n: int) -> TokenBatch:
    """Rows that carry their own number."""
    return TokenBatch.next_token(torch.arange(n)[:, None].repeat(1, 2))


def _numbers(batch: TokenBatch) -> list[int]:
    return batch.tokens[:, 0].tolist()


@pytest.mark.parametrize(("n", "size"), [(10, 3), (10, 5), (7, 7), (5, 1), (8, 6)])
def test_every_row_once_per_epoch(n: int, size: int) -> None:
    stream = ShuffledStream(_numbered(n), size, seed=3)
    sequence = [row for step in range(3 * n) for row in _numbers(stream.batch(step))]
    epochs = [sequence[start : start + n] for start in range(0, 3 * size * n, n)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    if n > 1:
        assert len({tuple(epoch) for epoch in epochs}) > 1


def test_random_access_equals_sequential() -> None:
    sequential = ShuffledStream(_numbered(11), 4)
    expected = {step: _numbers(sequential.batch(step)) for step in range(40)}
    jumping = ShuffledStream(_numbered(11), 4)
    for step in (39, 0, 17, 16, 17, 2, 38, 3):
        assert _numbers(jumping.batch(step)) == expected[step]
    assert _numbers(ShuffledStream(_numbered(11), 4).batch(23)) == expected[23]


def test_seeds_shuffle_differently_and_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    orders = {
        tuple(_numbers(ShuffledStream(_numbered(20), 20, seed).batch(0))) for seed in range(4)
    }
    assert len(orders) == 4
    assert torch.equal(torch.get_rng_state(), before)
