"""Token streams: batches are a function of the step, so that runs can be resumed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl.calls.arguments import AtLeastOne, Count, Seed, checked
from sparse_tl.data.batches import TokenBatch


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
