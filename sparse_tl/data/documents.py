"""Documents of text files and datasets, which can be read from any position, repeatedly."""

from __future__ import annotations

import codecs
import io
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Any

from sparse_tl.arguments import checked

BLOCK = 2**20
"""Bytes to read from a text file at a time."""


class Documents:
    """Texts in a fixed order: an iterable of strings that can be restarted, from any place.

    A *place* is a JSON value that identifies a document. The text comes in parts, so that a
    document of many gigabytes is never entirely in memory.
    """

    def __iter__(self) -> Iterator[str]:
        return ("".join(parts) for _, parts in self.since(None))

    def since(self, place: Any) -> Iterator[tuple[Any, Iterable[str]]]:
        """The documents from a place on (``None``: the first): the place and text parts of each."""
        raise NotImplementedError

    def where(self, place: Any) -> str:
        """A place in words, for messages."""
        raise NotImplementedError

    def identity(self) -> Any:
        """A JSON value that changes if the documents do, as far as one can tell without reading."""
        raise NotImplementedError


@checked
def read_documents(
    source: str | Path | Iterable[Any],
    *,
    separator: str = "<|endoftext|>",
    split: str = "train",
    column: str = "text",
) -> Documents:
    """The non-empty documents of text files, or of a Hugging Face dataset (streamed).

    Args:
        source: a path or a list of paths; the name of a dataset, with its configuration after a
            colon if needed; or a dataset or any other iterable of rows that can be restarted.
        separator: string between documents in a text file.
        split: split of the dataset.
        column: the dataset column, or the key in a ``.jsonl`` file's rows, that holds the text.

    Raises:
        ValueError: the file, dataset or column does not exist, or a file is not UTF-8 text.
    """
    if isinstance(source, (str, Path)):
        if not Path(source).is_file():
            return DocumentRows(dataset_rows(source, split), column, f"dataset {source}")
        source = [source]
    if not isinstance(source, (list, tuple)) or not all(isinstance(x, (str, Path)) for x in source):
        return DocumentRows(source, column, f"the {type(source).__name__}")
    paths = [Path(path) for path in source]
    for path in paths:
        if not path.is_file():  # say so now, not when its turn comes
            raise ValueError(f"{path} is not a file")
    return _Files(paths, separator, column)


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


class DocumentRows(Documents):
    """Documents that are rows of a dataset, or strings; a place is a row's number.

    A place is reached by skipping the rows before it. The states of streamed Hugging Face datasets
    (``state_dict``) are not used, because they lose the rows of a shuffle buffer.

    The rows are dictionaries with a text in `column`, or strings; messages call them `name`.
    """

    def __init__(self, rows: Iterable[Any], column: str = "text", name: str = "the list") -> None:
        if isinstance(rows, (str, bytes)) or iter(rows) is rows:
            raise ValueError(
                "expected documents that can be read again from the start, such as a list, a "
                f"dataset, or those of `read_documents`; got a {type(rows).__name__}"
            )
        self.rows, self.column, self.name = rows, column, name

    def since(self, place: Any) -> Iterator[tuple[Any, Iterable[str]]]:
        for number, row in enumerate(_one_at_a_time(self.rows)):
            if number >= (place or 0):
                text = row if isinstance(row, str) else _text_of(row, self.column, self.name)
                if text is not None:
                    yield number, (text,)

    def where(self, place: Any) -> str:
        return f"row {place:,} of {self.name}"

    def identity(self) -> Any:
        return None


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


class _Files(Documents):
    """Documents of text files: the texts between separators, or the rows of .jsonl files."""

    def __init__(self, paths: list[Path], separator: str, column: str) -> None:
        self.paths, self.separator, self.column = paths, separator, column

    def since(self, place: Any) -> Iterator[tuple[Any, Iterable[str]]]:
        first, byte = (0, 0) if place is None else place
        for number, path in list(enumerate(self.paths))[first:]:
            if path.suffix == ".jsonl":
                parts = _lines(path, byte, self.column)
            else:
                parts = _separated(path, byte, self.separator)
            for begin, document in groupby(parts, key=itemgetter(0)):
                yield [number, begin], (text for _, text in document)
            byte = 0

    def where(self, place: Any) -> str:
        number, byte = place
        return f"the document at byte {byte:,} of {self.paths[number]}"

    def identity(self) -> Any:
        stats = ((path.name, path.stat()) for path in self.paths)
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _text_of(row: Any, column: str, name: str) -> str | None:
    """The text of a row; ``None`` if it is blank."""
    text = row.get(column, ...) if isinstance(row, dict) else ...
    if not (text is None or isinstance(text, str)):
        raise ValueError(f"there is no text in column {column!r} of {name}; got {row!r:.200}")
    return text if text and not text.isspace() else None


def json_rows(path: Path, byte: int = 0) -> Iterator[tuple[int, str, Any]]:
    """The value on each line of a .jsonl file, after its first byte and its place in words."""
    with path.open("rb") as file:
        file.seek(byte)
        for line in file:
            name = f"the line at byte {byte:,} of {path}"
            try:
                if text := line.decode("utf-8-sig").strip():
                    yield byte, name, json.loads(text)
            except ValueError as error:
                raise ValueError(f"expected JSON in UTF-8 in {name}; {error}") from error
            byte += len(line)


def _lines(path: Path, byte: int, column: str) -> Iterator[tuple[int, str]]:
    """The documents of a .jsonl file from a byte on, with the byte at which each begins."""
    for begin, name, row in json_rows(path, byte):
        text = None if row is None else _text_of(row, column, name)
        if text is not None:
            yield begin, text


def _separated(path: Path, byte: int, separator: str) -> Iterator[tuple[int, str]]:
    """The text between separators from a byte on, in parts, with the byte at which each begins.

    White space at either end of a document is left out, and so are documents of nothing else.
    """
    mark = separator.encode()
    with path.open("rb") as file:
        file.seek(byte)
        document, held = _Document(path, byte), b""
        while block := file.read(BLOCK):
            *ended, held = (held + block).split(mark)
            for last in ended:
                yield from document.add(last, final=True)
                document = _Document(path, document.end + len(mark))
            complete = max(0, len(held) - len(mark) + 1)  # the rest may begin a separator
            yield from document.add(held[:complete])
            held = held[complete:]
        yield from document.add(held, final=True)


class _Document:
    """A document that is decoded part by part, with the byte at which it begins."""

    def __init__(self, path: Path, byte: int) -> None:
        self.path, self.begin, self.end = path, byte, byte
        encoding = "utf-8" if byte else "utf-8-sig"  # a file may begin with a byte-order mark
        self._decoder = io.IncrementalNewlineDecoder(
            codecs.getincrementaldecoder(encoding)(), translate=True
        )
        self._begun, self._space = False, ""

    def add(self, data: bytes, *, final: bool = False) -> Iterator[tuple[int, str]]:
        self.end += len(data)
        try:
            text = self._decoder.decode(data, final)
        except UnicodeDecodeError as error:
            byte = self.end - len(error.object) + error.start
            raise ValueError(f"{self.path} is not UTF-8 text at byte {byte:,}: {error}") from error
        text = self._space + text if self._begun else text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._begun = True
            yield self.begin, kept


PIECE = 2**17
"""Characters of a long document to tokenise at a time, at about 160 bytes each."""
CONTEXT = 2**9
"""Characters before and after a piece that are tokenised with it."""


def separator(tokenizer: Any) -> int | None:
    """The token that documents begin with: BOS, or EOS without BOS; None if there is neither."""
    bos = tokenizer.bos_token_id
    return getattr(tokenizer, "eos_token_id", None) if bos is None else bos


def tokenised(
    documents: Iterable[tuple[Any, Iterable[str]]], tokenizer: Any, start: int = 0
) -> Iterator[tuple[tuple[Any, int], list[int]]]:
    """The tokens of documents from `Documents.since`, each after its `separator`, piece by piece.

    Before the tokens of a piece: the document's place, and the character at which the piece starts.
    In the first document, a piece must start at the character `start`.
    """
    first = separator(tokenizer)
    before = [] if first is None else [first]
    for place, parts in documents:
        for character, tokens in _pieces(_Text(parts, start), tokenizer, start):
            yield (place, character), tokens if character else before + tokens
        start = 0


class _Text:
    """A document that is read as far as requested; text far back is released."""

    def __init__(self, parts: Iterable[str], start: int) -> None:
        self._parts, self._held, self._first = iter(parts), "", 0
        self.start = start
        """Text more than `PIECE` characters before this one is no longer needed."""

    def reaches(self, end: int) -> bool:
        """Whether the document has that many characters."""
        while self._first + len(self._held) < end:
            part = next(self._parts, None)
            if part is None:
                return False
            n_released = min(len(self._held), max(0, self.start - PIECE - self._first))
            self._held, self._first = self._held[n_released:] + part, self._first + n_released
        return True

    def __getitem__(self, span: slice) -> str:
        self.reaches(span.stop)
        return self._held[span.start - self._first : span.stop - self._first]


def _pieces(text: _Text, tokenizer: Any, start: int) -> Iterator[tuple[int, list[int]]]:
    """The tokens of a document, with the character at which each piece starts.

    A piece of a long document is tokenised with some text before and after it, and ends where both
    a word and a token end, so that its tokens are those of the full document.
    """
    options = {"add_special_tokens": False, "verbose": False}
    fast = getattr(tokenizer, "is_fast", False)
    if start == 0 and not (fast and text.reaches(2 * PIECE + 1)):
        yield 0, tokenizer(text[0 : sys.maxsize], **options)["input_ids"]
        return
    piece, context = PIECE, CONTEXT
    while text.reaches(start + 1):
        begin, end = max(0, start - context), start + piece + CONTEXT
        read = text[begin:end]
        encoded = tokenizer(read, return_offsets_mapping=True, **options)
        spans = encoded["offset_mapping"]
        n_before = sum(begin + first < start for first, _ in spans)
        if n_before and begin + spans[n_before - 1][1] > start:
            # With this context, no token ends where the previous piece ended.
            if begin == 0 or context >= PIECE:
                raise ValueError(
                    f"expected a tokenizer whose tokens depend only on the text around them; those "
                    f"at character {start:,} depend on more. Give shorter documents."
                )
            context = min(2 * context, PIECE)
            continue
        n_kept, stop = len(spans), end
        if text.reaches(end + 1):
            n_kept, stop = _last_word(read, spans, start + piece - begin)
            stop += begin
            if stop <= start:  # one long word
                piece *= 2
                continue
        yield start, encoded["input_ids"][n_before:n_kept]
        text.start = start = stop
        piece, context = PIECE, CONTEXT


def _last_word(text: str, spans: list[tuple[int, int]], end: int) -> tuple[int, int]:
    """The last common end of a word and a token: how many tokens precede it, and where it is."""
    for index in range(len(spans) - 1, 0, -1):
        stop = spans[index - 1][1]
        between = text[stop - 1 : stop + 1]
        if stop <= end and stop <= spans[index][0] and between.rstrip() == between[:1]:
            return index, stop
    return 0, 0
