"""A model on a prompt, with heads and attention edges taken out by hand.

A removed head writes 0 at ``hook_z``, and the pattern of a removed edge is 0 after any gate. The
attention of a removed head moves nothing: here it counts as 0 too, so that a diagram shows none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sparse_tl.circuits import trace_attention
from sparse_tl.circuits.attention_graph import AttentionGraph
from sparse_tl.circuits.removal import AttentionEdge, Head, RemovalEffects, removal_effects
from sparse_tl.circuits.trace import MAX_EFFECTS, Prompt, prompt_tokens
from sparse_tl.gates import ablate_attention_edges, ablate_heads
from sparse_tl.lens import (
    EMBEDDED,
    HookedModel,
    Order,
    attached,
    attention_shape,
    embedding_matrix,
    layer_points,
)


@dataclass(frozen=True, eq=False)
class Run:
    """One forward pass of one prompt."""

    patterns: Float[Tensor, "layer head query key"]
    streams: Float[Tensor, "level pos d_model"]
    logits: Float[Tensor, "pos vocab"]


class Panel:
    """A model on the prompt, with all that is computed there.

    `whole` and `before` are the flow and the run with nothing removed, `flow` and `after` those
    under the removals.

    Args:
        model: dense or sparse.
        prompt: text, or its tokens.
        positions: to predict.
    """

    def __init__(self, model: HookedModel, prompt: Prompt, positions: Sequence[int] | None) -> None:
        self.model = model
        self.shape = attention_shape(model)
        self.points = layer_points(model, "attn.hook_pattern")
        self.whole = self._traced(prompt, positions)
        self.positions = [column for column, _ in self.whole.targets]
        # What comes after the last column that is read has no influence.
        self.n_read = max(read_at for _, read_at in self.whole.targets) + 1
        self.tokens = prompt_tokens(model, prompt)
        self.heads: set[Head] = set()
        self.edges: set[AttentionEdge] = set()
        self.before = self._run()
        self.after, self.flow = self.before, self.whole

    def remove(self, heads: set[Head], edges: set[AttentionEdge]) -> None:
        """From now on just these are removed; where that cannot be run, all stays as it was."""
        old = self.heads, self.edges
        self.heads, self.edges = heads, edges
        try:
            found = (self._run(), self._trace()) if heads or edges else (self.before, self.whole)
        except BaseException:
            self.heads, self.edges = old
            raise
        self.after, self.flow = found

    def _traced(self, prompt: Prompt, positions: Sequence[int] | None) -> AttentionGraph:
        return trace_attention(
            self.model, prompt, positions=positions, attribution=True, max_effects=MAX_EFFECTS
        )

    def head_effects(self) -> RemovalEffects:
        """What each head does for each predicted token, beside what is removed."""
        heads = [(i, j) for i in range(self.shape.n_layers) for j in range(self.shape.n_heads)]
        read_at = [column for _, column in self.flow.targets]
        with self._without_removed():
            return removal_effects(self.model, self.tokens[: self.n_read], read_at, heads=heads)

    def _trace(self) -> AttentionGraph:
        with self._without_removed():
            flow = self._traced(self.tokens, self.positions)
        room = flow.n_columns - self.n_read
        removed = nn.functional.pad(self.removed(), (0, room, 0, room))
        return replace(
            flow, attention=flow.attention.masked_fill(removed, 0), gates=flow.gates & ~removed
        )

    def removed(self) -> Bool[Tensor, "layer head query key"]:
        """Which attention edges are removed, by themselves or with their head."""
        shape = self.shape
        removed = torch.zeros(
            shape.n_layers, shape.n_heads, self.n_read, self.n_read, dtype=torch.bool
        )
        for place in (*self.heads, *self.edges):
            removed[place] = True
        return removed

    def text(self, token: int) -> str:
        return self.model.tokenizer.decode([token])

    def check_edge(self, edge: AttentionEdge) -> None:
        layer, head, query, key = edge
        self.shape.check_head(layer, head)
        if not 0 <= key <= query < self.n_read:
            raise ValueError(
                f"expected an attention edge from a key to a query at or after it, in columns "
                f"0..{self.n_read - 1}; got query {query}, key {key}"
            )

    @contextmanager
    def _without_removed(self) -> Iterator[None]:
        """Inside the block the model runs without what is removed."""
        with ExitStack() as stack:
            if self.heads:
                stack.enter_context(ablate_heads(self.model, sorted(self.heads)))
            if self.edges:
                stack.enter_context(ablate_attention_edges(self.model, sorted(self.edges)))
            yield

    @torch.no_grad()
    def _run(self) -> Run:
        kept: dict[str, Tensor] = {}

        def keep(name: str, value: Tensor) -> None:
            kept[name] = value[0].cpu()

        levels = [EMBEDDED, *layer_points(self.model, "hook_resid_post")]
        hooks = [(name, Order.LAST, partial(keep, name)) for name in (*self.points, *levels)]
        batch = self.tokens[None, : self.n_read].to(embedding_matrix(self.model).device)
        with self._without_removed(), attached(self.model, hooks):
            logits = self.model(batch)[0].cpu()
        patterns, streams = (
            torch.stack([kept[name] for name in names]) for names in (self.points, levels)
        )
        return Run(patterns.masked_fill(self.removed(), 0), streams, logits)
