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

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.arguments import checked
from sparse_tl.backend import EMBEDDED, SLOTS, Adapter, Hook, Order, check_sums_under_hooks
from sparse_tl.data import Spans
from sparse_tl.gates.patches import PatchValues
from sparse_tl.gates.sites import GatedPass, Site
from sparse_tl.graph import CircuitGraph, Destination, Node

Residual = Float[Tensor, "rows pos d_model"]
ByHead = Float[Tensor, "rows pos head d_head"]
EdgeGates = Float[Tensor, "stack *span source destination"]

_MOST = 7 / 8
"""A source is closed as a whole if more than this share of its edges is closed."""
_FEW_READS = 0.5
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
    keeps_changes = True

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
        self, adapter: Adapter, gates: EdgeGates, patch: PatchValues, now: GatedPass
    ) -> list[Hook]:
        return _Hooks(self, adapter, gates, patch, now).hooks()

    def check(self, adapter: Adapter, tokens: Tensor | None) -> None:
        check_sums_under_hooks(adapter, tokens)

    def of_stream(self, gates: Tensor) -> Tensor:
        gates = gates.clone()
        gates[..., -1] = 1  # what the logits read differs from the residual stream
        return gates


@dataclass(frozen=True)
class EdgesOfNeurons(CircuitEdges):
    """Circuit edges from one MLP, whose patch differs in every setting of a stack."""

    layer: int = 0
    """The layer of the MLP, in which passes start."""

    def first_layer(self, adapter: Adapter, differ: Tensor) -> int:
        return self.layer


class NeuronPatch(PatchValues):
    """The clean output of an MLP, with the parts of some neurons patched, one in each setting.

    `moved`, ``[batch, pos, neuron]``, is the patched minus the clean coefficient of each of the
    `directions`, ``[neuron, d_model]``.
    """

    def __init__(self, adapter: Adapter, layer: int, moved: Tensor, directions: Tensor) -> None:
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


class _Hooks:
    """The hooks of stacked gates on circuit edges, for forward passes one after the other."""

    def __init__(
        self,
        site: CircuitEdges,
        adapter: Adapter,
        gates: Tensor,
        patch: PatchValues,
        now: GatedPass,
    ) -> None:
        self.adapter, self.graph, self.patch, self.now = adapter, adapter.graph, patch, now
        self.edges, self.spans = _Weights(adapter, gates, now.from_layer), site.spans
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
            block, before = f"blocks.{layer}", _sources_before(graph, "head", layer)
            moved = [
                slot for slot in SLOTS if edges.moves(_read_columns(graph, layer, slot), before)
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
                before = _sources_before(graph, "mlp", layer)
                if edges.moves(range(column, column + 1), before):
                    read = partial(self._read, column, before)
                    hooks.append((f"{block}.mlp_input", Order.FIRST, read))
                if edges.writes(row):
                    name = f"{block}.hook_mlp_out"
                    hooks.append((name, Order.LAST, partial(self._note, name, row)))
        last = len(graph.destinations) - 1
        if edges.moves(range(last, last + 1), len(graph.sources)):
            read = partial(self._read, last, len(graph.sources))
            hooks.append((f"blocks.{graph.n_layers - 1}.hook_resid_post", Order.LAST, read))
        return hooks

    def _none_yet(self) -> _Changes:
        """What sources before the first layer of a pass changed."""
        changes = _Changes(self.edges, self.spans)
        if self.now.changes is not None:
            before = _sources_before(self.graph, "head", self.now.from_layer)
            changes.start_after(self.now.changes[:before])
        return changes

    def _start(self, cached: int) -> None:
        """Start a pass after the cached columns; not necessarily the first under these gates."""
        self.now.start = cached
        if self._ran:
            self._changes = self._none_yet()
        self._ran = True

    def _read(self, column: int, before: int, residual: Residual) -> Residual:
        """What one destination reads, replacing the residual stream."""
        shared = self._changes.without_closed(before, residual)
        return self._changes.reads([column], shared)[:, 0]

    def _enter(self, layer: int, slots: Sequence[str], residual: Residual) -> Residual:
        """Keep what the reads of a layer's heads share; compute reads that differ for many heads.

        Handles q, k and v together, as reading the sources' writes from memory dominates the cost.
        """
        before = _sources_before(self.graph, "head", layer)
        shared = self._shared = self._changes.without_closed(before, residual)
        columns = {slot: _read_columns(self.graph, layer, slot) for slot in slots}
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
        return self.edges.learned or int(weighted.count_nonzero()) > _FEW_READS * weighted.numel()

    def _read_heads(self, layer: int, slot: str, value: ByHead) -> ByHead:
        """The value at `Adapter.read_point` (q, k or v in most models), from the heads' reads."""
        norm = self.adapter.norm(layer, "attn")
        weight, bias = self.adapter.qkv(layer, slot)  # type: ignore[arg-type]
        if slot in self._made:
            reads = norm(self._made.pop(slot))
            out = torch.einsum("rhpd,hde->rphe", reads, weight.to(reads.dtype))
            return (out + bias.to(out.dtype)).to(value.dtype)
        if self._normed is not None:
            normed = self._normed
            out = torch.einsum("rpd,hde->rphe", normed, weight.to(normed.dtype))
            value = (out + bias.to(normed.dtype)).to(value.dtype)
        columns = _read_columns(self.graph, layer, slot)
        stack, head = self.edges.weighted(columns).nonzero().unbind(dim=1)
        if not len(head):
            return value
        reads = norm(self._changes.few_reads(columns, self._shared, stack, head))
        flat = rearrange(reads, "part batch pos d -> part (batch pos) d")
        out = torch.baddbmm(
            bias[head].to(flat.dtype)[:, None], flat, weight[head].to(flat.dtype)
        ).unflatten(1, reads.shape[1:3])
        stacked = value.unflatten(0, (self.now.n_stack, -1)).clone()
        stacked[stack, :, :, head] = out.to(value.dtype)
        return stacked.flatten(0, 1)

    def _note(self, name: str, row: int, value: Residual) -> Residual:
        change = self.patch.change(name, value, self.now.n_stack, self.now.start)
        if self.edges.separated(row):
            self._changes.append(change[None])
        if self.edges.closes(row):
            self._changes.add(row, self._changes.where_closed(row, change[:, :, None])[:, :, 0])
        return value

    def _note_heads(self, layer: int, first: int, z: ByHead) -> ByHead:
        name = self.adapter.heads_point(layer)
        change = self.patch.change(name, z, self.now.n_stack, self.now.start)
        heads = [row - first for row in self.edges.separated(first, self.graph.n_heads)]
        if heads:
            self._changes.append(self.adapter.heads_written(layer, change, heads=heads))
        if self.edges.closes(first, self.graph.n_heads):
            weight = self.adapter.W_O(layer).to(z.dtype).flatten(0, 1)
            self._changes.add(first, self._changes.where_closed(first, change).flatten(2) @ weight)
        return z


class _Weights:
    """Closed edges under stacked gates: ``1 - gate[u, v] = source_closed[u] + weight[u, v]``.

    A source is closed as a whole where nearly all of its edges are closed. Few edges then have
    a weight other than 0, in small and in large circuits. With gates per span, a source is
    closed span by span; without, all tokens are one span. If gates require gradients, no source
    is closed as a whole, and every edge counts as weighted.
    """

    def __init__(self, adapter: Adapter, gates: EdgeGates, from_layer: int) -> None:
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

    def of(self, rows: range, columns: Sequence[int]) -> Float[Tensor, "stack span some n"]:
        """The weights of the edges from some separated sources to some destinations."""
        return self._weights[:, :, rows.start : rows.stop][..., _together(columns)]

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


class _Changes:
    """The patch of sources minus their writes, in the graph's order: separately, and as a sum.

    Separate changes are kept as ``[rows, source, pos, d_model]``: what the reads of a prompt add up
    is together in memory, which makes them up to twice as fast on a CPU. Without gradients,
    they go into one preallocated buffer, and only its first rows are read, up to the last in use.
    With gradients, they are read part by part, since each read keeps its input for the backward
    pass. Without spans, all tokens share the gates.
    """

    def __init__(self, edges: _Weights, spans: Spans | None) -> None:
        self.edges = edges
        self._n_stack = len(edges.source_closed)
        self._parts: list[Tensor] = []
        self._by_parts = edges.learned or torch.is_grad_enabled()
        self._filled = 0
        self._sum: Tensor | None = None
        self._waiting = deque[tuple[int, Tensor]]()
        self._spans = spans
        one_span = edges.source_closed.new_zeros(1, 1, dtype=torch.long)
        self._at = one_span if spans is None else spans.at  # without spans, one token for all

    def append(self, part: Float[Tensor, "some rows pos d_model"]) -> None:
        """Add the changes of the next separated sources."""
        self._check(len(part[0]) // self._n_stack, part.shape[2])
        part = part.movedim(0, 1)
        if self._by_parts:
            self._parts.append(part)
            return
        if not self._parts:
            shape = len(part), len(self.edges.rows), *part.shape[2:]
            self._parts = [part.new_empty(shape)]
        before, self._filled = self._filled, self._filled + part.shape[1]
        self._parts[0][:, before : self._filled] = part

    def where_closed(
        self, row: int, change: Float[Tensor, "rows pos some n"]
    ) -> Float[Tensor, "rows pos some n"]:
        """Changes of some sources where they are closed as a whole; 0 elsewhere."""
        stacked = change.unflatten(0, (self._n_stack, -1))
        self._check(*stacked.shape[1:3])
        closed = self.edges.source_closed[:, self._at, row : row + change.shape[2]]
        return (stacked * closed[..., None]).flatten(0, 1)

    def add(self, source: int, change: Residual) -> None:
        """Add to the sum the change of one source, or of several that start with it."""
        self._waiting.append((source, change))

    def start_after(self, changes: Float[Tensor, "source batch pos d_model"]) -> None:
        """Add the changes of all sources before the first layer that runs."""
        rows = self.edges.separated(0, len(changes))
        if rows:
            self.append(changes[rows].repeat(1, self._n_stack, 1, 1))
        if self.edges.closes(0, len(changes)):
            self._check(*changes.shape[1:3])
            closed = self.edges.source_closed[:, self._at, : len(changes)]
            self.add(0, torch.einsum("sbpu,ubpd->sbpd", closed, changes).flatten(0, 1))

    def without_closed(self, before: int, residual: Residual) -> Residual:
        """The residual stream, patched for the sources before `before` that are closed as a whole.

        `before` does not decrease between calls.
        """
        while self._waiting and self._waiting[0][0] < before:
            _, change = self._waiting.popleft()
            # Many small terms: half precision would lose them one by one.
            change = change.to(torch.promote_types(change.dtype, torch.float32))
            self._sum = change if self._sum is None else self._sum + change
        return residual if self._sum is None else (residual + self._sum).to(residual.dtype)

    def reads(
        self, columns: Sequence[int], shared: Residual
    ) -> Float[Tensor, "rows n pos d_model"]:
        """What n destinations, whose sources have all written, read under their own closed edges.

        `shared` is what `without_closed` returns.
        """
        reads = shared[:, None].expand(-1, len(columns), -1, -1)
        for rows, part in self._in_use(columns):
            weights = self.edges.of(rows, columns).mT
            changes = part.unflatten(0, (self._n_stack, -1))
            if self._spans is None:
                added = (weights @ changes.flatten(3)).view(*changes.shape[:2], *reads.shape[1:])
            else:
                added = (weights[:, self._at] @ changes.transpose(2, 3)).transpose(2, 3)
            reads = added.flatten(0, 1).add_(reads)  # in place: a new tensor takes as long again
        return reads

    def few_reads(
        self,
        columns: range,
        shared: Residual,
        stack: Int[Tensor, " part"],
        some: Int[Tensor, " part"],
    ) -> Float[Tensor, "part batch pos d_model"]:
        """What some of the destinations read under some of the settings; otherwise as `reads`."""
        stacked = shared.unflatten(0, (self._n_stack, -1))
        if self._n_stack == 1:
            chosen = [columns[index] for index in some.tolist()]
            return self.reads(chosen, shared).transpose(0, 1)
        reads = stacked[stack]
        for rows, changes in self._in_use(columns):
            weights = self.edges.of(rows, columns)[stack, :, :, some]
            part, row = (weights != 0).any(dim=1).nonzero().unbind(dim=1)
            stacks = changes.unflatten(0, (self._n_stack, -1))
            change = stacks[stack.to(part.device)[part], :, row]
            change = change * weights[part, :, row][:, self._at, None]
            reads = reads.index_add(0, part, change)
        return reads

    def _in_use(
        self, columns: Sequence[int]
    ) -> Iterator[tuple[range, Float[Tensor, "rows some pos d_model"]]]:
        """The rows up to the last that any of these destinations uses, by part that has one."""
        used = self.edges.used(columns)
        count = used[-1] + 1 if used else 0
        start = 0
        for part in self._parts:
            stop = min(start + part.shape[1], count)
            if bisect_left(used, start) < bisect_left(used, stop):
                # The gradient of a slice is as large as what it is taken from.
                whole = stop - start == part.shape[1]
                yield range(start, stop), part if whole else part[:, : stop - start]
            start += part.shape[1]

    def _check(self, batch: int, pos: int) -> None:
        if self._spans is not None and self._at.shape != (batch, pos):
            raise ValueError(
                f"expected to run the prompts that the gates' spans belong to, of shape "
                f"{tuple(self._at.shape)}; got {(batch, pos)}"
            )


@cache  # asked at every read
def _sources_before(graph: CircuitGraph, kind: Literal["head", "mlp"], layer: int) -> int:
    """Number of sources that write before the heads, or the MLP, of a layer read."""
    return graph.n_sources_before(Node(kind, layer))


@cache
def _read_columns(graph: CircuitGraph, layer: int, slot: str) -> range:
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
