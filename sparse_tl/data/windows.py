"""Windows of tokens, cut from documents as they are needed, with separators between documents.

Every document begins with a *separator*: the tokenizer's BOS token, or its EOS token if, like
Qwen's, it has no BOS. `Boundaries` says what windows and losses do where one document follows
another.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl.calls.arguments import AtLeastOne, checked
from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.documents import Documents, separator, tokenised
from sparse_tl.data.prompts import check_tokenizer

Boundaries = Literal["predict", "skip", "split"]
"""What happens where one document follows another.

"predict": windows run on, and the end of a document predicts the next one's separator. "skip":
windows run on, and nothing predicts that separator. "split": no window holds two documents, so
neither loss nor attention crosses a boundary; a document's last window is padded on the right.
"""
PADDING = -1
"""Placeholder for tokens after a document's end."""
UNPREDICTED = -2
"""Placeholder for a separator that has no loss. A document may hold the same token as text."""


class TooShortError(ValueError):
    """The text fills no window."""


@dataclass(frozen=True)
class Place:
    """Where a window begins.

    Args:
        document: place of the document; None for the first.
        character: character of the document at which the tokenised piece starts.
        token: number of the piece's tokens that belong to earlier windows.
        window: number of earlier windows.
    """

    document: Any = None
    character: int = 0
    token: int = 0
    window: int = 0


@checked
def token_windows(
    documents: Iterable[str], tokenizer: Any, window: AtLeastOne, *, limit: AtLeastOne | None = None
) -> Int[Tensor, "window pos"]:
    """Concatenate documents, each after a separator, and cut them into full windows.

    The separator is the tokenizer's BOS token, or its EOS token if it has no BOS. Tokens that do
    not fill a window are dropped; nothing is padded. Documents are read only as far as the windows
    need them. All windows are held in memory; use `TextStream` for text that does not fit.
    `text_rows` can keep loss and attention within documents.

    Args:
        documents: texts.
        tokenizer: a Hugging Face tokenizer.
        window: tokens per window.
        limit: maximum number of windows.

    Raises:
        ValueError: the text is shorter than one window, there is no tokenizer, or documents meet
            within a window and the tokenizer has no token to separate them.
    """
    return cut_windows(documents, tokenizer, window, limit, "predict")


@checked
def text_rows(
    documents: Iterable[str],
    tokenizer: Any,
    window: AtLeastOne,
    *,
    limit: AtLeastOne | None = None,
    boundaries: Boundaries = "predict",
) -> TokenBatch:
    """Windows of text as rows for language modelling, with a choice at document boundaries.

    Args:
        documents: texts.
        tokenizer: a Hugging Face tokenizer.
        window: tokens per window.
        limit: maximum number of windows.
        boundaries: what happens where one document follows another. "predict": windows run on, as
            in `token_windows`, and the end of a document predicts the separator before the next.
            "skip": the same, without that loss. "split": every window holds one document, so
            neither loss nor attention crosses a boundary; a document's last window is padded on the
            right, or left out if it has a single token, which predicts nothing.

    Raises:
        ValueError: the text is shorter than one window, or with "split" no document has two tokens;
            otherwise as in `token_windows`.
    """
    windows = cut_windows(documents, tokenizer, window, limit, boundaries)
    return window_rows(windows, tokenizer, boundaries)


def cut_windows(
    documents: Iterable[str],
    tokenizer: Any,
    window: int,
    limit: int | None,
    boundaries: Boundaries,
) -> Int[Tensor, "window pos"]:
    """The windows of `text_rows`, with placeholders that `window_rows` replaces."""
    check_window(tokenizer, window)
    if isinstance(documents, str):
        raise TypeError("documents are several texts, not one; `read_documents` reads a file")
    if isinstance(documents, Documents):
        parts = documents.since(None)
    else:
        parts = enumerate((_text(document),) for document in documents)
    tokens = array("q")  # eight bytes each, where a list of numbers takes 36
    for row, _ in islice(cut(parts, tokenizer, window, boundaries), limit):
        tokens.extend(row)
    return as_tensor(tokens, window)


def window_rows(
    windows: Int[Tensor, "window pos"], tokenizer: Any, boundaries: Boundaries
) -> TokenBatch:
    """Windows of `cut_windows` as rows for language modelling, with losses as `boundaries` says."""
    if boundaries == "split":
        real = windows != PADDING
        rows = TokenBatch.next_token(windows.clamp(min=0))
        follows = real.roll(-1, dims=1) & rows.loss_mask
        return replace(rows, loss_mask=follows, attention_mask=real.long())
    if boundaries == "skip":
        begins = windows == UNPREDICTED
        rows = TokenBatch.next_token(windows.masked_fill(begins, separator(tokenizer) or 0))
        return replace(rows, loss_mask=rows.loss_mask & ~begins.roll(-1, dims=1))
    return TokenBatch.next_token(windows)


def as_tensor(tokens: array[int], window: int) -> Int[Tensor, "window pos"]:
    """A tensor of windows from their concatenated tokens."""
    if not tokens:
        return torch.empty(0, window, dtype=torch.int64)
    return torch.frombuffer(tokens, dtype=torch.int64).view(-1, window)


def cut(
    documents: Iterable[tuple[Any, Iterable[str]]],
    tokenizer: Any,
    window: int,
    boundaries: Boundaries,
    place: Place = Place(),
) -> Iterator[tuple[array[int], Place]]:
    """The windows of documents from a place on, each with the place after it.

    Args:
        documents: as from `Documents.since` that place.
        tokenizer: a Hugging Face tokenizer.
        window: tokens per window.
        boundaries: what happens where one document follows another.
        place: where the first window begins.

    Raises:
        TooShortError: the text fills no window.
        ValueError: documents meet within a window, and the tokenizer has no token to separate them.
    """
    split, separated = boundaries == "split", separator(tokenizer) is not None
    tokens, number, skipped = array("q"), place.window, place.token
    before = place  # where the last piece ends

    def ended() -> Iterator[tuple[array[int], Place]]:
        """The last window of a document."""
        nonlocal number
        if split and len(tokens) > 1:
            number += 1
            yield (
                tokens + array("q", [PADDING] * (window - len(tokens))),
                replace(before, window=number),
            )

    for (document, character), piece in tokenised(documents, tokenizer, place.character):
        if character == 0 and tokens:
            yield from ended()
            if split:
                del tokens[:]
            elif not separated:
                raise ValueError(
                    "expected a tokenizer with a BOS or EOS token, to separate documents that meet "
                    "within a window; this one has neither. Set one, or keep documents apart "
                    'with boundaries="split"'
                )
        if character == 0 and separated and boundaries == "skip":
            piece[0] = UNPREDICTED
        tokens.extend(piece[skipped:])
        skipped = begin = 0
        while len(tokens) - begin >= window:
            row = tokens[begin : begin + window]
            begin += window
            number += 1
            yield row, Place(document, character, len(piece) - (len(tokens) - begin), number)
        del tokens[:begin]
        before = Place(document, character, len(piece))
    yield from ended()
    if number == 0:
        raise TooShortError(
            "expected a document of at least 2 tokens, including its separator; got none"
            if split
            else f"expected text of at least one window of {window} tokens; got {len(tokens)} "
            "tokens. Give more text or a smaller window."
        )


def check_window(tokenizer: Any, window: int) -> None:
    """Check that text can be cut into such windows.

    Raises:
        ValueError: there is no tokenizer, or a window would predict nothing.
    """
    check_tokenizer(tokenizer)
    if window < 2:
        raise ValueError(f"expected a window of at least 2 tokens; got {window}")


def _text(document: Any) -> str:
    """The document, which has to be a text."""
    if not isinstance(document, str):
        raise TypeError(f"expected documents that are texts; got {document!r:.80}")
    return document
