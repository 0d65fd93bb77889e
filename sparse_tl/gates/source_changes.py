"""The patch of sources minus what they write, and what destinations read with it.

All reads of a pass under gates on circuit edges share this:

    input_v = residual_v + sum_u (1 - gate[u, v]) change_u,

with the same gates at all tokens, or with gates per span.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.data import Spans
from sparse_tl.gates.edge_weights import EdgeWeights

_FEW = 8
"""Copy the rows in use if at least this many times as many would be read without a copy."""


class SourceChanges:
    """The patch of sources minus their writes, in the graph's order: separately, and as a sum.

    Without gradients, separate changes go into one preallocated buffer, and only its rows in use
    are read. With gradients, they are read part by part, since each read keeps its input for the
    backward pass.

    Args:
        edges: how far edges are closed.
        spans: the span of every token; None where all tokens share the gates.
    """

    def __init__(self, edges: EdgeWeights, spans: Spans | None = None) -> None:
        self.edges = edges
        self._n_stack = len(edges.source_closed)
        self._buffer: Tensor | None = None
        self._parts: list[Tensor] = []
        self._filled = 0
        self._sum: Tensor | None = None
        self._waiting = deque[tuple[int, Tensor]]()
        self._spans = spans
        one_span = edges.source_closed.new_zeros(1, 1, dtype=torch.long)
        self._at = one_span if spans is None else spans.at
        self._places: list[Tensor | slice] = [slice(None)]
        if spans is not None:
            order = spans.at.flatten().argsort(stable=True)
            counts = spans.at.flatten().bincount(minlength=len(spans.names))
            self._places = [*order.split(counts.tolist())]
            self._back = order.argsort()

    # ---- writing ---------------------------------------------------------------------------------

    def append(self, part: Float[Tensor, "some rows pos d_model"]) -> None:
        """Add the changes of the next separated sources."""
        self._check(len(part[0]) // self._n_stack, part.shape[2])
        if self.edges.learned:
            self._parts.append(part)
            return
        if self._buffer is None:
            self._buffer = part.new_empty(len(self.edges.rows), *part.shape[1:])
        self._buffer[self._filled : self._filled + len(part)] = part
        self._filled += len(part)

    def where_closed(
        self, row: int, change: Float[Tensor, "rows pos some n"]
    ) -> Float[Tensor, "rows pos some n"]:
        """Changes of some sources where they are closed as a whole; 0 elsewhere."""
        stacked = change.unflatten(0, (self._n_stack, -1))
        self._check(*stacked.shape[1:3])
        closed = self._by_token(self.edges.source_closed[..., row : row + change.shape[2]])
        return (stacked * closed[..., None]).flatten(0, 1)

    def add(self, source: int, change: Float[Tensor, "rows pos d_model"]) -> None:
        """Add to the sum the change of one source, or of several that start with it."""
        self._waiting.append((source, change))

    def start_after(self, changes: Float[Tensor, "source batch pos d_model"]) -> None:
        """Add the changes of all sources before the first layer that runs."""
        rows = self.edges.separated(0, len(changes))
        if rows:
            self.append(changes[rows].repeat(1, self._n_stack, 1, 1))
        if self.edges.closes(0, len(changes)):
            self._check(*changes.shape[1:3])
            closed = self._by_token(self.edges.source_closed[..., : len(changes)])
            self.add(0, torch.einsum("sbpu,ubpd->sbpd", closed, changes).flatten(0, 1))

    # ---- reading ---------------------------------------------------------------------------------

    def without_closed(
        self, before: int, residual: Float[Tensor, "rows pos d_model"]
    ) -> Float[Tensor, "rows pos d_model"]:
        """The residual stream, patched for the earlier sources that are closed as a whole.

        Args:
            before: number of earlier sources; it does not decrease between calls.
            residual: the residual stream.
        """
        while self._waiting and self._waiting[0][0] < before:
            _, change = self._waiting.popleft()
            # Many small terms: half precision would lose them one by one.
            change = change.to(torch.promote_types(change.dtype, torch.float32))
            self._sum = change if self._sum is None else self._sum + change
        return residual if self._sum is None else (residual + self._sum).to(residual.dtype)

    def reads(
        self, columns: Sequence[int], shared: Float[Tensor, "rows pos d_model"]
    ) -> Float[Tensor, "stack n flat"]:
        """What n destinations read, each under its own closed edges.

        Args:
            columns: the destinations; all sources of their edges have written.
            shared: the residual stream that `without_closed` returns.
        """
        tokens = shared.reshape(self._n_stack, 1, -1, shared.shape[-1])
        parts, found = [*self._in_use(columns)], list[Tensor]()
        for span, places in enumerate(self._places):
            reads = tokens[:, :, places].flatten(2).expand(-1, len(columns), -1)
            for rows, part in parts:
                weights = self.edges.of(rows, columns)[:, span]
                changes = part.view(len(part), self._n_stack, *tokens.shape[2:])
                changes = changes[:, :, places].flatten(2)
                if self._n_stack == 1:
                    reads = torch.addmm(reads[0], weights[0].T, changes[:, 0])[None]
                else:
                    reads = torch.baddbmm(reads, weights.mT, changes.transpose(0, 1))
            found.append(reads)
        if self._spans is None:
            return found[0]
        joined = torch.cat([reads.unflatten(2, (-1, tokens.shape[-1])) for reads in found], dim=2)
        return joined[:, :, self._back].flatten(2)

    def few_reads(
        self,
        columns: range,
        shared: Float[Tensor, "rows pos d_model"],
        stack: Int[Tensor, " part"],
        some: Int[Tensor, " part"],
    ) -> Float[Tensor, "part batch pos d_model"]:
        """What some of the destinations read under some of the settings; otherwise as `reads`."""
        stacked = shared.unflatten(0, (self._n_stack, -1))
        if self._n_stack == 1:
            chosen = [columns[index] for index in some.tolist()]
            return self.reads(chosen, shared)[0].unflatten(-1, stacked.shape[1:])
        reads = stacked[stack]
        for rows, changes in self._in_use(columns):
            weights = self.edges.of(rows, columns)[stack, :, :, some]
            part, row = (weights != 0).any(dim=1).nonzero().unbind(dim=1)
            change = changes.unflatten(1, (self._n_stack, -1))[row, stack.to(part.device)[part]]
            change = change * self._by_token(weights[part, :, row])[..., None]
            reads = reads.index_add(0, part, change)
        return reads

    def _in_use(
        self, columns: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], Float[Tensor, "some rows pos d_model"]]]:
        """Rows that any of these destinations uses, a few at a time; others may be among them."""
        used = self.edges.used(columns)
        count = used[-1] + 1 if used else 0
        if not self.edges.learned and _FEW * len(used) <= count:
            if used:
                assert self._buffer is not None
                yield used, self._buffer[used]
            return
        start = 0
        for part in self._parts if self.edges.learned else [self._buffer]:
            if start < count:
                assert part is not None
                stop = min(start + len(part), count)
                yield range(start, stop), part[: stop - start]
                start = stop

    # ---- spans -----------------------------------------------------------------------------------

    def _by_token(
        self, values: Float[Tensor, "some span *more"]
    ) -> Float[Tensor, "some batch pos *more"]:
        """The value of each token's span; without spans, one token stands for all."""
        return values[:, self._at]

    def _check(self, batch: int, pos: int) -> None:
        if self._spans is not None and self._at.shape != (batch, pos):
            raise ValueError(
                f"expected to run the prompts that the gates' spans belong to, of shape "
                f"{tuple(self._at.shape)}; got {(batch, pos)}"
            )
