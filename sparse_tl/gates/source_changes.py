"""What sources write minus their patch, collected in the course of one forward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

_FEW = 8
"""Rows in use are copied where there are that many times as many: a small copy, much unread."""


class SourceChanges:
    """Writes of sources minus the patch, in the graph's order: separately, and as a sum.

    Without gradients, separate writes go into one preallocated buffer, of which the rows in use are
    read. With gradients, they are read part by part, since a read keeps what it reads for its
    backward pass.

    Args:
        n_rows: number of sources that are separated.
        keep_all: whether gradients are needed.
    """

    def __init__(self, n_rows: int, *, keep_all: bool) -> None:
        self._n_rows, self._keep_all = n_rows, keep_all
        self._buffer: Tensor | None = None
        self._parts: list[Tensor] = []
        self._filled = 0
        self._sum: Tensor | None = None
        self._waiting = deque[tuple[int, Tensor]]()

    def append(self, part: Float[Tensor, "some rows pos d_model"]) -> None:
        """Add the writes of the next separated sources."""
        if self._keep_all:
            self._parts.append(part)
            return
        if self._buffer is None:
            self._buffer = part.new_empty(self._n_rows, *part.shape[1:])
        self._buffer[self._filled : self._filled + len(part)] = part
        self._filled += len(part)

    def parts(
        self, used: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], Float[Tensor, "some rows pos d_model"]]]:
        """Rows in use, some at a time; these must have been appended. More may be returned.

        Args:
            used: the rows, increasing.
        """
        count = used[-1] + 1 if used else 0
        if not self._keep_all and _FEW * len(used) <= count:
            if used:
                assert self._buffer is not None
                yield used, self._buffer[used]
            return
        start = 0
        for part in self._parts if self._keep_all else [self._buffer]:
            if start < count:
                assert part is not None
                stop = min(start + len(part), count)
                yield range(start, stop), part[: stop - start]
                start = stop

    def add(self, source: int, change: Float[Tensor, "rows pos d_model"]) -> None:
        """Add writes to the sum: those of a source, or of several from this one on."""
        self._waiting.append((source, change))

    def sum_before(self, source: int) -> Float[Tensor, "rows pos d_model"] | None:
        """The sum over all sources before this one, which does not decrease between calls."""
        while self._waiting and self._waiting[0][0] < source:
            _, change = self._waiting.popleft()
            # Many small terms: half precision would lose them one by one.
            change = change.to(torch.promote_types(change.dtype, torch.float32))
            self._sum = change if self._sum is None else self._sum + change
        return self._sum
