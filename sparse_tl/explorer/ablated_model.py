"""A model on a prompt, with heads and attention edges removed by hand.

A gate of 0 stands on the pattern of every removed edge, after the model's own gates; a removed head
is all of its edges removed, so that a diagram shows none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.circuits import trace_attention
from sparse_tl.circuits.attention_graph import AttentionGraph
from sparse_tl.circuits.removal import AttentionEdge, Head, RemovalEffects, removal_effects
from sparse_tl.circuits.trace import MAX_EFFECTS, Prompt, prompt_tokens
from sparse_tl.gates import AttentionEdges, gated
from sparse_tl.lens import (
    EMBEDDED,
    HookedModel,
    Order,
    adapt,
    attached,
    layer_points,
)


class AblatedModel:
    """A model on a prompt, with all that is computed there.

    `whole` and `before` are the graph and the logits with nothing removed, `graph` and `logits`
    those under the removals.

    Args:
        model: dense or sparse.
        prompt: text, or its tokens.
        positions: to predict.
        labels: texts of the columns, where they are not the tokenizer's.
    """

    def __init__(
        self,
        model: HookedModel,
        prompt: Prompt,
        positions: Sequence[int] | None,
        labels: Sequence[str] | None,
    ) -> None:
        self.model, self.labels = model, labels
        self.adapter = adapt(model)
        self.tokens = prompt_tokens(model, prompt)
        self.heads: set[Head] = set()
        self.edges: set[AttentionEdge] = set()
        self.graph = self.whole = self._trace(positions)
        self.positions = [column for column, _ in self.whole.targets]
        self.n_read = self.whole.n_read
        self.logits = self.before = self._run(None)

    def remove(self, heads: set[Head], edges: set[AttentionEdge]) -> None:
        """From now on just these are removed; where that cannot be run, all stays as it was."""
        old = self.heads, self.edges
        self.heads, self.edges = heads, edges
        graph, logits = self.whole, self.before
        try:
            if heads or edges:
                with self._ablated():
                    graph, logits = self._trace(self.positions), self._run(None)
        except BaseException:
            self.heads, self.edges = old
            raise
        self.graph = replace(graph, gates=graph.gates & ~self.removed())
        self.logits = logits

    def removed(self) -> Bool[Tensor, "layer head query key"]:
        """Which attention edges are removed, by themselves or with their head."""
        removed = torch.zeros(self.whole.attention.shape, dtype=torch.bool)
        for place in (*self.heads, *self.edges):
            removed[place] = True
        return removed

    def head_effects(self) -> RemovalEffects:
        """What each head does for each predicted token, beside what is removed."""
        heads = [(i, j) for i in range(self.adapter.n_layers) for j in range(self.adapter.n_heads)]
        read_at = [column for _, column in self.whole.targets]
        with self._ablated():
            return removal_effects(self.model, self.tokens[: self.n_read], read_at, heads=heads)

    def logit_lens(self, level: int) -> Float[Tensor, "pos vocab"]:
        """What a level of the residual stream says if no later layer writes anything."""
        with self._ablated():
            return self._run(level)

    def check_edge(self, edge: AttentionEdge) -> None:
        """Make sure that there is such an edge; a ValueError says that there is not."""
        layer, head, query, key = edge
        self.adapter.check_head(layer, head)
        last_key = query if self.whole.causal else self.n_read - 1
        if not (0 <= query < self.n_read and 0 <= key <= last_key):
            which = "a query at or after it" if self.whole.causal else "a query"
            raise ValueError(
                f"expected an attention edge from a key to {which}, in columns "
                f"0..{self.n_read - 1}; got query {query}, key {key}"
            )

    def _trace(self, positions: Sequence[int] | None) -> AttentionGraph:
        return trace_attention(
            self.model,
            self.tokens,
            positions=positions,
            attribution=True,
            max_effects=MAX_EFFECTS,
            labels=self.labels,
        )

    @torch.no_grad()
    def _run(self, level: int | None) -> Float[Tensor, "pos vocab"]:
        """The logits, or those that a level of the residual stream gives."""
        batch = self.tokens[None, : self.n_read].to(self.adapter.device)
        if level is None:
            return self.model(batch)[0].cpu()
        streams: list[Tensor] = []
        name = [EMBEDDED, *layer_points(self.model, "hook_resid_post")][level]
        with attached(self.model, [(name, Order.LAST, streams.append)]):
            self.model(batch, return_type=None)
        return self.adapter.logits(streams[0])[0].cpu()

    @contextmanager
    def _ablated(self) -> Iterator[None]:
        """Inside the block the model runs without what is removed."""
        if not (self.heads or self.edges):
            yield
            return
        kept = ~self.removed()[..., : self.n_read, : self.n_read]
        with gated(self.model, AttentionEdges(), kept):
            yield
