"""Given gates on attention edges: each weight of a pattern times its gate, nothing renormalised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.gates.patches import PatchValues, gate
from sparse_tl.gates.sites import Hooks, Pass, acts, by_row, first_of
from sparse_tl.lens import Adapter, Order


@dataclass(frozen=True)
class ClosedAttentionEdges:
    """Gates that are all 1 but for some attention edges.

    Args:
        edges: layer, head, query and key of each.
        stack: the entry of the stack in which it is closed; None for gates without a stack.
        n_stack: how many entries the stack has.
    """

    edges: Int[Tensor, "edge 4"]
    stack: Int[Tensor, " edge"] | None = None
    n_stack: int = 1


@dataclass(frozen=True)
class AttentionEdges:
    """One gate for each attention edge, ``[layer, head, query, key]``; nothing is renormalised.

    Gates fit prompts of one length, or are `ClosedAttentionEdges`.
    """

    def shape(self, adapter: Adapter) -> tuple[int, ...]:
        return adapter.n_layers, adapter.n_heads, -1, -1

    def points(self, adapter: Adapter, gates: Any = None) -> list[str]:
        return [f"blocks.{layer}.attn.hook_pattern" for layer in range(adapter.n_layers)]

    def first_layer(self, adapter: Adapter, differ: Tensor) -> int:
        return first_of(differ.flatten(2).any(dim=-1).any(dim=0))

    def hooks(
        self,
        adapter: Adapter,
        gates: Float[Tensor, "stack layer head query key"] | ClosedAttentionEdges,
        patch: PatchValues,
        now: Pass,
    ) -> Hooks:
        hooks: Hooks = []
        for layer, name in enumerate(self.points(adapter)):
            if isinstance(gates, ClosedAttentionEdges):
                here = gates.edges[:, 0] == layer
                if not bool(here.any()):
                    continue
                stack = gates.stack if gates.stack is None else gates.stack[here]
                close = partial(self._close_some, name, gates.edges[here, 1:], stack, patch, now)
            elif layer < now.from_layer or not (gates.requires_grad or acts(gates[:, layer])):
                continue
            else:
                close = partial(self._close, name, gates[:, layer], patch, now)
            # Last, so that learned gates, which come first, cannot open an edge again.
            hooks.append((name, Order.LAST, close))
        return hooks

    @staticmethod
    def _close(
        name: str,
        gates: Float[Tensor, "stack head query key"],
        patch: PatchValues,
        now: Pass,
        pattern: Float[Tensor, "rows head query key"],
    ) -> Float[Tensor, "rows head query key"]:
        if gates.shape[2:] != pattern.shape[2:]:
            raise ValueError(
                f"expected prompts of {gates.shape[2]} queries and {gates.shape[3]} keys, for "
                f"which there are gates; got {pattern.shape[2]} and {pattern.shape[3]}"
            )
        return gate(by_row(gates, pattern), pattern, patch.at(name, pattern, now.n_stack))

    @staticmethod
    def _close_some(
        name: str,
        edges: Int[Tensor, "edge 3"],
        stack: Int[Tensor, " edge"] | None,
        patch: PatchValues,
        now: Pass,
        pattern: Float[Tensor, "rows head query key"],
    ) -> Float[Tensor, "rows head query key"]:
        n_queries, n_keys = pattern.shape[2:]
        if int(edges[:, 1].max()) >= n_keys:
            raise ValueError(
                f"expected attention edges within the prompt of {n_keys} tokens; got query "
                f"{int(edges[:, 1].max())}"
            )
        start = n_keys - n_queries  # with a key-value cache only the last queries run
        run = edges[:, 1] >= start
        head, query, key = edges[run].to(pattern.device).unbind(dim=1)
        stacked = pattern.unflatten(0, (now.n_stack, -1))
        which = slice(None) if stack is None else stack[run].to(pattern.device)
        shown = patch.at(name, pattern, now.n_stack, start)
        gates = torch.ones_like(stacked)
        gates[which, :, head, query - start, key] = 0
        return gate(gates.flatten(0, 1), pattern, shown)


def closed_attention_edges(
    adapter: Adapter, edges: Sequence[tuple[int, int, int, int]]
) -> ClosedAttentionEdges:
    """Gates under which these attention edges (layer, head, query, key) are closed.

    Raises:
        ValueError: no edge, or one that the model lacks.
    """
    if not len(edges):
        raise ValueError("expected at least one attention edge to ablate; got none")
    for layer, head, query, key in edges:
        adapter.check_head(layer, head)
        inside = 0 <= query < adapter.n_ctx and 0 <= key < adapter.n_ctx
        if not inside or (adapter.causal and key > query):
            raise ValueError(
                "expected attention edges (layer, head, query, key)"
                + (" with the key at or before the query" if adapter.causal else "")
                + f", in columns 0..{adapter.n_ctx - 1}; got {(layer, head, query, key)}"
            )
    return ClosedAttentionEdges(torch.tensor([tuple(edge) for edge in edges]))
