"""Text as token windows: documents are read, tokenised and cut as far as they are needed."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from jaxtyping import Int
from torch import Tensor

BLOCK = 2**20
"""Characters that are read from a file at a time, while documents are shorter."""
PIECE = 2**17
"""Characters of a long document that are tokenised at a time, at some 160 bytes each."""
CONTEXT = 2**9
"""Characters before and behind a piece that are tokenised with it."""


def read_documents(
    source: str | Path,
    *,
    separator: str = "<|endoftext|>",
    split: str = "train",
    column: str = "text",
) -> Iterator[str]:
    """Yield non-empty documents of a text file, or of a Hugging Face dataset (streamed).

    Args:
        source: path, or dataset name, with its configuration after a colon if needed.
        separator: string between documents in a text file.
        split: split of the dataset.
        column: dataset column that holds the text.

    Raises:
        ValueError: the file, dataset or column does not exist, or a file is not UTF-8 text.
    """
    path = Path(source)
    if path.is_file():
        try:
            with path.open(encoding="utf-8") as file:
                yield from (part.strip() for part in _parts(file, separator) if part.strip())
        except UnicodeDecodeError as error:
            raise ValueError(f"expected UTF-8 text in {path}; {error}") from error
        return
    for row in dataset_rows(source, split):
        if column not in row:
            raise ValueError(
                f"expected a column {column!r} in dataset {source}; it has {sorted(row)}"
            )
        if row[column] and not row[column].isspace():
            yield row[column]


def _parts(file: TextIO, separator: str) -> Iterator[str]:
    """The parts of a file between separators, read block by block."""
    begun = ""
    # As much again as there is of an unfinished part: a long one is searched a few times only.
    while block := file.read(max(BLOCK, len(begun))):
        *parts, begun = (begun + block).split(separator)
        yield from parts
    yield begun


def dataset_rows(source: str | Path, split: str) -> Iterator[dict[str, Any]]:
    """Stream the rows of a Hugging Face dataset, named as in `read_documents`.

    Raises:
        ValueError: the dataset does not exist, or there is no network.
    """
    from datasets import load_dataset
    from huggingface_hub import constants, get_session

    name, _, configuration = str(source).partition(":")
    try:
        if not Path(name).exists():
            # Check once: without a network, `load_dataset` retries for half a minute.
            get_session().head(constants.ENDPOINT, timeout=10)
        rows = load_dataset(name, configuration or None, split=split, streaming=True)
    except Exception as error:  # hub, network and parser raise different types
        raise ValueError(
            f"expected a file or the name of a dataset; {source} is no file, and loading it as a "
            f"dataset failed: {error}"
        ) from error
    yield from rows


def token_windows(
    documents: Iterable[str], tokenizer: Any, window: int, *, limit: int | None = None
) -> Int[Tensor, "window pos"]:
    """Concatenate documents, each after the tokenizer's BOS token, and cut them into full windows.

    Tokens that do not fill a window are dropped; nothing is padded. Documents are taken only as far
    as the windows need them.

    Args:
        documents: texts.
        tokenizer: a Hugging Face tokenizer.
        window: tokens per window.
        limit: maximum number of windows.

    Raises:
        ValueError: the text is shorter than one window, or there is no tokenizer.
    """
    if tokenizer is None:
        raise ValueError("expected a model with a tokenizer to read text; this one has none")
    if window < 2:
        raise ValueError(f"expected a window of at least 2 tokens; got {window}")
    tokens = array("q")  # eight bytes each, where a list of numbers takes 36
    needed = sys.maxsize if limit is None else limit * window
    for document in documents:
        if tokenizer.bos_token_id is not None:
            tokens.append(tokenizer.bos_token_id)
        for piece in _tokenised(document, tokenizer):
            tokens.extend(piece)
            if len(tokens) >= needed:
                break
        if len(tokens) >= needed:
            break
    n_windows = min(len(tokens), needed) // window
    if n_windows == 0:
        raise ValueError(
            f"expected text of at least one window of {window} tokens; got {len(tokens)} tokens. "
            "Give more text or a smaller window."
        )
    return torch.frombuffer(tokens, dtype=torch.int64)[: n_windows * window].view(n_windows, window)


def _tokenised(document: str, tokenizer: Any) -> Iterator[list[int]]:
    """The tokens of a document; those of a long one piece by piece.

    A piece is tokenised with some text before and behind it, and ends where both a word and a token
    end, so that its tokens are those of the whole document.

    Raises:
        ValueError: the pieces do not fit together.
    """
    options = {"add_special_tokens": False, "verbose": False}
    if len(document) <= 2 * PIECE or not getattr(tokenizer, "is_fast", False):
        yield tokenizer(document, **options)["input_ids"]
        return
    start, piece, context = 0, PIECE, CONTEXT
    while start < len(document):
        begin, end = max(0, start - context), start + piece + CONTEXT
        found = tokenizer(document[begin:end], return_offsets_mapping=True, **options)
        spans = [(begin + first, begin + last) for first, last in found["offset_mapping"]]
        n_before = sum(first < start for first, _ in spans)
        if n_before and spans[n_before - 1][1] > start:  # the piece before ended at another token
            if begin == 0:
                raise ValueError(
                    f"expected a tokenizer whose tokens depend on the text around them; those at "
                    f"character {start:,} depend on more. Give shorter documents."
                )
            context *= 2
            continue
        n_kept, stop = len(spans), len(document)
        if end < len(document):
            n_kept, stop = _last_word(document, spans, start + piece)
            if stop <= start:  # one long word
                piece *= 2
                continue
        yield found["input_ids"][n_before:n_kept]
        start, piece, context = stop, PIECE, CONTEXT


def _last_word(text: str, spans: list[tuple[int, int]], end: int) -> tuple[int, int]:
    """How many tokens there are up to the last end of a word and a token, and where that is."""
    for index in range(len(spans) - 1, 0, -1):
        place = spans[index - 1][1]
        between = text[place - 1 : place + 1]
        if place <= end and place <= spans[index][0] and between.rstrip() == between[:1]:
            return index, place
    return 0, 0
