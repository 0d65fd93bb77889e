"""Streams that give the batch of any step, and texts cut into full windows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sparse_tl.data import IterableStream, ShuffledStream, read_documents, token_windows
from sparse_tl.data.batches import TokenBatch


def _numbered(n: int) -> TokenBatch:
    """Rows that carry their own number."""
    return TokenBatch.next_token(torch.arange(n)[:, None].repeat(1, 2))


def _rows(batch: TokenBatch) -> list[int]:
    return batch.tokens[:, 0].tolist()


@pytest.mark.parametrize(("n", "size"), [(10, 3), (10, 5), (7, 7), (5, 1), (8, 6)])
def test_every_row_once_per_epoch(n: int, size: int) -> None:
    stream = ShuffledStream(_numbered(n), size, seed=3)
    sequence = [row for step in range(3 * n) for row in _rows(stream.batch(step))]
    epochs = [sequence[start : start + n] for start in range(0, 3 * size * n, n)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    if n > 1:
        assert len({tuple(epoch) for epoch in epochs}) > 1


def test_random_access_equals_sequential() -> None:
    sequential = ShuffledStream(_numbered(11), 4)
    expected = {step: _rows(sequential.batch(step)) for step in range(40)}
    jumping = ShuffledStream(_numbered(11), 4)
    for step in (39, 0, 17, 16, 17, 2, 38, 3):
        assert _rows(jumping.batch(step)) == expected[step]
    assert _rows(ShuffledStream(_numbered(11), 4).batch(23)) == expected[23]


def test_seeds_shuffle_differently_and_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    orders = {tuple(_rows(ShuffledStream(_numbered(20), 20, seed).batch(0))) for seed in range(4)}
    assert len(orders) == 4
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("size", [0, -1, 6])
def test_a_batch_size_that_does_not_fit(size: int) -> None:
    with pytest.raises(ValueError, match=rf"batch size in 1\.\.5.*got {size}"):
        ShuffledStream(_numbered(5), size)


def test_a_stream_says_in_how_many_pieces_its_batches_are_run() -> None:
    """And gives the same whole batches whatever it says."""
    plain, in_pieces = (
        ShuffledStream(_numbered(9), 6),
        ShuffledStream(_numbered(9), 6, accumulate=3),
    )
    assert (plain.accumulate, in_pieces.accumulate) == (1, 3)
    assert [_rows(plain.batch(step)) for step in range(3)] == [
        _rows(in_pieces.batch(step)) for step in range(3)
    ]


def test_an_iterable_stream_goes_forward_and_back() -> None:
    stream = IterableStream([_numbered(1), _numbered(2), _numbered(3), _numbered(4)])
    assert [len(stream.batch(step)) for step in (0, 1, 3, 0, 2, 2, 1, 3)] == [
        1,
        2,
        4,
        1,
        3,
        3,
        2,
        4,
    ]


def test_an_iterable_stream_that_ends_says_when() -> None:
    stream = IterableStream([_numbered(1), _numbered(2)])
    with pytest.raises(ValueError, match="a batch for step 5; the stream ended after 2"):
        stream.batch(5)
    assert len(stream.batch(1)) == 2


def test_a_generator_cannot_go_back() -> None:
    stream = IterableStream(_numbered(n) for n in (1, 2, 3))
    assert len(stream.batch(1)) == 2
    with pytest.raises(ValueError, match="expected"):
        stream.batch(0)


# Texts.

WORDS = ["<s>", "a", "b", "c", "d"]


def _tokenizer(bos: bool = True) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="d"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, **({"bos_token": "<s>"} if bos else {}))


def test_every_document_follows_a_bos_and_nothing_is_padded() -> None:
    windows = token_windows(["a b c", "d", "b b b b"], _tokenizer(), 3)
    # <s> a b | c <s> d | <s> b b | and the last two tokens fill no window.
    assert windows.tolist() == [[0, 1, 2], [3, 0, 4], [0, 2, 2]]


def test_documents_without_a_bos_token_are_joined() -> None:
    windows = token_windows(["a b c", "d", "b b"], _tokenizer(bos=False), 2)
    assert windows.tolist() == [[1, 2], [3, 4], [2, 2]]


def test_a_limit_reads_no_further_than_it_must() -> None:
    read = []

    def documents() -> Iterator[str]:
        for i in range(100):
            read.append(i)
            yield "a b c"

    windows = token_windows(documents(), _tokenizer(), 4, limit=2)
    assert windows.tolist() == [[0, 1, 2, 3]] * 2
    assert read == [0, 1]


@pytest.mark.parametrize(("documents", "count"), [(["a b"], 3), ([], 0), (["", ""], 2)])
def test_text_shorter_than_a_window(documents: list[str], count: int) -> None:
    with pytest.raises(ValueError, match=f"one window of 8 tokens; got {count} tokens"):
        token_windows(documents, _tokenizer(), 8)


def test_a_window_that_predicts_nothing() -> None:
    with pytest.raises(ValueError, match="a window of at least 2 tokens; got 1"):
        token_windows(["a b"], _tokenizer(), 1)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="expected a model with a tokenizer"):
        token_windows(["a b"], None, 2)


def test_documents_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "stories.txt"
    path.write_text("\nOne — día.\n<|endoftext|>\n\n<|endoftext|>Two\nlines.", encoding="utf-8")
    assert list(read_documents(path)) == ["One — día.", "Two\nlines."]
    assert list(read_documents(str(path), separator="Two")) == [
        "One — día.\n<|endoftext|>\n\n<|endoftext|>",
        "lines.",
    ]


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("día".encode("latin-1"))
    with pytest.raises(ValueError, match=r"expected UTF-8 text in .*latin\.txt"):
        list(read_documents(path))


def test_without_a_network_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`load_dataset` asked six times, over half a minute."""
    asked: list[str] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, **_: asked.append(name[0]))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="no-such-set is no file, and loading it as a dataset"):
        list(read_documents("no-such-set"))
    assert asked == []


@pytest.mark.usefixtures("offline")
def test_neither_a_file_nor_a_dataset() -> None:
    with pytest.raises(ValueError, match="no-such-dataset is no file, and loading it as a dataset"):
        list(read_documents("no-such-dataset"))


def _dataset_folder(folder: Path) -> str:
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    return str(folder)


def test_documents_of_a_dataset(tmp_path: Path) -> None:
    assert list(read_documents(_dataset_folder(tmp_path / "data"))) == ["one", "two"]


def test_empty_rows_of_a_dataset_are_no_documents(tmp_path: Path) -> None:
    """Datasets of lines have one between any two paragraphs: each became a lone BOS token."""
    rows = [
        '{"text": "one"}',
        '{"text": ""}',
        '{"text": " \\n"}',
        '{"text": null}',
        '{"text": "two"}',
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    assert list(read_documents(tmp_path)) == ["one", "two"]


def test_a_dataset_without_the_column_names_those_it_has(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a column 'story' in dataset .*it has \['text'\]"):
        list(read_documents(_dataset_folder(tmp_path / "data"), column="story"))
