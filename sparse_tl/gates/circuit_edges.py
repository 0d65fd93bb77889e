"""Gates on circuit edges: every destination v reads

    input_v = residual_v - sum_u (1 - gate[u, v]) (now_u - patch_u),

where ``now_u`` is what source u writes in this pass, ``patch_u`` is what the patch writes, and
``residual_v`` is the current residual stream, the sum of everything written in this pass. With all
gates at 1 this is the plain model, bit for bit; with all gates at 0 it is the patched model.
Normalisation is recomputed at every destination. With spans, an edge has a gate for every span,
which acts on the span's tokens.

Only what a closed gate affects is computed: per-head writes of sources with a closed outgoing edge,
and reads of destinations with a closed incoming edge.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from sparse_tl.data import Spans
from sparse_tl.gates.patches import PatchValues
from sparse_tl.gates.sites import Hooks, Pass
from sparse_tl.gates.source_changes import SourceChanges
from sparse_tl.graph import Destination
from sparse_tl.lens import EMBEDDED, Adapter, Order
from sparse_tl.nodes import Node

_FEW = 0.5
"""Share of a layer's reads below which reads are computed one by one instead of as a batch."""


@dataclass(frozen=True)
class CircuitEdges:
    """One gate per circuit edge, ``[source, destination]`` as in the model's graph.

    Args:
        spans: the span of every token of the prompts that are run, for gates per span,
            ``[span, source, destination]``; see `PromptPairs.spans_of`.
    """

    spans: Spans | None = None

    def shape(self, adapter: Adapter) -> tuple[int, ...]:
        spans = () if self.spans is None else (len(self.spans.names),)
        return *spans, *adapter.graph.exists.shape

    def points(self, adapter: Adapter, gates: Any = None) -> list[str]:
        return adapter.source_points()

    def first_layer(self, adapter: Adapter, differ: Tensor) -> int:
        graph = adapter.graph
        read = (differ & graph.exists.to(differ.device)).any(dim=-2)
        columns = read.flatten(0, -2).any(dim=0).nonzero()
        return graph.layer((0, int(columns[0]))) if len(columns) else graph.n_layers

    def hooks(
        self,
        adapter: Adapter,
        gates: Float[Tensor, "stack *span source destination"],
        patch: PatchValues,
        now: Pass,
    ) -> Hooks:
        return CircuitPass(adapter, gates, patch, now, self.spans).hooks()


class CircuitPass:
    """One forward pass under stacked gates on circuit edges.

    Args:
        adapter: adapter of the model.
        gates: gates on the edges; differentiable if they require gradients.
        patch: patch values that closed edges use.
        now: where the pass starts, and what earlier sources wrote.
        spans: the span of every token, for gates per span.
    """

    def __init__(
        self,
        adapter: Adapter,
        gates: Float[Tensor, "stack *span source destination"],
        patch: PatchValues,
        now: Pass,
        spans: Spans | None = None,
    ) -> None:
        self.adapter, self.graph, self.patch, self.now = adapter, adapter.graph, patch, now
        exists = self.graph.exists.to(adapter.device)
        closed = torch.where(exists, 1 - gates.to(adapter.device, adapter.dtype), 0)
        self.closed = closed.view(len(gates), -1, *exists.shape)
        self.learned = gates.requires_grad
        acts = exists if self.learned else (self.closed != 0).flatten(0, 1).any(dim=0)
        # On the CPU: these lookups happen at every read and must not synchronise with a GPU.
        self._rows = acts.any(dim=1).nonzero()[:, 0].tolist()
        """Sources with a closed outgoing edge; the writes of all others are never separated."""
        self._columns = acts.any(dim=0).tolist()
        self._compact = self.closed[:, :, self._rows]
        self._residual: Tensor | None = None
        self._made: dict[str, Tensor] = {}
        self._changes = SourceChanges(len(self._rows), spans, keep_all=self.learned)
        first = self.graph.n_sources_before(Node("head", now.from_layer))
        before = self._rows[: bisect_left(self._rows, first)]
        if now.changes is not None and before:
            self._changes.append(now.changes[before].repeat(1, now.n_stack, 1, 1))

    def hooks(self) -> Hooks:
        """The hooks of all layers from the first one that runs."""
        graph, hooks = self.graph, list[tuple]()
        if self.now.from_layer == 0 and self._rows[:1] == [0]:
            hooks.append((EMBEDDED, Order.LAST, partial(self._note, EMBEDDED)))
        for layer in range(self.now.from_layer, graph.n_layers):
            block = f"blocks.{layer}"
            changed = [slot for slot in "qkv" if self._closes(*self._heads(layer, slot))]
            if changed:
                many = [slot for slot in changed if self._changes_many(layer, slot)]
                enter = partial(self._enter, layer, many)
                hooks.append((f"{block}.hook_resid_pre", Order.LAST, enter))
            for slot in changed:
                read = partial(self._read_heads, layer, slot)
                hooks.append((f"{block}.attn.hook_{slot}", Order.FIRST, read))
            heads = self._heads_of(layer)
            if heads:
                note = partial(self._note_heads, layer, heads)
                hooks.append((self.adapter.heads_point(layer), Order.LAST, note))
            if graph.has_mlps:
                mlp = graph.destination_index(f"m{layer}")
                if self._closes(mlp, 1):
                    read = partial(self.read, mlp, graph.n_sources_before(Node("mlp", layer)))
                    hooks.append((f"{block}.mlp_input", Order.FIRST, read))
                if graph.source_index(f"m{layer}") in self._rows:
                    name = f"{block}.hook_mlp_out"
                    hooks.append((name, Order.LAST, partial(self._note, name)))
        if self._closes(len(graph.destinations) - 1, 1):
            name = f"blocks.{graph.n_layers - 1}.hook_resid_post"
            hooks.append((name, Order.LAST, self.read_logits))
        return hooks

    def read_logits(
        self, residual: Float[Tensor, "rows pos d_model"]
    ) -> Float[Tensor, "rows pos d_model"]:
        """What the logits read, from the final residual stream."""
        return self.read(len(self.graph.destinations) - 1, len(self.graph.sources), residual)

    def read(
        self, column: int, before: int, residual: Float[Tensor, "rows pos d_model"]
    ) -> Float[Tensor, "rows pos d_model"]:
        """What one destination reads, replacing the residual stream."""
        weights = self._weights(column, 1, before)
        if weights.shape[2] == 0:
            return residual
        return self._changes.taken_from(residual, weights)[:, 0].reshape(residual.shape)

    # ---- reading ---------------------------------------------------------------------------------

    def _heads_of(self, layer: int) -> list[int]:
        """The heads of a layer whose writes are separated."""
        first = self.graph.source_index(f"a{layer}.h0")
        return [row - first for row in self._rows if 0 <= row - first < self.graph.n_heads]

    def _heads(self, layer: int, slot: str) -> tuple[int, int]:
        """The first column of a layer's q, k or v inputs, and the number of columns."""
        grouped = slot != "q" and self.graph.n_kv_heads < self.graph.n_heads
        node = Node("kv_head" if grouped else "head", layer)
        first = self.graph.destination_index(Destination(node, slot))  # type: ignore[arg-type]
        return first, self.graph.n_heads if slot == "q" else self.graph.n_kv_heads

    def _closes(self, column: int, count: int) -> bool:
        return any(self._columns[column : column + count])

    def _weights(self, column: int, count: int, before: int) -> Float[Tensor, "stack span some n"]:
        """How far the edges from the separated sources are closed."""
        return self._compact[:, :, : bisect_left(self._rows, before), column : column + count]

    def _head_weights(self, layer: int, slot: str) -> Float[Tensor, "stack span some n"]:
        """The weights of the q, k or v inputs of a layer."""
        before = self.graph.n_sources_before(Node("head", layer))
        return self._weights(*self._heads(layer, slot), before)

    def _changes_many(self, layer: int, slot: str) -> bool:
        """Whether enough heads of a layer read something different to compute them as a batch."""
        changed = (self._head_weights(layer, slot) != 0).flatten(1, 2).any(dim=1)
        return self.learned or bool(changed.float().mean() > _FEW)

    def _enter(
        self, layer: int, many: list[str], residual: Float[Tensor, "rows pos d_model"]
    ) -> Float[Tensor, "rows pos d_model"]:
        """Keep the residual stream that enters a layer, and compute what its heads read.

        All slots at once: reading the sources' writes from memory dominates the cost.
        """
        self._residual = residual
        weights = [self._head_weights(layer, slot) for slot in many]
        if weights:
            reads = self._changes.taken_from(residual, torch.cat(weights, dim=-1))
            counts = [part.shape[-1] for part in weights]
            self._made = dict(zip(many, reads.split(counts, dim=1), strict=True))
        return residual

    def _read_heads(
        self, layer: int, slot: str, value: Float[Tensor, "rows pos head d_head"]
    ) -> Float[Tensor, "rows pos head d_head"]:
        """The q, k or v vectors that the heads of a layer compute from their reads."""
        norm = self.adapter.norm(layer, "attn")
        weight, bias = self.adapter.qkv(layer, slot)  # type: ignore[arg-type]
        if slot in self._made:
            reads = norm(self._made.pop(slot).unflatten(-1, self._shape()))
            flat = rearrange(reads, "stack head batch pos d -> head (stack batch pos) d")
            out = torch.baddbmm(bias.to(flat.dtype)[:, None], flat, weight.to(flat.dtype))
            return rearrange(
                out, "head (rows pos) d_head -> rows pos head d_head", rows=len(value)
            ).to(value.dtype)
        weights = self._head_weights(layer, slot)
        stack, head = (weights != 0).flatten(1, 2).any(dim=1).nonzero().unbind(dim=1)
        assert self._residual is not None
        reads = norm(self._changes.taken_from_few(self._residual, weights, stack, head))
        flat = rearrange(reads, "part batch pos d -> part (batch pos) d")
        out = torch.baddbmm(
            bias[head].to(flat.dtype)[:, None], flat, weight[head].to(flat.dtype)
        ).unflatten(1, self._shape()[:2])
        value = value.unflatten(0, (self.now.n_stack, -1)).clone()
        value[stack, :, :, head] = out.to(value.dtype)
        return value.flatten(0, 1)

    def _shape(self) -> tuple[int, int, int]:
        """Prompts, positions and d_model."""
        assert self._residual is not None
        rows, pos, d_model = self._residual.shape
        return rows // self.now.n_stack, pos, d_model

    # ---- writing ------------------------------------------------------------------------------

    def _note(
        self, name: str, value: Float[Tensor, "rows pos d_model"]
    ) -> Float[Tensor, "rows pos d_model"]:
        self._changes.append(self.patch.change(name, value, self.now.n_stack)[None])
        return value  # unchanged: the model, and autograd, continue from this very tensor

    def _note_heads(
        self, layer: int, heads: list[int], z: Float[Tensor, "rows pos head d_head"]
    ) -> Float[Tensor, "rows pos head d_head"]:
        change = self.patch.change(self.adapter.heads_point(layer), z, self.now.n_stack)
        self._changes.append(self.adapter.heads_written(layer, change, heads=heads))
        return z
