"""Token streams: the batch of a step is a function of the step, so that a run can be resumed."""

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
    """Anything that gives the training batch of a step; asked again, it gives the same batch.

    Where it has an attribute ``accumulate``, post-training runs a batch in so many pieces.
    """

    def batch(self, step: int) -> TokenBatch: ...


class ShuffledStream:
    """Batches drawn from a fixed set of examples, reshuffled every epoch; no row is ever dropped.

    Args:
        examples: all rows.
        batch_size: rows per step.
        seed: of the shuffling.
        accumulate: pieces that a step's rows are run in, one after the other, to save memory.
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
        """Rows ``step * batch_size ...`` of the endless sequence of shuffled epochs."""
        n = len(self.examples)
        first = step * self.batch_size
        places = range(first, first + self.batch_size)
        rows = torch.stack([self._order(place // n)[place % n] for place in places])
        return self.examples.select(rows)

    def _shuffled(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(len(self.examples), generator=generator)


class IterableStream:
    """A stream from something that can only be iterated from its start, such as a data loader.

    Args:
        batches: an iterable that starts anew, with the same batches, whenever it is iterated.
    """

    def __init__(self, batches: Iterable[TokenBatch]) -> None:
        self.batches = batches
        self._iterator: Iterator[TokenBatch] = iter(batches)
        self._next = 0

    def batch(self, step: int) -> TokenBatch:
        """The step's batch; going back starts the iterable anew.

        Raises:
            ValueError: the iterable ended before this step.
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
    """Documents of a text file, or of a Hugging Face dataset by name (streamed); no empty ones.

    Args:
        source: a path, or a dataset's name, with its configuration after a colon if it has one.
        separator: what stands between documents in a text file.
        split: of the dataset.
        column: of the dataset that holds the text.

    Raises:
        ValueError: no such file or dataset, no such column, or a file that is not UTF-8 text.
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
    """The rows of a Hugging Face dataset, streamed; it is named as for `read_documents`.

    Raises:
        ValueError: no such dataset, or no network.
    """
    from datasets import load_dataset
    from huggingface_hub import constants, get_session

    name, _, configuration = str(source).partition(":")
    try:
        if not Path(name).exists():
            # Asked once: without a network `load_dataset` asks again and again, for half a minute.
            get_session().head(constants.ENDPOINT, timeout=10)
        rows = load_dataset(name, configuration or None, split=split, streaming=True)
    except Exception as error:  # the hub, the network and the parser each raise their own kinds
        raise ValueError(
            f"expected a file or the name of a dataset; {source} is no file, and loading it as a "
            f"dataset failed: {error}"
        ) from error
    yield from rows


def token_windows(
    documents: Iterable[str], tokenizer: Any, window: int, *, limit: int | None = None
) -> Int[Tensor, "window pos"]:
    """Documents joined, each behind the tokenizer's BOS token, and cut into full windows.

    The rest that does not fill a window is left out; nothing is padded.

    Args:
        documents: texts.
        tokenizer: a Hugging Face tokenizer.
        window: tokens per window.
        limit: stop after so many windows.

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
