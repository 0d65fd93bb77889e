"""Documents as tokens, piece by piece, as far as they are needed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

PIECE = 2**17
"""Characters of a long document that are tokenised at a time, at some 160 bytes each."""
CONTEXT = 2**9
"""Characters before and behind a piece that are tokenised with it."""


def separator(tokenizer: Any) -> int | None:
    """The token that documents begin with: BOS, or EOS if there is no BOS; None if neither."""
    bos = tokenizer.bos_token_id
    return getattr(tokenizer, "eos_token_id", None) if bos is None else bos


def tokenised(
    documents: Iterable[tuple[Any, Iterable[str]]], tokenizer: Any, start: int = 0
) -> Iterator[tuple[tuple[Any, int], list[int]]]:
    """The tokens of documents, each after its `separator`, piece by piece.

    Args:
        documents: the place of each and the parts of its text, as of `Documents.since`.
        tokenizer: a Hugging Face tokenizer.
        start: the character of the first document at which a piece starts, to start from there.

    Yields:
        The document's place with the character at which the piece starts, and the tokens.
    """
    first = separator(tokenizer)
    before = [] if first is None else [first]
    for place, parts in documents:
        for character, tokens in _pieces(_Text(parts, start), tokenizer, start):
            yield (place, character), tokens if character else before + tokens
        start = 0


class _Text:
    """A document that is read as far as it is asked for; what lies far back is let go."""

    def __init__(self, parts: Iterable[str], start: int) -> None:
        self._parts, self._held, self._first = iter(parts), "", 0
        self.start = start
        """Nothing is asked for that lies more than `PIECE` before this character."""

    def reaches(self, end: int) -> bool:
        """Whether the document has that many characters."""
        while self._first + len(self._held) < end:
            part = next(self._parts, None)
            if part is None:
                return False
            gone = min(len(self._held), max(0, self.start - PIECE - self._first))
            self._held, self._first = self._held[gone:] + part, self._first + gone
        return True

    def __getitem__(self, span: slice) -> str:
        self.reaches(span.stop)
        return self._held[span.start - self._first : span.stop - self._first]


def _pieces(text: _Text, tokenizer: Any, start: int) -> Iterator[tuple[int, list[int]]]:
    """The tokens of a document, with the character at which each piece starts.

    A piece of a long document is tokenised with some text before and behind it, and ends where both
    a word and a token end, so that its tokens are those of the whole document.

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
        found = tokenizer(read, return_offsets_mapping=True, **options)
        spans = found["offset_mapping"]
        n_before = sum(begin + first < start for first, _ in spans)
        if n_before and begin + spans[n_before - 1][1] > start:
            # The piece before ended at another token.
            if begin == 0 or context >= PIECE:
                raise ValueError(
                    f"expected a tokenizer whose tokens depend on the text around them; those at "
                    f"character {start:,} depend on more. Give shorter documents."
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
        yield start, found["input_ids"][n_before:n_kept]
        text.start = start = stop
        piece, context = PIECE, CONTEXT


def _last_word(text: str, spans: list[tuple[int, int]], end: int) -> tuple[int, int]:
    """How many tokens there are up to the last end of a word and a token, and where that is."""
    for index in range(len(spans) - 1, 0, -1):
        place = spans[index - 1][1]
        between = text[place - 1 : place + 1]
        if place <= end and place <= spans[index][0] and between.rstrip() == between[:1]:
            return index, place
    return 0, 0
