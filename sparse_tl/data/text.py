"""Tokens of documents, made piece by piece, as they are needed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

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
    """The tokens of documents, each after its `separator`, piece by piece.

    Args:
        documents: the place and the text parts of each document, as from `Documents.since`.
        tokenizer: a Hugging Face tokenizer.
        start: character of the first document to start from, at which a piece must start.

    Yields:
        The document's place and the character at which the piece starts, and the tokens.
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

    Raises:
        ValueError: the pieces do not fit together.
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
