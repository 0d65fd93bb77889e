"""Gates on circuit edges: every destination v reads

    input_v = residual_v + sum_u (1 - gate[u, v]) (patch_u - now_u),

where ``now_u`` is what source u writes in this pass, ``patch_u`` is what the patch writes, and
``residual_v`` is the current residual stream, the sum of everything written in this pass. With all
gates at 1 this is the plain model, bit for bit; with all gates at 0 it is the patched model.
Normalisation is recomputed at every destination. With spans, an edge has a gate for every span,
which acts on the span's tokens.

A source with nearly all edges closed is closed *as a whole*: its change is added to a running
sum that all later destinations share, and only its edges that differ are computed one by one. So a
small circuit costs what it keeps, and a large one what it leaves out: writes are separated by head
only for sources with such edges, and reads are computed only where they differ from the residual
stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.backend import EMBEDDED, SLOTS, Adapter, Hook, Order, check_sums_under_hooks
from sparse_tl.calls.arguments import checked
from sparse_tl.data import Spans
from sparse_tl.gates.edge_weights import EdgeWeights, read_columns, sources_before
from sparse_tl.gates.patches import PatchValues
from sparse_tl.gates.sites import GatedPass, Site
from sparse_tl.gates.source_changes import SourceChanges

_FEW = 0.5
"""Share of a layer's reads below which reads are computed one by one instead of as a batch."""


@checked
@dataclass(frozen=True)
class CircuitEdges(Site):
    """One gate per circuit edge, ``[source, destination]`` as in the model's graph.

    Args:
        spans: the span of every token of the prompts that are run, for gates per span,
            ``[span, source, destination]``; see `PromptPairs.spans_of`.
    """

    spans: Spans | None = None
    order = Order.LAST  # a source is what reaches the residual stream

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
        now: GatedPass,
    ) -> list[Hook]:
        return CircuitEdgeHooks(adapter, gates, patch, now, self.spans).hooks()

    def check(self, adapter: Adapter, tokens: Tensor | None) -> None:
        check_sums_under_hooks(adapter, tokens)

    def keeps_all(self, adapter: Adapter, gates: Tensor) -> bool:
        return bool(((gates == 1) | ~adapter.graph.exists.to(gates.device)).all())

    def sources(self, adapter: Adapter) -> list[str]:
        return adapter.source_points()

    def of_stream(self, gates: Tensor) -> Tensor:
        gates = gates.clone()
        gates[..., -1] = 1  # what the logits read differs from the residual stream
        return gates

    def read_logits(
        self, adapter: Adapter, gates: Tensor, patch: PatchValues, now: GatedPass, final: Tensor
    ) -> Tensor:
        return CircuitEdgeHooks(adapter, gates, patch, now, self.spans).read_logits(final)


class CircuitEdgeHooks:
    """The hooks of stacked gates on circuit edges, for forward passes one after the other."""

    def __init__(
        self,
        adapter: Adapter,
        gates: Float[Tensor, "stack *span source destination"],
        patch: PatchValues,
        now: GatedPass,
        spans: Spans | None = None,
    ) -> None:
        self.adapter, self.graph, self.patch, self.now = adapter, adapter.graph, patch, now
        self.edges = EdgeWeights(adapter, gates, now.from_layer)
        self.spans = spans
        self._shared: Tensor
        self._normed: Tensor | None = None
        self._made: dict[str, Tensor] = {}
        self._changes = self._none_yet()
        self._ran = False

    def hooks(self) -> list[Hook]:
        """The hooks of all layers from the first one that runs."""
        graph, edges = self.graph, self.edges
        hooks: list[Hook] = [("cached_columns", Order.FIRST, self._start)]
        if self.now.from_layer == 0 and edges.writes(0):
            hooks.append((EMBEDDED, Order.LAST, partial(self._note, EMBEDDED, 0)))
        for layer in range(self.now.from_layer, graph.n_layers):
            block, before = f"blocks.{layer}", sources_before(graph, "head", layer)
            moved = [
                slot for slot in SLOTS if edges.moves(read_columns(graph, layer, slot), before)
            ]
            if moved:
                enter = partial(self._enter, layer, moved)
                hooks.append((f"{block}.hook_resid_pre", Order.LAST, enter))
            for slot in moved:
                read = partial(self._read_heads, layer, slot)
                hooks.append((self.adapter.read_point(layer, slot), Order.FIRST, read))
            row = graph.source_index(f"a{layer}.h0")
            if edges.writes(row, graph.n_heads):
                note = partial(self._note_heads, layer, row)
                hooks.append((self.adapter.heads_point(layer), Order.LAST, note))
            if graph.has_mlps:
                column, row = graph.destination_index(f"m{layer}"), graph.source_index(f"m{layer}")
                before = sources_before(graph, "mlp", layer)
                if edges.moves(range(column, column + 1), before):
                    read = partial(self.read, column, before)
                    hooks.append((f"{block}.mlp_input", Order.FIRST, read))
                if edges.writes(row):
                    name = f"{block}.hook_mlp_out"
                    hooks.append((name, Order.LAST, partial(self._note, name, row)))
        last = len(graph.destinations) - 1
        if edges.moves(range(last, last + 1), len(graph.sources)):
            name = f"blocks.{graph.n_layers - 1}.hook_resid_post"
            hooks.append((name, Order.LAST, self.read_logits))
        return hooks

    def _none_yet(self) -> SourceChanges:
        """What sources before the first layer of a pass changed."""
        changes = SourceChanges(self.edges, self.spans)
        if self.now.changes is not None:
            before = sources_before(self.graph, "head", self.now.from_layer)
            changes.start_after(self.now.changes[:before])
        return changes

    def _start(self, cached: Int[Tensor, ""]) -> None:
        """Start a pass after the cached columns; not necessarily the first under these gates."""
        self.now.start = int(cached)
        if self._ran:
            self._changes = self._none_yet()
        self._ran = True

    def read_logits(
        self, residual: Float[Tensor, "rows pos d_model"]
    ) -> Float[Tensor, "rows pos d_model"]:
        """What the logits read, from the final residual stream."""
        return self.read(len(self.graph.destinations) - 1, len(self.graph.sources), residual)

    def read(
        self, column: int, before: int, residual: Float[Tensor, "rows pos d_model"]
    ) -> Float[Tensor, "rows pos d_model"]:
        """What one destination reads, replacing the residual stream."""
        shared = self._changes.without_closed(before, residual)
        return self._changes.reads([column], shared)[:, 0].reshape(residual.shape)

    # ---- reading ---------------------------------------------------------------------------------

    def _enter(
        self, layer: int, slots: Sequence[str], residual: Float[Tensor, "rows pos d_model"]
    ) -> Float[Tensor, "rows pos d_model"]:
        """Keep what the reads of a layer's heads share; compute reads that differ for many heads.

        Handles q, k and v together, as reading the sources' writes from memory dominates the cost.
        """
        before = sources_before(self.graph, "head", layer)
        shared = self._shared = self._changes.without_closed(before, residual)
        columns = {slot: read_columns(self.graph, layer, slot) for slot in slots}
        many = {slot: places for slot, places in columns.items() if self._many(places)}
        if many:
            reads = self._changes.reads([*chain(*many.values())], shared)
            counts = [len(places) for places in many.values()]
            self._made = dict(zip(many, reads.split(counts, dim=1), strict=True))
        moved = shared is not residual and len(many) < len(slots)
        self._normed = self.adapter.norm(layer, "attn")(shared) if moved else None
        return residual  # unchanged: the model, and autograd, continue from this very tensor

    def _many(self, columns: range) -> bool:
        """Whether enough heads have weighted edges to compute their reads as a batch."""
        weighted = self.edges.weighted(columns)
        return self.edges.learned or int(weighted.count_nonzero()) > _FEW * weighted.numel()

    def _read_heads(
        self, layer: int, slot: str, value: Float[Tensor, "rows pos head d_head"]
    ) -> Float[Tensor, "rows pos head d_head"]:
        """The value at `Adapter.read_point` (q, k or v in most models), from the heads' reads."""
        norm = self.adapter.norm(layer, "attn")
        weight, bias = self.adapter.qkv(layer, slot)  # type: ignore[arg-type]
        if slot in self._made:
            reads = norm(self._made.pop(slot).unflatten(-1, self._shape()))
            flat = rearrange(reads, "stack head batch pos d -> head (stack batch pos) d")
            out = torch.baddbmm(bias.to(flat.dtype)[:, None], flat, weight.to(flat.dtype))
            pattern, n_rows = "head (rows pos) d_head -> rows pos head d_head", len(self._shared)
            return rearrange(out, pattern, rows=n_rows).to(value.dtype)
        if self._normed is not None:
            normed = self._normed
            out = torch.einsum("rpd,hde->rphe", normed, weight.to(normed.dtype))
            value = (out + bias.to(normed.dtype)).to(value.dtype)
        columns = read_columns(self.graph, layer, slot)
        stack, head = self.edges.weighted(columns).nonzero().unbind(dim=1)
        if not len(head):
            return value
        reads = norm(self._changes.few_reads(columns, self._shared, stack, head))
        flat = rearrange(reads, "part batch pos d -> part (batch pos) d")
        out = torch.baddbmm(
            bias[head].to(flat.dtype)[:, None], flat, weight[head].to(flat.dtype)
        ).unflatten(1, self._shape()[:2])
        stacked = value.unflatten(0, (self.now.n_stack, -1)).clone()
        stacked[stack, :, :, head] = out.to(value.dtype)
        return stacked.flatten(0, 1)

    def _shape(self) -> tuple[int, int, int]:
        """Prompts, positions and d_model."""
        rows, pos, d_model = self._shared.shape
        return rows // self.now.n_stack, pos, d_model

    # ---- writing ------------------------------------------------------------------------------

    def _note(
        self, name: str, row: int, value: Float[Tensor, "rows pos d_model"]
    ) -> Float[Tensor, "rows pos d_model"]:
        change = self.patch.change(name, value, self.now.n_stack, self.now.start)
        if self.edges.separated(row):
            self._changes.append(change[None])
        if self.edges.closes(row):
            self._changes.add(row, self._changes.where_closed(row, change[:, :, None])[:, :, 0])
        return value

    def _note_heads(
        self, layer: int, first: int, z: Float[Tensor, "rows pos head d_head"]
    ) -> Float[Tensor, "rows pos head d_head"]:
        name = self.adapter.heads_point(layer)
        change = self.patch.change(name, z, self.now.n_stack, self.now.start)
        heads = [row - first for row in self.edges.separated(first, self.graph.n_heads)]
        if heads:
            self._changes.append(self.adapter.heads_written(layer, change, heads=heads))
        if self.edges.closes(first, self.graph.n_heads):
            weight = self.adapter.W_O(layer).to(z.dtype).flatten(0, 1)
            self._changes.add(first, self._changes.where_closed(first, change).flatten(2) @ weight)
        return z


@dataclass(frozen=True)
class EdgesOfNeurons(CircuitEdges):
    """Circuit edges from one MLP, whose patch differs in every setting of a stack."""

    layer: int = 0
    """The layer of the MLP, in which passes start."""

    def first_layer(self, adapter: Adapter, differ: Tensor) -> int:
        return self.layer


class NeuronPatch(PatchValues):
    """The clean output of an MLP, with the parts of some neurons patched, one in each setting.

    Args:
        adapter: adapter of the model.
        layer: layer of the MLP.
        moved: patched minus clean coefficient of each neuron's direction.
        directions: the direction that each neuron writes.
    """

    def __init__(
        self,
        adapter: Adapter,
        layer: int,
        moved: Float[Tensor, "batch pos neuron"],
        directions: Float[Tensor, "neuron d_model"],
    ) -> None:
        super().__init__(adapter, (), "zero")
        self._name = f"blocks.{layer}.hook_mlp_out"
        self._moved, self._directions = moved, directions
        self.neurons: Int[Tensor, " setting"] = torch.zeros(0, dtype=torch.long)
        """The neurons that are patched, one for each setting of the stack."""

    def change(self, name: str, value: Tensor, n_stack: int = 1, start: int = 0) -> Tensor:
        """See `PatchValues`; where no neuron is patched, the patch is the activation itself."""
        if name != self._name or not len(self.neurons):
            return torch.zeros_like(value)
        # A pass may include the setting that it starts from, which closes no edge.
        neurons = self.neurons[torch.arange(n_stack) % len(self.neurons)]
        moved = self._moved[..., neurons].movedim(-1, 0)[..., None]
        change = moved * self._directions[neurons][:, None, None]
        return change.flatten(0, 1).to(value)
