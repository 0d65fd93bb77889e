"""What sources write minus its patch, and what destinations read without it.

The part of a pass under gates on circuit edges that every read shares,

    input_v = residual_v - sum_u (1 - gate[u, v]) change_u,

at all tokens, or span by span, each with gates of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.data import Spans


class SourceChanges:
    """Writes of the separated sources minus the patch, in the graph's order.

    Without gradients, rows go into one preallocated buffer, which is read as a whole. With
    gradients, they are read part by part, since a read keeps what it reads for its backward pass.

    Args:
        n_rows: number of separated sources.
        spans: the span of every token; None where all tokens share the gates.
        keep_all: whether gradients are needed.
    """

    def __init__(self, n_rows: int, spans: Spans | None = None, *, keep_all: bool = False) -> None:
        self._n_rows, self._keep_all = n_rows, keep_all
        self._buffer: Tensor | None = None
        self._parts: list[Tensor] = []
        self._filled = 0
        self._at: Tensor | None = None
        self._places: list[Tensor | slice] = [slice(None)]
        if spans is not None:
            self._at = spans.at
            order = spans.at.flatten().argsort(stable=True)
            counts = spans.at.flatten().bincount(minlength=len(spans.names))
            self._places = [*order.split(counts.tolist())]
            self._back = order.argsort()

    def append(self, part: Float[Tensor, "some rows pos d_model"]) -> None:
        """Add the writes of the next sources."""
        if self._keep_all:
            self._parts.append(part)
            return
        if self._buffer is None:
            self._buffer = part.new_empty(self._n_rows, *part.shape[1:])
        self._buffer[self._filled : self._filled + len(part)] = part
        self._filled += len(part)

    def taken_from(
        self,
        residual: Float[Tensor, "rows pos d_model"],
        weights: Float[Tensor, "stack span some n"],
    ) -> Float[Tensor, "stack n flat"]:
        """What n destinations read, each under its own closed edges."""
        n_stack, n_spans, count, _ = weights.shape
        self._check(residual, n_stack)
        tokens = residual.reshape(n_stack, 1, -1, residual.shape[-1])
        found = []
        for span in range(n_spans):
            places = self._places[span]
            reads = tokens[:, :, places].flatten(2)
            for rows, part in self._first(count):
                share = weights[:, span, rows]
                changes = part.view(len(part), n_stack, *tokens.shape[2:])[:, :, places].flatten(2)
                if n_stack == 1:
                    reads = torch.addmm(reads[0], share[0].T, changes[:, 0], alpha=-1)[None]
                else:
                    reads = torch.baddbmm(reads, share.mT, changes.transpose(0, 1), alpha=-1)
            found.append(reads)
        if self._at is None:
            return found[0]
        joined = torch.cat([reads.unflatten(2, (-1, tokens.shape[-1])) for reads in found], dim=2)
        return joined[:, :, self._back].flatten(2)

    def taken_from_few(
        self,
        residual: Float[Tensor, "rows pos d_model"],
        weights: Float[Tensor, "stack span some n"],
        stack: Int[Tensor, " part"],
        destination: Int[Tensor, " part"],
    ) -> Float[Tensor, "part batch pos d_model"]:
        """What some destinations read under some of the settings."""
        n_stack = len(weights)
        self._check(residual, n_stack)
        reads = residual.unflatten(0, (n_stack, -1))[stack]
        ((_, first),) = self._first(weights.shape[2])
        changes = first.unflatten(1, (n_stack, -1))
        chosen = weights[stack, :, :, destination]
        part, row = (chosen != 0).any(dim=1).nonzero().unbind(dim=1)
        share = chosen[part, :, row]
        share = share[:, :, None] if self._at is None else share[:, self._at]
        change = changes[row, stack[part]] * share[..., None]
        return reads.index_add(0, part, change, alpha=-1)

    def _check(self, residual: Float[Tensor, "rows pos d_model"], n_stack: int) -> None:
        rows, n_columns, _ = residual.shape
        if self._at is not None and self._at.shape != (rows // n_stack, n_columns):
            raise ValueError(
                f"expected to run the prompts that the spans of the gates are of, in the shape "
                f"{tuple(self._at.shape)}; got {(rows // n_stack, n_columns)}"
            )

    def _first(self, count: int) -> Iterator[tuple[slice, Float[Tensor, "some rows pos d_model"]]]:
        """The rows of the first sources, some at a time; these must have been appended."""
        start = 0
        for part in self._parts if self._keep_all else [self._buffer]:
            if start < count:
                assert part is not None
                stop = min(start + len(part), count)
                yield slice(start, stop), part[: stop - start]
                start = stop
