"""Gates that close some attention edges, listed or chosen by a rule, and leave all others open."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.gates.columns import Columns, meant


class ClosedEdges(ABC):
    """Gates on attention edges that fit prompts of any length."""

    @property
    @abstractmethod
    def stack_shape(self) -> tuple[int, ...]:
        """Shape of the stack axis: one size, or none."""

    @property
    @abstractmethod
    def layers(self) -> list[int]:
        """The layers with a closed edge, in order."""

    @abstractmethod
    def in_layer(self, layer: int) -> ClosedEdges:
        """The closed edges of one layer."""

    @abstractmethod
    def on(
        self, pattern: Float[Tensor, "rows head query key"], start: int = 0
    ) -> Float[Tensor, "stack head query key"]:
        """The gates as a tensor, for a layer's pattern whose first query is in column `start`."""


@dataclass(frozen=True)
class ClosedAttentionEdges(ClosedEdges):
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
        return () if self.stack is None else (self.n_stack,)

    @property
    def layers(self) -> list[int]:
        return self.edges[:, 0].unique().tolist()

    def in_layer(self, layer: int) -> ClosedAttentionEdges:
        here = self.edges[:, 0] == layer
        stack = None if self.stack is None else self.stack[here]
        return ClosedAttentionEdges(self.edges[here], stack, self.n_stack)

    def on(
        self, pattern: Float[Tensor, "rows head query key"], start: int = 0
    ) -> Float[Tensor, "stack head query key"]:
        n_heads, n_queries, n_keys = pattern.shape[1:]
        end = start + n_queries
        if int(self.edges[:, 2].max()) >= end:
            raise ValueError(
                f"expected attention edges within the prompt of {end} tokens; got query "
                f"{int(self.edges[:, 2].max())}. A rule can include tokens that are still to be "
                "generated: query=slice(...)"
            )
        # With a key-value cache only the last queries run; a sliding window drops early keys.
        first = end - n_keys
        run = (self.edges[:, 2] >= start) & (self.edges[:, 3] >= first)
        _, head, query, key = self.edges[run].to(pattern.device).unbind(dim=1)
        gates = pattern.new_ones(self.n_stack, n_heads, n_queries, n_keys)
        entry = 0 if self.stack is None else self.stack[run].to(pattern.device)
        gates[entry, head, query - start, key - first] = 0
        return gates


@dataclass(frozen=True)
class ClosedByRule(ClosedEdges):
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

    def in_layer(self, layer: int) -> ClosedByRule:
        return replace(self, heads=[head for head in self.heads if head[0] == layer])

    def on(
        self, pattern: Float[Tensor, "rows head query key"], start: int = 0
    ) -> Float[Tensor, "1 head query key"]:
        end = start + pattern.shape[2]
        queries = meant(self.query, start, end)
        keys = meant(self.key, start, end, first=end - pattern.shape[3])
        closed = (queries[:, None] & keys).to(pattern.device)
        gates = pattern.new_ones(1, *pattern.shape[1:])
        for _, head in self.heads:
            gates[0, head].masked_fill_(closed, 0)
        return gates
