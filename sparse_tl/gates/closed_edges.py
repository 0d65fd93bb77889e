"""Gates that close some attention edges, listed or chosen by a rule, and leave all others open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Columns = int | slice | Sequence[int] | Callable[[int], bool]
"""Columns, from 0: one, a list, a slice, or a function that says whether a column is selected.

Negative columns count from the end of the tokens that are run.
"""


@dataclass(frozen=True)
class ClosedAttentionEdges:
    """Gates that are 0 at some attention edges and 1 at all others.

    Args:
        edges: layer, head, query and key of each closed edge.
        stack: stack entry in which each edge is closed; None for gates without a stack.
        n_stack: number of stack entries.
    """

    edges: Int[Tensor, "edge 4"]
    stack: Int[Tensor, " edge"] | None = None
    n_stack: int = 1

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """Shape of the stack axis: one size, or none."""
        return () if self.stack is None else (self.n_stack,)

    @property
    def layers(self) -> list[int]:
        """The layers with a closed edge, in order."""
        return self.edges[:, 0].unique().tolist()

    def on(
        self, layer: int, pattern: Float[Tensor, "rows head query key"], start: int
    ) -> Float[Tensor, "stack head query key"]:
        """The gates as a tensor, for a layer's pattern whose first query is in column `start`."""
        here = self.edges[:, 0] == layer
        _, head, query, key = self.edges[here].to(pattern.device).unbind(dim=1)
        n_heads, n_queries, n_keys = pattern.shape[1:]
        end = start + n_queries
        if int(query.max()) >= end:
            raise ValueError(
                f"query {int(query.max())} of an attention edge lies beyond the prompt of {end} "
                "tokens. A rule, query=slice(...), includes tokens still to be generated"
            )
        # With a key-value cache only the last queries run; a sliding window drops early keys.
        first = end - n_keys
        run = (query >= start) & (key >= first)
        stack = torch.zeros_like(query) if self.stack is None else self.stack[here].to(query.device)
        gates = pattern.new_ones(self.n_stack, n_heads, n_queries, n_keys)
        gates[stack[run], head[run], query[run] - start, key[run] - first] = 0
        return gates


@dataclass(frozen=True)
class ClosedByRule:
    """Gates that are 0 where a rule selects both query and key, in some heads, and 1 elsewhere.

    Args:
        heads: (layer, head) pairs.
        query: columns of the queries.
        key: columns of the keys.
    """

    heads: Sequence[tuple[int, int]]
    query: Columns
    key: Columns

    stack_shape = ()

    @property
    def layers(self) -> list[int]:
        return sorted({layer for layer, _ in self.heads})

    def on(
        self, layer: int, pattern: Float[Tensor, "rows head query key"], start: int
    ) -> Float[Tensor, "1 head query key"]:
        end = start + pattern.shape[2]
        queries = meant(self.query, start, end)
        keys = meant(self.key, start, end, first=end - pattern.shape[3])
        closed = (queries[:, None] & keys).to(pattern.device)
        gates = pattern.new_ones(1, *pattern.shape[1:])
        for head in (head for where, head in self.heads if where == layer):
            gates[0, head].masked_fill_(closed, 0)
        return gates


ClosedEdges = ClosedAttentionEdges | ClosedByRule
"""Gates on attention edges that fit prompts of any length."""


def meant(
    columns: Columns, start: int, end: int, *, first: int | None = None
) -> Bool[Tensor, " column"]:
    """Whether a rule selects each column from `first` to `end` (exclusive).

    Args:
        columns: the rule.
        start: number of columns in the key-value cache.
        end: number of columns in the cache and in this pass together.
        first: first column of the result; by default the first column of this pass.

    Raises:
        ValueError: a listed column lies outside the tokens that are run, or a column counts from
            the end, which moves with every generated token, in a run with a key-value cache.
    """
    first = start if first is None else first
    if callable(columns):
        found = [column for column in range(first, end) if columns(column)]
    else:
        if isinstance(columns, slice):
            listed = [columns.start or 0, columns.stop or 0]
            found = list(range(end)[columns])
        else:
            found = listed = [columns] if isinstance(columns, int) else list(columns)
            outside = [column for column in listed if not -end <= column < end]
            if outside:
                raise ValueError(
                    f"position {outside[0]} lies outside the prompts of {end} tokens; tokens still "
                    "to be generated need a slice or a function, such as slice(15, None)"
                )
        if start and min(listed, default=0) < 0:
            raise ValueError(
                f"position {min(listed)} counts from the end, and with a key-value cache the end "
                "moves with every token: count from the start, or run without a cache"
            )
    chosen = torch.zeros(end, dtype=torch.bool)
    chosen[found] = True
    return chosen[first:]
