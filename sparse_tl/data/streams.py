"""Token streams: batches are a function of the step, so that runs can be resumed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl.data.batches import TokenBatch


@runtime_checkable
class TokenStream(Protocol):
    """A source of training batches by step; the same step always gives the same batch.

    If it has an attribute ``accumulate``, post-training splits a batch into that many pieces.
    """

    def batch(self, step: int) -> TokenBatch: ...


class ShuffledStream:
    """Batches from a fixed set of examples, reshuffled every epoch; no row is ever dropped.

    Args:
        examples: all rows.
        batch_size: rows per step.
        seed: random seed for the shuffling.
        accumulate: number of pieces in which a step's rows are run, to save memory.
    """

    def __init__(
        self, examples: TokenBatch, batch_size: int, seed: int = 0, *, accumulate: int = 1
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
        self._order = lru_cache(maxsize=2)(self._shuffled)  # a batch may span two epochs

    def batch(self, step: int) -> TokenBatch:
        """Rows ``step * batch_size ...`` of the infinite sequence of shuffled epochs."""
        n = len(self.examples)
        first = step * self.batch_size
        places = range(first, first + self.batch_size)
        rows = torch.stack([self._order(place // n)[place % n] for place in places])
        return self.examples.select(rows)

    def _shuffled(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(len(self.examples), generator=generator)


class IterableStream:
    """A stream from an iterable without random access, such as a data loader.

    Args:
        batches: an iterable that restarts with the same batches whenever it is iterated.
    """

    def __init__(self, batches: Iterable[TokenBatch]) -> None:
        self.batches = batches
        self._iterator: Iterator[TokenBatch] = iter(batches)
        self._next = 0

    def batch(self, step: int) -> TokenBatch:
        """The batch of a step; going back restarts the iterable.

        Raises:
            ValueError: the iterable ends before this step.
        """
        if step < self._next:
            again = iter(self.batches)
            if again is self._iterator:
                raise ValueError(
                    f"expected an iterable that starts anew, to go back to step {step} from "
                    f"{self._next}; got an iterator ({type(self.batches).__name__}), which cannot"
                )
            self._iterator, self._next = again, 0
        try:
            while self._next < step:
                next(self._iterator)
                self._next += 1
            batch = next(self._iterator)
        except StopIteration:
            raise ValueError(
                f"expected a batch for step {step}; the stream ended after {self._next}"
            ) from None
        self._next += 1
        return batch


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
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"expected UTF-8 text in {path}; {error}") from error
        yield from (part.strip() for part in text.split(separator) if part.strip())
        return
    for row in dataset_rows(source, split):
        if column not in row:
            raise ValueError(
                f"expected a column {column!r} in dataset {source}; it has {sorted(row)}"
            )
        if row[column] and not row[column].isspace():
            yield row[column]


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

    Tokens that do not fill a window are dropped; nothing is padded.

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
    tokens: list[int] = []
    needed = sys.maxsize if limit is None else limit * window
    for document in documents:
        if tokenizer.bos_token_id is not None:
            tokens.append(tokenizer.bos_token_id)
        tokens.extend(tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"])
        if len(tokens) >= needed:
            break
    n_windows = min(len(tokens), needed) // window
    if n_windows == 0:
        raise ValueError(
            f"expected text of at least one window of {window} tokens; got {len(tokens)} tokens. "
            "Give more text or a smaller window."
        )
    return torch.tensor(tokens[: n_windows * window]).reshape(n_windows, window)
