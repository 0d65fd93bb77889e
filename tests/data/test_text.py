"""Texts are read as far as they are needed, and cut into full windows of the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from made_tokenizers import byte_level, word_level
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sparse_tl.data import documents, read_documents, token_windows

WORDS = ["<s>", "a", "b", "c", "d"]


def _tokenizer() -> PreTrainedTokenizerFast:
    return word_level(*WORDS, unknown="d", bos_token="<s>")


def test_a_limit_reads_no_further_than_it_must() -> None:
    read = []

    def documents() -> Iterator[str]:
        for i in range(100):
            read.append(i)
            yield "a b c"

    windows = token_windows(documents(), _tokenizer(), 4, limit=2)
    assert windows.tolist() == [[0, 1, 2, 3]] * 2
    assert read == [0, 1]


def test_documents_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "stories.txt"
    path.write_text("\nOne — día.\n<|endoftext|>\n\n<|endoftext|>Two\nlines.", encoding="utf-8")
    assert list(read_documents(path)) == ["One — día.", "Two\nlines."]
    assert list(read_documents(str(path), separator="Two")) == [
        "One — día.\n<|endoftext|>\n\n<|endoftext|>",
        "lines.",
    ]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One<|endoftext|>\ufeffTwo", encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text('{"text": "Three\u2028\x85"}', encoding="utf-8-sig")
    (tmp_path / "empty.txt").touch()
    found = list(
        read_documents([tmp_path / f"{name}" for name in ("a.txt", "empty.txt", "b.jsonl")])
    )
    assert found == ["One", "\ufeffTwo", "Three\u2028\x85"]


def test_documents_of_tables(tmp_path: Path) -> None:
    """Of a data frame the names of its columns were read, and of a .csv file its quotes too."""
    table = pd.DataFrame({"n": [1, 2, 3], "text": ["One,\n“día”.", "", "NA"]})
    table.to_csv(tmp_path / "a.csv", index=False)
    table.to_parquet(tmp_path / "a.parquet")
    table.to_csv(tmp_path / "A.CSV", index=False)
    for source in (table, tmp_path / "a.csv", tmp_path / "a.parquet", tmp_path / "A.CSV"):
        assert list(read_documents(source)) == ["One,\n“día”.", "NA"]
        with pytest.raises(ValueError, match="no text in column 'body' of"):
            list(read_documents(source, column="body"))
    (tmp_path / "b.csv").write_text("text\nOne, two.\n")
    with pytest.raises(ValueError, match=r"b\.csv: line 2 has more cells than the header"):
        list(read_documents(tmp_path / "b.csv"))
    (tmp_path / "c.csv").write_text("text,,text,\nOne,,two,\n")
    with pytest.raises(ValueError, match=r"c\.csv: two columns have the same name, of text, text"):
        list(read_documents(tmp_path / "c.csv"))
    (tmp_path / "d.csv").write_text("text\nÄpfel\n", encoding="latin-1")
    with pytest.raises(ValueError, match=r"d\.csv is not UTF-8 text: invalid"):
        list(read_documents(tmp_path / "d.csv"))
    table.assign(text="a word " * 30_000).to_csv(tmp_path / "long.csv")
    assert [len(text) for text in read_documents(tmp_path / "long.csv")] == 3 * [210_000]


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"One<|endoftext|>Two\xff")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text: invalid start byte"):
        list(read_documents(tmp_path / "a.txt"))
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n\n{"text": 3}')
    with pytest.raises(ValueError, match=r"column 'text' of line 3 of .*b\.jsonl"):
        list(read_documents(tmp_path / "b.jsonl"))


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


# Long documents.


def _odd() -> str:
    """Words, and what tokenizers treat in ways of their own."""
    draw = random.Random(0).choice
    parts = [
        "word",
        " a",
        "ä",
        "é ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        " 😀",
        "漢字",
        "I'm ",
        "...",
        "   \n ",
    ]
    return "".join(draw(parts) for _ in range(4000))


@pytest.fixture(params=["gpt2", "olmo", "llama3"])
def real_tokenizer(request: pytest.FixtureRequest, shared_data: Path) -> PreTrainedTokenizerFast:
    if request.param == "llama3":  # its rule: one token may have a mark and a line break
        return byte_level(*(mark + "\n" for mark in ".,:;!?-_"), words_alone=False)
    path = shared_data / "tokenizers" / request.param / "tokenizer.json"
    return PreTrainedTokenizerFast(tokenizer_file=str(path))


@pytest.mark.parametrize("name", ["tinyshakespeare", "wikitext2_test", "tinystories_val", "odd"])
@pytest.mark.parametrize("piece", [50, 200, 5000])
def test_pieces_have_the_tokens_of_the_whole(
    real_tokenizer: PreTrainedTokenizerFast,
    shared_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    piece: int,
) -> None:
    path = shared_data / "text" / f"{name}.txt"
    document = _odd() if name == "odd" else path.read_text(encoding="utf-8")[:50_000]
    whole = token_windows([document], real_tokenizer, 16)
    monkeypatch.setattr(documents, "PIECE", piece)
    assert token_windows([document], real_tokenizer, 16).equal(whole)


class _Counting:
    """A tokenizer that knows how much text it was given."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner, self.characters = inner, 0
        self.bos_token_id, self.is_fast = None, True

    def __call__(self, given: str, **options: Any) -> Any:
        self.characters += len(given)
        return self.inner(given, **options)


@pytest.mark.parametrize("limit", [1, 20])
def test_a_long_document_is_tokenised_as_far_as_needed(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(documents, "PIECE", 400)
    document, tokenizer = "a b c d " * 5000, _Counting(_tokenizer())
    windows = token_windows([document], tokenizer, 50, limit=limit)
    assert windows.flatten().tolist() == [1, 2, 3, 4] * (50 * limit // 4) + [1, 2] * (limit % 2)
    assert tokenizer.characters <= 2 * 50 * limit + 480


def test_a_document_without_spaces_is_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE", 10)
    letters = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    assert token_windows(["ab" * 500], tokenizer, 1000).tolist() == [[0, 1] * 500]
