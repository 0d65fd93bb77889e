"""A stream of token windows from text of any size, tokenised in the background."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, Count, Seed, checked
from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.documents import DocumentRows, Documents
from sparse_tl.data.text import separator
from sparse_tl.data.windows import (
    Boundaries,
    Place,
    TooShortError,
    as_tensor,
    check_window,
    cut,
    window_rows,
)

Block = Int[Tensor, "window pos"]


@checked
class TextStream:
    """Batches of windows from text that need not fit into memory; a `TokenStream`.

    The windows are those of `text_rows`. Each *block* of `shuffle` consecutive windows is
    shuffled by itself, and the text starts over when it ends, shuffled differently; no window is
    ever dropped. A batch may span blocks and epochs. With a block as long as the text, batches are
    those of a `ShuffledStream`.

    While a block is in use, a thread tokenises the next one; no others are in memory. Any step's
    batch can be asked for: this takes tokenising the text up to there the first time, and a single
    block once its place is known, from then or by `load_state`.

    All processes of a run have the same batches, and each takes its own rows of them. Where a
    window begins depends on all text before it, so each has to tokenise all the text.

    Args:
        documents: what `read_documents` returns, or any iterable of strings that starts anew each
            time.
        tokenizer: a Hugging Face tokenizer.
        window: tokens per window.
        batch_size: windows per step.
        seed: random seed for the shuffling.
        shuffle: number of windows that are shuffled together; 1 keeps the order of the text.
        left_out: numbers of windows of the text that are left out.
        boundaries: what happens where one document follows another, as in `text_rows`.
        accumulate: number of pieces in which a step's rows are run, to save memory.

    Raises:
        ValueError: a size is too small, there is no tokenizer, or the documents can be read only
            once, as those of a generator.
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
        left_out: range = range(0),
        boundaries: Boundaries = "predict",
        accumulate: AtLeastOne = 1,
    ) -> None:
        check_window(tokenizer, window)
        self.documents = documents if isinstance(documents, Documents) else DocumentRows(documents)
        # Its own: padding and truncation of other calls are settings of the object.
        self.tokenizer = copy.deepcopy(tokenizer)
        self.window = window
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.left_out = left_out
        self.boundaries: Boundaries = boundaries
        self.accumulate = accumulate
        self.n_windows: int | None = None
        """Number of windows of the text that are not left out; None before its end was reached."""
        self._identity = self.documents.identity()
        self._places = {0: Place()}  # of blocks, as far as they are known
        self._blocks: dict[int, Block] = {}  # in use
        self._current = 0  # the first block of the last batch
        # It ends when the stream is gone; at the end of the process, with the block at hand.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self._ahead: tuple[int, Future[tuple[Block, Place]]] | None = None
        self._reading: tuple[Place, Iterator[tuple[array[int], Place]]] | None = None

    def batch(self, step: Count) -> TokenBatch:
        """Rows ``step * batch_size ...`` of the infinite sequence of shuffled epochs.

        Raises:
            ValueError: the text cannot be read or tokenised, and where; or fills no window.
        """
        first = step * self.batch_size
        found = [self._row(place) for place in range(first, first + self.batch_size)]
        used = [block for block, _ in found]
        self._current = used[0]
        self._blocks = {block: self._blocks[block] for block in dict.fromkeys(used)}
        windows = torch.stack([row for _, row in found])
        return window_rows(windows, self.tokenizer, self.boundaries)

    def state(self) -> dict[str, Any]:
        """Where in the text the last batch begins, as JSON, the same in all processes."""
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
            ValueError: the state is of another stream, or a file has changed since.
        """
        for name, here in self._settings().items():
            if state.get(name) != here:
                raise ValueError(
                    f"expected a stream with the {name} of the saved one ({state.get(name)}); "
                    f"got {here}"
                )
        if state["text"] != self._identity:
            raise ValueError(
                "expected the text files as they were when the run was interrupted; their names, "
                f"sizes in bytes and times of change were {state['text']}, and are "
                f"{self._identity}. Restore them, or start anew."
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

    def _row(self, place: int) -> tuple[int, Int[Tensor, " pos"]]:
        """The block and the tokens of a row of the infinite sequence."""
        while True:
            epoch, within = divmod(place, self.n_windows or place + 1)
            block, row = divmod(within, self.shuffle)
            windows = self._block(block)
            if windows is not None and row < len(windows):
                number = epoch * -(-(self.n_windows or 0) // self.shuffle) + block
                return block, windows[_order(self.seed, number, len(windows))[row]]
            # The text has ended before; now that its length is known, the row is another.

    def _block(self, block: int) -> Block | None:
        """The windows of a block in the order of the text; ``None`` if it ends before."""
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
        """A block whose place is known; the thread goes on with the next."""
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
        """The windows of the block at a place, and the place of the next block; in the thread."""
        reading, self._reading = self._reading, None
        if reading is not None and reading[0] == place:
            windows = reading[1]
        else:
            how = self.tokenizer, self.window, self.boundaries
            windows = _cut(self.documents, *how, self.left_out, place)
        tokens, after = array("q"), place
        for row, behind in islice(windows, self.shuffle):
            tokens.extend(row)
            after = behind
        self._reading = after, windows
        return as_tensor(tokens, self.window), after


@lru_cache(maxsize=4)  # a batch may span blocks
def _order(seed: int, number: int, size: int) -> Int[Tensor, " window"]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    return torch.randperm(size, generator=generator)


def _cut(
    documents: Documents,
    tokenizer: Any,
    window: int,
    boundaries: Boundaries,
    left_out: range,
    place: Place,
) -> Iterator[tuple[array[int], Place]]:
    """The windows from a place on that are not left out, each with the place behind it."""
    where = "the start"

    def opened() -> Iterator[tuple[Any, Iterable[str]]]:
        nonlocal where
        for document, parts in documents.since(place.document):
            where = documents.where(document)
            yield document, parts

    behind, n_given = place, 0
    try:
        for row, behind in cut(opened(), tokenizer, window, boundaries, place):
            if behind.window - 1 not in left_out:
                n_given += 1
                yield row, behind
    except TooShortError:
        raise
    except Exception as error:  # of a tokenizer, a dataset or the network: of any type
        raise ValueError(f"reading the text stopped at or after {where}: {error}") from error
    if place.window == n_given == 0:
        raise ValueError(f"expected more windows of text than are left out; got {behind.window}")
