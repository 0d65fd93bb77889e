"""Windows of text, and token streams, whose batches are a function of the step.

Windows are cut from documents as they are needed. Every document begins with a *separator*: the
tokenizer's BOS token, or its EOS token if, like Qwen's, it has no BOS. `Boundaries` says what
windows and losses do where one document follows another.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from itertools import count, islice
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, AtLeastTwo, Count, Seed, checked
from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.documents import Documents, pieces_of_tokens, separator
from sparse_tl.data.prompts import check_tokenizer

Boundaries = Literal["predict", "skip", "split"]
"""What happens where one document follows another, as `text_rows` says."""
Windows = Int[Tensor, "window pos"]
PADDING = -1
"""Placeholder for tokens after a document's end."""
UNPREDICTED = -2
"""Placeholder for a separator that has no loss. A document may hold the same token as text."""


# ---- windows -------------------------------------------------------------------------------------


@checked
def token_windows(
    documents: Iterable[str], tokenizer: Any, window: AtLeastTwo, *, limit: AtLeastOne | None = None
) -> Windows:
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
    window: AtLeastTwo,
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
) -> Windows:
    """The windows of `text_rows`, with placeholders that `window_rows` replaces."""
    check_tokenizer(tokenizer)
    if isinstance(documents, str):
        raise TypeError("documents are several texts, not one; `read_documents` reads a file")
    return _stacked(islice(_cut(documents, tokenizer, window, boundaries), limit), window)


def window_rows(windows: Windows, tokenizer: Any, boundaries: Boundaries) -> TokenBatch:
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


def _cut(
    documents: Iterable[str], tokenizer: Any, window: int, boundaries: Boundaries
) -> Iterator[array[int]]:
    """The windows of documents.

    Raises:
        ValueError: the text fills no window, or documents meet within a window, and the tokenizer
            has no token to separate them.
    """
    split, first = boundaries == "split", separator(tokenizer)
    begin = [] if first is None else [UNPREDICTED if boundaries == "skip" else first]
    tokens, number = array("i"), 0
    for document in documents:
        if tokens and first is None:
            raise ValueError(
                "expected a tokenizer with a BOS or EOS token, to separate documents that meet "
                "within a window; this one has neither. Set one, or keep documents apart "
                'with boundaries="split"'
            )
        tokens.extend(begin)
        for piece in pieces_of_tokens(document, tokenizer):
            tokens.extend(piece)
            n_full = len(tokens) // window
            for at in range(n_full):
                yield tokens[at * window : (at + 1) * window]
            del tokens[: n_full * window]
            number += n_full
        if split:
            if len(tokens) > 1:
                number += 1
                yield tokens + array("i", [PADDING] * (window - len(tokens)))
            del tokens[:]
    if number == 0:
        raise ValueError(
            "expected a document of at least 2 tokens, including its separator; got none"
            if split
            else f"expected text of at least one window of {window} tokens; got {len(tokens)} "
            "tokens. Give more text or a smaller window."
        )


def _stacked(windows: Iterable[array[int]], window: int) -> Windows:
    """Windows as a tensor."""
    tokens = array("i")  # four bytes each, where a list of numbers takes 36
    for row in windows:
        tokens.extend(row)
    if not tokens:
        return torch.empty(0, window, dtype=torch.int64)
    return torch.frombuffer(tokens, dtype=torch.int32).view(-1, window).long()


# ---- streams -------------------------------------------------------------------------------------


@runtime_checkable
class TokenStream(Protocol):
    """A source of training batches by step; the same step always gives the same batch.

    If the stream has an attribute ``accumulate``, post-training splits a batch into that many
    pieces.
    """

    def batch(self, step: int) -> TokenBatch: ...


@checked
class ShuffledStream:
    """Batches from a fixed set of examples, reshuffled every epoch; no row is ever dropped.

    Args:
        examples: all rows.
        batch_size: rows per step.
        seed: random seed for the shuffling.
        accumulate: number of pieces that a step's rows are split into, to save memory.
    """

    def __init__(
        self,
        examples: TokenBatch,
        batch_size: AtLeastOne,
        seed: Seed = 0,
        *,
        accumulate: AtLeastOne = 1,
    ) -> None:
        if batch_size > len(examples):
            raise ValueError(f"{batch_size} rows per step are more than the {len(examples)} rows")
        self.examples = examples
        self.batch_size = batch_size
        self.accumulate = accumulate
        # A batch may span two epochs.
        self._order = lru_cache(maxsize=2)(partial(_shuffled, len(examples), seed))

    def batch(self, step: Count) -> TokenBatch:
        """Rows ``step * batch_size ...`` of the infinite sequence of shuffled epochs."""
        n = len(self.examples)
        first = step * self.batch_size
        indices = range(first, first + self.batch_size)
        rows = torch.stack([self._order(index // n)[index % n] for index in indices])
        return self.examples.select(rows)


def _shuffled(size: int, seed: int, number: int) -> Int[Tensor, " row"]:
    """The order of the rows of an epoch or block, given its number."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    return torch.randperm(size, generator=generator)


@checked
class MixedStream:
    """Several streams in one: every batch holds a batch of each stream, as its own group.

    A stream's batch size is its share of the rows. Shorter rows are padded on the right.

    Args:
        streams: streams by the name of their group.
    """

    def __init__(self, streams: Mapping[str, TokenStream]) -> None:
        if not streams:
            raise ValueError("there is no stream to mix")
        self.streams = dict(streams)
        self.accumulate = max(getattr(stream, "accumulate", 1) for stream in streams.values())

    def batch(self, step: Count) -> TokenBatch:
        """The batches of all streams at a step, concatenated."""
        return TokenBatch.joined([stream.batch(step) for stream in self.streams.values()])


@checked
class TextStream:
    """Batches of windows from text that need not fit into memory; a `TokenStream`.

    The windows are those of `text_rows`. Each *block* of `shuffle` consecutive windows is shuffled
    separately. When the text ends, it starts over, shuffled differently; no window is ever dropped.
    A batch may span blocks and epochs. With a block as long as the text, the batches are those of a
    `ShuffledStream`.

    While a block is in use, a thread tokenises the next one; only two blocks and one document are
    in memory. The batch of any step is available, but steps are meant to be taken in turn: all text
    up to a later step is tokenised first, and for an earlier step the text is read from its start.

    All processes of a run get the same batches, and each takes its own rows of them. Where a window
    begins depends on all text before it, so each process has to tokenise all the text.

    Args:
        documents: the result of `read_documents`, or any iterable of strings that can be restarted.
        tokenizer: a Hugging Face tokenizer.
        window: tokens per window.
        batch_size: windows per step.
        seed: random seed for the shuffling.
        shuffle: number of windows that are shuffled together; 1 keeps the order of the text.
        left_out: indices of the windows to leave out.
        boundaries: what happens where one document follows another, as in `text_rows`.
        accumulate: number of pieces that a step's rows are split into, to save memory.

    Raises:
        ValueError: a size is too small, there is no tokenizer, or the documents can be read only
            once, like those of a generator.
    """

    def __init__(
        self,
        documents: Iterable[str],
        tokenizer: Any,
        window: AtLeastTwo,
        batch_size: AtLeastOne,
        seed: Seed = 0,
        *,
        shuffle: AtLeastOne = 1024,
        left_out: Any = range(0),
        boundaries: Boundaries = "predict",
        accumulate: AtLeastOne = 1,
    ) -> None:
        check_tokenizer(tokenizer)
        self.documents = Documents(documents)
        # A copy, since other calls may set padding and truncation on the object.
        self.tokenizer = copy.deepcopy(tokenizer)
        self.window = window
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.left_out = left_out
        self.boundaries: Boundaries = boundaries
        self.accumulate = accumulate
        self.n_windows: int | None = None
        """Number of windows that are not left out; None until the end of the text is reached."""
        self._begin()
        # The thread ends with the stream, or, when the process ends, after the current block.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenise")

    def batch(self, step: Count) -> TokenBatch:
        """Rows ``step * batch_size ...`` of the infinite sequence of shuffled epochs.

        Raises:
            ValueError: the text cannot be read, or fills no window.
        """
        first, end = step * self.batch_size, (step + 1) * self.batch_size
        if first < self._n_given:
            self._begin()
        try:
            rows = [*islice(self._rows, first - self._n_given, end - self._n_given)]
        except BaseException:  # which ends iterators
            self._begin()
            raise
        self._n_given = end
        return window_rows(torch.stack(rows), self.tokenizer, self.boundaries)

    def _begin(self) -> None:
        self._rows, self._n_given = self._shuffled_rows(), 0

    def _shuffled_rows(self) -> Iterator[Int[Tensor, " pos"]]:
        """The rows of the infinite sequence."""
        blocks = self._blocks()
        ahead = self._thread.submit(next, blocks)
        for number in count():
            block = ahead.result()
            ahead = self._thread.submit(next, blocks)
            yield from block[_shuffled(len(block), self.seed, number)]

    def _blocks(self) -> Iterator[Windows]:
        """The blocks of the text, from the start again when it ends; runs in the thread."""
        while True:
            windows = enumerate(_cut(self.documents, self.tokenizer, self.window, self.boundaries))
            kept, n_windows = (row for number, row in windows if number not in self.left_out), 0
            while len(block := _stacked(islice(kept, self.shuffle), self.window)):
                n_windows += len(block)
                yield block
            if not n_windows:
                raise ValueError("all windows of the text are left out")
            self.n_windows = n_windows
