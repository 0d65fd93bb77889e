"""Documents of text files and datasets, which can be read repeatedly, and their tokens."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import pandas as pd

from sparse_tl.arguments import checked

_MORE = "more cells than the header (quote texts with commas)"


@checked
def read_documents(
    source: str | Path | Iterable[Any],
    *,
    separator: str = "<|endoftext|>",
    split: str = "train",
    column: str = "text",
) -> Documents:
    """The non-empty documents of files, a data frame or a Hugging Face dataset (streamed).

    Args:
        source: a path or a list of paths, of text or of ``.jsonl``, ``.csv`` and ``.parquet`` rows;
            the name of a dataset, with its configuration after a colon if needed; or a data frame,
            a dataset or any other iterable of rows that can be restarted.
        separator: string between documents in a text file.
        split: split of the dataset.
        column: the column, or the key in a ``.jsonl`` file's rows, that holds the text.

    Raises:
        ValueError: the file, dataset or column does not exist, or a file is not UTF-8 text.
    """
    if isinstance(source, (str, Path)):
        if not Path(source).is_file():
            return Documents(dataset_rows(source, split), column, f"dataset {source}")
        source = [source]
    if not isinstance(source, (list, tuple)) or not all(isinstance(x, (str, Path)) for x in source):
        rows = source.to_dict("records") if isinstance(source, pd.DataFrame) else source
        return Documents(rows, column, f"the {type(source).__name__}")
    paths = [Path(path) for path in source]
    for path in paths:
        if not path.is_file():  # say so now, not when its turn comes
            raise ValueError(f"{path} is not a file")
    return Documents(_Files(paths, separator, column))


def dataset_rows(source: str | Path, split: str) -> Iterable[dict[str, Any]]:
    """A Hugging Face dataset, named as in `read_documents`, whose rows are streamed."""
    from datasets import load_dataset
    from huggingface_hub import constants, get_session

    name, _, configuration = str(source).partition(":")
    try:
        if not Path(name).exists():
            # Check once: without a network, `load_dataset` retries for half a minute.
            get_session().head(constants.ENDPOINT, timeout=10)
        return load_dataset(name, configuration or None, split=split, streaming=True)
    except Exception as error:  # hub, network and parser raise different types
        raise ValueError(
            f"{source} is not a file, and loading it as a dataset failed: {error}"
        ) from error


class Documents:
    """Texts in a fixed order, which can be read again from the start: an iterable of strings.

    The rows are strings, or dictionaries with a text in `column`; messages call them `name`.
    """

    def __init__(self, rows: Iterable[Any], column: str = "text", name: str = "the list") -> None:
        if isinstance(rows, (str, bytes)) or iter(rows) is rows:
            raise ValueError(
                "expected documents that can be read again from the start, such as a list, a "
                f"dataset, or those of `read_documents`; got a {type(rows).__name__}"
            )
        self.rows, self.column, self.name = rows, column, name

    def __iter__(self) -> Iterator[str]:
        for row in _one_at_a_time(self.rows):
            text = row if isinstance(row, str) else _text_of(row, self.column, self.name)
            if text is not None:
                yield text


_reading = Lock()
"""Held while a thread reads the next row of a streamed dataset."""


def _one_at_a_time(rows: Iterable[Any]) -> Iterator[Any]:
    """The rows; those of a streamed dataset are read under a lock.

    Its iterators share a state, even with those of derived datasets (skip, take, filter): two that
    run at the same moment, in two threads, skip one another's rows or fail.
    """
    datasets = sys.modules.get("datasets")  # unless it is imported, there are none
    if datasets is None or not isinstance(rows, datasets.IterableDataset):
        yield from rows
        return
    iterator, end = iter(rows), object()
    while True:
        with _reading:
            row = next(iterator, end)
        if row is end:
            return
        yield row


class _Files:
    """Documents of files: the texts between separators, or the rows of tables."""

    def __init__(self, paths: list[Path], separator: str, column: str) -> None:
        self.paths, self.separator, self.column = paths, separator, column

    def __iter__(self) -> Iterator[str]:
        for path in self.paths:
            if path.suffix.lower() == ".jsonl":
                rows = ((name, row) for name, row in json_rows(path) if row is not None)
                texts = (_text_of(row, self.column, name) for name, row in rows)
            elif path.suffix.lower() in (".csv", ".parquet"):
                texts = (_text_of(row, self.column, str(path)) for row in table_rows(path))
            else:
                texts = (text.strip() for text in _separated(path, self.separator))
            yield from filter(None, texts)


def _text_of(row: Any, column: str, name: str) -> str | None:
    """The text of a row; ``None`` if it is blank."""
    text = row.get(column, ...) if isinstance(row, dict) else ...
    if not (text is None or isinstance(text, str)):
        raise ValueError(f"there is no text in column {column!r} of {name}; got {row!r:.200}")
    return text if text and not text.isspace() else None


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The value on each line of a .jsonl file, after the line's name; empty lines are skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            name = f"line {number:,} of {path}"
            try:
                if text := line.decode("utf-8-sig").strip():
                    yield name, json.loads(text)
            except ValueError as error:
                raise ValueError(f"expected JSON in UTF-8 in {name}; {error}") from error


def table_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .csv or .parquet file; only some of them are in memory at a time."""
    try:
        if path.suffix.lower() == ".csv":
            csv.field_size_limit(2**31 - 1)  # a document may be longer than the module's default
            with path.open(newline="", encoding="utf-8-sig") as lines:
                reader = csv.DictReader(lines, restkey=_MORE)
                named = [*filter(None, reader.fieldnames or ())]
                if len({*named}) < len(named):  # the last would replace the others
                    raise ValueError(f"two columns have the same name, of {', '.join(named)}")
                for row in reader:
                    if _MORE in row:
                        raise ValueError(f"line {reader.line_num:,} has {_MORE}; got {row!r:.200}")
                    yield row
        else:
            from pyarrow import parquet  # slow import

            for table in parquet.ParquetFile(path).iter_batches(1000):
                yield from table.to_pylist()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason}") from error
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}: {error}") from error


def _separated(path: Path, separator: str) -> Iterator[str]:
    """The texts between separators; only one of them is in memory at a time."""
    parts, tail = [], ""
    try:
        with path.open(encoding="utf-8-sig") as file:  # it may begin with a byte-order mark
            while read := file.read(2**13):
                parts.append(read)
                if separator in tail + read:
                    *texts, rest = "".join(parts).split(separator)
                    yield from texts
                    parts = [rest]
                tail = (tail + read)[-len(separator) :]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason}") from error
    yield "".join(parts)


PIECE = 2**18
"""Least number of characters of a document to tokenise at a time, at about 160 bytes each."""
_WORDS_END = re.compile(r"(?<=[^\W_])\s")


def separator(tokenizer: Any) -> int | None:
    """The token that documents begin with: BOS, or EOS without BOS; None if there is neither."""
    bos = tokenizer.bos_token_id
    return getattr(tokenizer, "eos_token_id", None) if bos is None else bos


def pieces_of_tokens(text: str, tokenizer: Any) -> Iterator[list[int]]:
    """The tokens of a document, of which a long one is tokenised piece by piece.

    A piece ends between a letter or digit and white space, where nearly all tokenizers begin a
    token; Llama 3's and Qwen's join other signs with the line breaks after them. (Those that put a
    space before every text, as Llama 2's, put one before each piece.)
    """
    start = 0
    while start < len(text):
        end = _WORDS_END.search(text, start + PIECE)
        stop = len(text) if end is None else end.start()
        yield tokenizer(text[start:stop], add_special_tokens=False, verbose=False)["input_ids"]
        start = stop
