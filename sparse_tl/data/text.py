"""Text as token windows: documents are tokenised and cut as far as they are needed."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.data.documents import Documents
from sparse_tl.wording import shown

PIECE = 2**17
"""Characters of a long document that are tokenised at a time, at some 160 bytes each."""
CONTEXT = 2**9
"""Characters before and behind a piece that are tokenised with it."""


@checked
def token_windows(
    documents: Iterable[str], tokenizer: Any, window: AtLeastOne, *, limit: AtLeastOne | None = None
) -> Int[Tensor, "window pos"]:
    """Concatenate documents, each after the tokenizer's BOS token, and cut them into full windows.

    Tokens that do not fill a window are dropped; nothing is padded. Documents are taken only as far
    as the windows need them. All windows are in memory: `TextStream` is for more text than that.

    Args:
        documents: texts.
        tokenizer: a Hugging Face tokenizer.
        window: tokens per window.
        limit: maximum number of windows.

    Raises:
        ValueError: the text is shorter than one window, or there is no tokenizer.
    """
    check_window(tokenizer, window)
    if isinstance(documents, Documents):
        parts = documents.since(None)
    else:
        parts = enumerate((_text(document),) for document in documents)
    tokens = array("q")  # eight bytes each, where a list of numbers takes 36
    needed = sys.maxsize if limit is None else limit * window
    for _, piece in tokenised(parts, tokenizer):
        tokens.extend(piece)
        if len(tokens) >= needed:
            break
    n_windows = min(len(tokens), needed) // window
    if n_windows == 0:
        raise too_short(window, len(tokens))
    return torch.frombuffer(tokens, dtype=torch.int64)[: n_windows * window].view(n_windows, window)


def _text(document: Any) -> str:
    """The document, if it is a text."""
    if not isinstance(document, str):
        raise TypeError(f"expected documents that are texts; got {shown(document)}")
    return document


def check_window(tokenizer: Any, window: int) -> None:
    """Check what cutting text into windows needs.

    Raises:
        ValueError: there is no tokenizer, or a window would predict nothing.
    """
    if tokenizer is None:
        raise ValueError("expected a model with a tokenizer to read text; this one has none")
    if window < 2:
        raise ValueError(f"expected a window of at least 2 tokens; got {window}")


def too_short(window: int, n_tokens: int) -> ValueError:
    """What is said of a text that does not fill one window."""
    return ValueError(
        f"expected text of at least one window of {window} tokens; got {n_tokens} tokens. "
        "Give more text or a smaller window."
    )


def tokenised(
    documents: Iterable[tuple[Any, Iterable[str]]], tokenizer: Any, start: int = 0
) -> Iterator[tuple[tuple[Any, int], list[int]]]:
    """The tokens of documents, each after the tokenizer's BOS token, piece by piece.

    Args:
        documents: the place of each and the parts of its text, as of `Documents.since`.
        tokenizer: a Hugging Face tokenizer.
        start: the character of the first document at which a piece starts, to start from there.

    Yields:
        The document's place with the character at which the piece starts, and the tokens.
    """
    before = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
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
