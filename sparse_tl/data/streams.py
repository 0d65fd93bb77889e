"""Windows of text, and token streams, whose batches are a function of the step.

Windows are cut from documents as they are needed. Every document begins with a *separator*: the
tokenizer's BOS token, or its EOS token if, like Qwen's, it has no BOS. `Boundaries` says what
windows and losses do where one document follows another.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, Count, Seed, checked
from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.documents import DocumentRows, Documents, separator, tokenised
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
    documents: Iterable[str], tokenizer: Any, window: AtLeastOne, *, limit: AtLeastOne | None = None
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
) -> Windows:
    """The windows of `text_rows`, with placeholders that `window_rows` replaces."""
    check_window(tokenizer, window)
    if isinstance(documents, str):
        raise TypeError("documents are several texts, not one; `read_documents` reads a file")
    if isinstance(documents, Documents):
        parts = documents.since(None)
    else:
        parts = enumerate((document,) for document in documents)
    return _stacked(islice(_cut(parts, tokenizer, window, boundaries), limit), window)[0]


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


def check_window(tokenizer: Any, window: int) -> None:
    """Raise a ValueError if there is no tokenizer, or a window would predict nothing."""
    check_tokenizer(tokenizer)
    if window < 2:
        raise ValueError("a window of fewer than 2 tokens predicts nothing")


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


def _cut(
    documents: Iterable[tuple[Any, Iterable[str]]],
    tokenizer: Any,
    window: int,
    boundaries: Boundaries,
    place: Place = Place(),
) -> Iterator[tuple[array[int], Place]]:
    """The windows of documents from a place on, each with the place after it.

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
            padding = array("q", [PADDING] * (window - len(tokens)))
            yield tokens + padding, replace(before, window=number)

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


def _stacked(
    windows: Iterable[tuple[array[int], Place]], window: int, place: Place = Place()
) -> tuple[Windows, Place]:
    """Windows as a tensor, and the place after them."""
    tokens = array("q")  # eight bytes each, where a list of numbers takes 36
    for row, after in windows:
        tokens.extend(row)
        place = after
    if not tokens:
        return torch.empty(0, window, dtype=torch.int64), place
    return torch.frombuffer(tokens, dtype=torch.int64).view(-1, window), place


# ---- streams -------------------------------------------------------------------------------------


@runtime_checkable
class TokenStream(Protocol):
    """A source of training batches by step; the same step always gives the same batch.

    If the stream has an attribute ``accumulate``, post-training splits a batch into that many
    pieces.
    """

    def batch(self, step: int) -> TokenBatch: ...


@runtime_checkable
class ResumableStream(TokenStream, Protocol):
    """A stream that resumes from a state, a JSON value that checkpoints contain."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


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

    def state(self) -> dict[str, Any]:
        """The states of the resumable streams, by group."""
        streams = self.streams.items()
        return {name: s.state() for name, s in streams if isinstance(s, ResumableStream)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from these states."""
        for name, stream in self.streams.items():
            if isinstance(stream, ResumableStream):
                stream.load_state(state[name])


@checked
class TextStream:
    """Batches of windows from text that need not fit into memory; a `TokenStream`.

    The windows are those of `text_rows`. Each *block* of `shuffle` consecutive windows is shuffled
    separately. When the text ends, it starts over, shuffled differently; no window is ever dropped.
    A batch may span blocks and epochs. With a block as long as the text, the batches are those of a
    `ShuffledStream`.

    While a block is in use, a thread tokenises the next one; no other blocks are in memory. The
    batch of any step is available. The first time, the text up to there has to be tokenised; later,
    or after `load_state`, the block's place is known, and a single block suffices.

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
        window: AtLeastOne,
        batch_size: AtLeastOne,
        seed: Seed = 0,
        *,
        shuffle: AtLeastOne = 1024,
        left_out: Any = range(0),
        boundaries: Boundaries = "predict",
        accumulate: AtLeastOne = 1,
    ) -> None:
        check_window(tokenizer, window)
        self.documents = documents if isinstance(documents, Documents) else DocumentRows(documents)
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
        self._order = lru_cache(maxsize=4)(_shuffled)  # a batch may span blocks
        self._identity = self.documents.identity()
        self._places = {0: Place()}  # known places of blocks
        self._blocks: dict[int, Windows] = {}  # blocks in use
        self._current = 0  # the first block of the last batch
        # The thread ends with the stream, or, when the process ends, after the current block.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self._ahead: tuple[int, Future[tuple[Windows, Place]] | None] = (-1, None)
        self._reading: tuple[Place | None, Iterator[tuple[array[int], Place]]] = None, iter(())

    def batch(self, step: Count) -> TokenBatch:
        """Rows ``step * batch_size ...`` of the infinite sequence of shuffled epochs.

        Raises:
            ValueError: the text cannot be read or tokenised, or fills no window; the message says
                where.
        """
        first = step * self.batch_size
        rows = [self._row(index) for index in range(first, first + self.batch_size)]
        used = [block for block, _ in rows]
        self._current = used[0]
        self._blocks = {block: self._blocks[block] for block in dict.fromkeys(used)}
        windows = torch.stack([row for _, row in rows])
        return window_rows(windows, self.tokenizer, self.boundaries)

    def state(self) -> dict[str, Any]:
        """The place in the text where the last batch begins, as JSON, the same in all processes."""
        return {
            **self._settings(),
            "text": self._identity,
            "n_windows": self.n_windows,
            "block": self._current,
            "place": asdict(self._places[self._current]),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume at a saved `state`, without tokenising the text before it.

        Raises:
            ValueError: the state belongs to another stream, or a file has changed since.
        """
        for name, here in self._settings().items():
            if state.get(name) != here:
                raise ValueError(
                    f"expected a stream with the {name} of the saved one "
                    f"({state.get(name)!s:.200}); got {here}"
                )
        if state["text"] != self._identity:
            raise ValueError(
                "expected the text files as they were (name, bytes, time of change): "
                f"{state['text']}; now they are {self._identity}. Restore them, or start over."
            )
        self.n_windows = state["n_windows"] or self.n_windows
        self._places[state["block"]] = Place(**state["place"])

    def _settings(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "shuffle": self.shuffle,
            "left_out": [self.left_out.start, self.left_out.stop, self.left_out.step],
            "boundaries": self.boundaries,
            "separator": separator(self.tokenizer),
        }

    def _row(self, index: int) -> tuple[int, Int[Tensor, " pos"]]:
        """The block and the tokens of a row of the infinite sequence."""
        while True:
            epoch, within = divmod(index, self.n_windows or index + 1)
            block, row = divmod(within, self.shuffle)
            windows = self._block(block)
            if row < len(windows):
                number = epoch * -(-(self.n_windows or 0) // self.shuffle) + block
                return block, windows[self._order(len(windows), self.seed, number)[row]]
            # The text ends before this row; now that its length is known, compute the row again.

    def _block(self, block: int) -> Windows:
        """The windows of a block in the order of the text; none if the text ends before it.

        All blocks from the last known place on are read; the thread continues with the next one.
        """
        if block in self._blocks:
            return self._blocks[block]
        windows = torch.empty(0, self.window)
        for number in range(max(known for known in self._places if known <= block), block + 1):
            if self._ended(number):
                return torch.empty(0, self.window)
            ahead, reading = self._ahead
            if reading is None or ahead != number:
                reading = self._thread.submit(self._read, self._places[number])
            self._ahead = -1, None
            windows, after = reading.result()
            if len(windows) < self.shuffle:
                self.n_windows = number * self.shuffle + len(windows)
            else:
                self._places.setdefault(number + 1, after)
            following = 0 if self._ended(number + 1) else number + 1
            if following not in (number, *self._blocks):
                self._ahead = following, self._thread.submit(self._read, self._places[following])
        if len(windows):
            self._blocks[block] = windows
        return windows

    def _ended(self, block: int) -> bool:
        """Whether the text is known to end before a block."""
        return self.n_windows is not None and block * self.shuffle >= self.n_windows

    def _read(self, place: Place) -> tuple[Windows, Place]:
        """The windows of the block at a place, and the next block's place; runs in the thread."""
        reached, windows = self._reading
        if reached != place:
            windows = self._windows(place)
        self._reading = None, iter(())
        block, after = _stacked(islice(windows, self.shuffle), self.window, place)
        self._reading = after, windows
        return block, after

    def _windows(self, place: Place) -> Iterator[tuple[array[int], Place]]:
        """The windows from a place on that are not left out, each with the place after it."""
        where = "the start"

        def opened() -> Iterator[tuple[Any, Iterable[str]]]:
            nonlocal where
            for document, parts in self.documents.since(place.document):
                where = self.documents.where(document)
                yield document, parts

        after, n_yielded = place, 0
        try:
            for row, after in _cut(opened(), self.tokenizer, self.window, self.boundaries, place):
                if after.window - 1 not in self.left_out:
                    n_yielded += 1
                    yield row, after
        except TooShortError:
            raise
        except Exception as error:  # tokenizer, dataset and network raise different types
            raise ValueError(f"reading the text stopped at or after {where}: {error}") from error
        if place.window == n_yielded == 0:
            raise ValueError(f"expected more windows of text than are left out; got {after.window}")
