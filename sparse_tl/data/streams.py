"""Token streams: batches are a function of the step, so that runs can be resumed."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import lru_cache, partial
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl.calls.arguments import AtLeastOne, Count, Seed, checked
from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.documents import DocumentRows, Documents, separator
from sparse_tl.data.windows import (
    Boundaries,
    Place,
    TooShortError,
    as_tensor,
    check_window,
    cut,
    window_rows,
)


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
        if not 0 < batch_size <= len(examples):
            raise ValueError(
                f"expected a batch size in 1..{len(examples)}, the number of examples; "
                f"got {batch_size}"
            )
        self.examples = examples
        self.batch_size = batch_size
        self.seed = seed
        self.accumulate = accumulate
        # A batch may span two epochs.
        self._order = lru_cache(maxsize=2)(partial(shuffled, len(examples), seed))

    def batch(self, step: Count) -> TokenBatch:
        """Rows ``step * batch_size ...`` of the infinite sequence of shuffled epochs."""
        n = len(self.examples)
        first = step * self.batch_size
        indices = range(first, first + self.batch_size)
        rows = torch.stack([self._order(index // n)[index % n] for index in indices])
        return self.examples.select(rows)


def shuffled(size: int, seed: int, number: int) -> Int[Tensor, " row"]:
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
            raise ValueError("expected at least one stream; got none")
        self.streams = dict(streams)
        self.accumulate = max(getattr(stream, "accumulate", 1) for stream in streams.values())

    def batch(self, step: Count) -> TokenBatch:
        """The batches of all streams at a step, concatenated."""
        return TokenBatch.joined([stream.batch(step) for stream in self.streams.values()])

    def state(self) -> dict[str, Any]:
        """The states of the resumable streams, by group."""
        return {name: stream.state() for name, stream in self._resumable().items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from these states."""
        for name, stream in self._resumable().items():
            stream.load_state(state[name])

    def _resumable(self) -> dict[str, ResumableStream]:
        return {
            name: stream
            for name, stream in self.streams.items()
            if isinstance(stream, ResumableStream)
        }


Block = Int[Tensor, "window pos"]


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
        self._order = lru_cache(maxsize=4)(shuffled)  # a batch may span blocks
        self._identity = self.documents.identity()
        self._places = {0: Place()}  # known places of blocks
        self._blocks: dict[int, Block] = {}  # blocks in use
        self._current = 0  # the first block of the last batch
        # The thread ends with the stream, or, when the process ends, after the current block.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self._ahead: tuple[int, Future[tuple[Block, Place]]] | None = None
        self._reading: tuple[Place, Iterator[tuple[array[int], Place]]] | None = None

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
                "expected the text files as they were when the run was interrupted; their names, "
                f"sizes in bytes and times of change were {state['text']}, and now are "
                f"{self._identity}. Restore them, or start over."
            )
        self.n_windows = state["n_windows"] or self.n_windows
        self._places[state["block"]] = Place(**state["place"])

    def _settings(self) -> dict[str, Any]:
        left_out = [self.left_out.start, self.left_out.stop, self.left_out.step]
        return {
            "window": self.window,
            "shuffle": self.shuffle,
            "left_out": left_out,
            "boundaries": self.boundaries,
            "separator": separator(self.tokenizer),
        }

    def _row(self, index: int) -> tuple[int, Int[Tensor, " pos"]]:
        """The block and the tokens of a row of the infinite sequence."""
        while True:
            epoch, within = divmod(index, self.n_windows or index + 1)
            block, row = divmod(within, self.shuffle)
            windows = self._block(block)
            if windows is not None and row < len(windows):
                number = epoch * -(-(self.n_windows or 0) // self.shuffle) + block
                return block, windows[self._order(len(windows), self.seed, number)[row]]
            # The text ends before this row; now that its length is known, compute the row again.

    def _block(self, block: int) -> Block | None:
        """The windows of a block in the order of the text; ``None`` if the text ends before it."""
        if block not in self._blocks:
            known = max(other for other in self._places if other <= block)
            for other in range(known, block + 1):
                windows = self._fetched(other)
                if windows is None:
                    return None
                if other == block:
                    self._blocks[block] = windows
        return self._blocks[block]

    def _fetched(self, block: int) -> Block | None:
        """A block whose place is known; the thread continues with the next one."""
        if self._ended(block):
            return None
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != block:
            ahead = self._submitted(block)
        windows, after = ahead[1].result()
        if len(windows) < self.shuffle:
            self.n_windows = block * self.shuffle + len(windows)
        else:
            self._places.setdefault(block + 1, after)
        following = 0 if self._ended(block + 1) else block + 1
        if following not in (block, *self._blocks):
            self._ahead = self._submitted(following)
        return windows if len(windows) else None

    def _ended(self, block: int) -> bool:
        """Whether the text is known to end before a block."""
        return self.n_windows is not None and block * self.shuffle >= self.n_windows

    def _submitted(self, block: int) -> tuple[int, Future[tuple[Block, Place]]]:
        return block, self._thread.submit(self._read, self._places[block])

    def _read(self, place: Place) -> tuple[Block, Place]:
        """The windows of the block at a place, and the next block's place; runs in the thread."""
        reading, self._reading = self._reading, None
        if reading is not None and reading[0] == place:
            windows = reading[1]
        else:
            settings = self.tokenizer, self.window, self.boundaries
            windows = _cut(self.documents, *settings, self.left_out, place)
        tokens, after = array("q"), place
        for row, row_end in islice(windows, self.shuffle):
            tokens.extend(row)
            after = row_end
        self._reading = after, windows
        return as_tensor(tokens, self.window), after


def _cut(
    documents: Documents,
    tokenizer: Any,
    window: int,
    boundaries: Boundaries,
    left_out: range,
    place: Place,
) -> Iterator[tuple[array[int], Place]]:
    """The windows from a place on that are not left out, each with the place after it."""
    where = "the start"

    def opened() -> Iterator[tuple[Any, Iterable[str]]]:
        nonlocal where
        for document, parts in documents.since(place.document):
            where = documents.where(document)
            yield document, parts

    after, n_yielded = place, 0
    try:
        for row, after in cut(opened(), tokenizer, window, boundaries, place):
            if after.window - 1 not in left_out:
                n_yielded += 1
                yield row, after
    except TooShortError:
        raise
    except Exception as error:  # tokenizer, dataset and network raise different types
        raise ValueError(f"reading the text stopped at or after {where}: {error}") from error
    if place.window == n_yielded == 0:
        raise ValueError(f"expected more windows of text than are left out; got {after.window}")
