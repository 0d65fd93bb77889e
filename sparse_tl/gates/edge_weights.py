"""How far circuit edges are closed in one forward pass, and what has to be computed for that."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.backend import Adapter
from sparse_tl.graph import CircuitGraph, Destination, Node

_MOST = 7 / 8
"""A source is closed as a whole if more than this share of its edges is closed."""


class EdgeWeights:
    """Closed edges under stacked gates: ``1 - gate[u, v] = source_closed[u] + weight[u, v]``.

    A source is closed as a whole where nearly all of its edges are closed. Few edges then have
    a weight other than 0, in small and in large circuits. With gates per span, a source is
    closed span by span; without, all tokens are one span. If gates require gradients, no source
    is closed as a whole, and every edge counts as weighted.
    """

    def __init__(
        self,
        adapter: Adapter,
        gates: Float[Tensor, "stack *span source destination"],
        from_layer: int,
    ) -> None:
        self.graph, self.learned = adapter.graph, gates.requires_grad
        exists = self.graph.exists.to(adapter.device, copy=True)
        at_end = from_layer == self.graph.n_layers
        first = self.graph.destination_index("logits" if at_end else f"a{from_layer}.h0<q>")
        exists[:, :first] = False  # nothing reads there in this pass
        gates = gates.to(adapter.device, adapter.dtype).reshape(len(gates), -1, *exists.shape)
        self.source_closed: Float[Tensor, "stack span source"] = gates.new_zeros(gates.shape[:3])
        if not self.learned:
            n_closed = torch.where(exists, 1 - gates, 0).sum(dim=3)
            self.source_closed = (n_closed > _MOST * exists.count_nonzero(dim=1)).to(gates.dtype)
        weights = torch.where(exists, (1 - self.source_closed)[..., None] - gates, 0)
        differs = exists[None, None] if self.learned else weights != 0
        # On the CPU: these lookups happen at every read and must not synchronise with a GPU.
        uses = differs.flatten(0, 1).any(dim=0).cpu().numpy()
        self.rows: list[int] = np.flatnonzero(uses.any(axis=1)).tolist()
        """Sources with a weighted edge; the writes of all others are never separated."""
        self._uses = uses[self.rows]
        self._columns = differs.flatten(1, 2).any(dim=1).cpu()
        self._closed_rows: list[bool] = self.source_closed.flatten(0, 1).any(dim=0).tolist()
        self._weights = weights[:, :, self.rows]

    def weighted(self, columns: range) -> Bool[Tensor, "stack n"]:
        """Which destinations read weighted edges, under each setting."""
        return self._columns[:, columns.start : columns.stop]

    def used(self, columns: Sequence[int]) -> list[int]:
        """The separated sources that any of these destinations uses."""
        return np.flatnonzero(self._uses[:, _together(columns)].any(axis=1)).tolist()

    def of(self, rows: Sequence[int], columns: Sequence[int]) -> Float[Tensor, "stack span some n"]:
        """The weights of the edges from some separated sources to some destinations."""
        return self._weights[:, :, _together(rows)][..., _together(columns)]

    def moves(self, columns: range, before: int) -> bool:
        """Whether any of these destinations reads something other than the residual stream."""
        return bool(self.weighted(columns).any()) or self.closes(0, before)

    def closes(self, row: int, count: int = 1) -> bool:
        """Whether any of `count` sources is closed as a whole under any setting."""
        return any(self._closed_rows[row : row + count])

    def separated(self, row: int, count: int = 1) -> list[int]:
        """Which of `count` sources are separated."""
        return self.rows[bisect_left(self.rows, row) : bisect_left(self.rows, row + count)]

    def writes(self, row: int, count: int = 1) -> bool:
        """Whether the writes of any of `count` sources are needed."""
        return bool(self.separated(row, count)) or self.closes(row, count)


@cache  # asked at every read
def sources_before(graph: CircuitGraph, kind: Literal["head", "mlp"], layer: int) -> int:
    """Number of sources that write before the heads, or the MLP, of a layer read."""
    return graph.n_sources_before(Node(kind, layer))


@cache
def read_columns(graph: CircuitGraph, layer: int, slot: str) -> range:
    """The columns of a layer's q, k or v inputs."""
    grouped = slot != "q" and graph.n_kv_heads < graph.n_heads
    node = Node("kv_head" if grouped else "head", layer)
    first = graph.destination_index(Destination(node, slot))  # type: ignore[arg-type]
    return range(first, first + (graph.n_kv_heads if grouped else graph.n_heads))


def _together(places: Sequence[int]) -> slice | list[int]:
    """Increasing indices, as a slice if they are adjacent, so that indexing copies nothing."""
    if len(places) and places[-1] - places[0] + 1 == len(places):
        return slice(places[0], places[-1] + 1)
    return list(places)
