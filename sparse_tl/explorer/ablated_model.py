"""A model on a prompt, with selected heads and attention edges removed.

The pattern of every removed edge has a gate of 0, applied after the model's own gates. Removing a
head removes all of its edges, so that a diagram shows none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.circuits import trace_attention
from sparse_tl.circuits.attention_graph import AttentionGraph
from sparse_tl.circuits.removal import AttentionEdge, Head, RemovalEffects, removal_effects
from sparse_tl.circuits.trace import MAX_EFFECTS, Prompt, prompt_tokens
from sparse_tl.gates import AttentionEdges, gated
from sparse_tl.grids import AttentionGrid
from sparse_tl.lens import EMBEDDED, HookedModel, Order, adapt, attached
from sparse_tl.scopes import autograd

# With all weights that a diagram can show.
trace_weights = partial(trace_attention, attribution=True, max_effects=MAX_EFFECTS)


@dataclass(frozen=True, eq=False)
class Seen:
    """Results of running the prompt.

    Args:
        graph: attention graph of the run.
        logits: logits at every column that is read.
        streams: residual stream of the input, then after each layer.
    """

    graph: AttentionGraph
    logits: Float[Tensor, "pos vocab"]
    streams: Float[Tensor, "level pos d_model"]


class AblatedModel:
    """A model on a prompt: results of the whole model (`whole`) and under removals (`now`).

    Args:
        model: dense or sparse model.
        prompt: text or tokens.
        positions: columns to predict.
        labels: text of each column, if not the tokenizer's.
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
        self.now = self.whole = self._look(positions)
        graph = self.whole.graph
        self.targets, self.n_read = graph.targets, graph.n_read
        self.grid = AttentionGrid(graph.n_layers, graph.n_heads, graph.n_read, graph.causal)

    @property
    def positions(self) -> list[int]:
        return [column for column, _ in self.targets]

    def remove(self, heads: set[Head], edges: set[AttentionEdge]) -> None:
        """Set what is removed; if the model cannot run like that, nothing changes."""
        old = self.heads, self.edges
        self.heads, self.edges = heads, edges
        seen = self.whole
        try:
            if heads or edges:
                with self._ablated():
                    seen = self._look(self.positions)
        except BaseException:
            self.heads, self.edges = old
            raise
        graph = replace(seen.graph, gates=seen.graph.gates & ~self.removed())
        self.now = replace(seen, graph=graph)

    def removed(self) -> Bool[Tensor, "layer head query key"]:
        """Which attention edges are removed, individually or with their head."""
        removed = torch.zeros(self.whole.graph.attention.shape, dtype=torch.bool)
        for place in (*self.heads, *self.edges):
            removed[place] = True
        return removed

    def head_effects(self) -> RemovalEffects:
        """Effect of each head on each predicted token, on top of the removals."""
        read_at = [column for _, column in self.targets]
        heads = list(product(range(self.adapter.n_layers), range(self.adapter.n_heads)))
        with self._ablated():
            return removal_effects(self.model, self.tokens[: self.n_read], read_at, heads=heads)

    @autograd(False)
    def logit_lens(self, level: int) -> Float[Tensor, "pos vocab"]:
        """Logits read from a level of the residual stream, as if no later layer wrote anything."""
        return self.adapter.logits(self.now.streams[level, None])[0].cpu()

    def _look(self, positions: Sequence[int] | None) -> Seen:
        graph = trace_weights(self.model, self.tokens, positions=positions, labels=self.labels)
        streams: list[Tensor] = []
        points = [EMBEDDED, *self.adapter.layer_points("hook_resid_post")]
        hooks = [(point, Order.LAST, streams.append) for point in points]
        with attached(self.adapter, hooks), autograd(False):
            logits = self.model(self.tokens[None, : graph.n_read].to(self.adapter.device))
        return Seen(graph, logits[0].cpu(), torch.cat(streams))

    def _ablated(self) -> AbstractContextManager[None]:
        """Inside the block the model runs without the removed parts."""
        if not (self.heads or self.edges):
            return nullcontext()
        kept = ~self.removed()[..., : self.n_read, : self.n_read]
        return gated(self.model, AttentionEdges(), kept)
