"""A model under a mask of circuit edges: the one forward pass that all circuits are measured by.

Every destination v reads

    input_v = patched_v + sum_u keep[u, v] (now_u - patch_u),

where ``now_u`` is what source u writes under the mask, ``patch_u`` what the patch writes, and
``patched_v`` the residual stream at v if everything were patched. Kept everywhere this is the clean
run, nowhere the patched one. Normalisation is recomputed at every destination.

What all masks share (clean and patched streams, ``patched_v``) is computed once. Sources before
the first changed destination write what they wrote before, so a pass may start there: after the
clean run, or after the run under a mask of one's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sparse_tl.graph import CircuitGraph, Destination
from sparse_tl.lens.attaching import HookFunction, Order, attached
from sparse_tl.lens.points import HookedModel, layer_points
from sparse_tl.lens.reading import normalised, projected
from sparse_tl.lens.streams import Streams, Tape, logits_at
from sparse_tl.nodes import Node

Mask = Bool[Tensor, "source destination"] | Float[Tensor, "source destination"]


class MaskedRun:
    """One batch of prompts, to be run under any number of masks.

    Args:
        model: dense or sparse; it is not changed.
        graph: its graph.
        tokens: the clean prompts.
        positions: whose logits are read, one per prompt.
        patched: what the patch writes; None for nothing.

    Attributes:
        clean_logits: of the whole model.
        patch: what the patch writes.
        written: what the sources write in the clean run, minus the patch.
        residuals: what enters each layer in the clean run.
        final: what the logits read in the clean run.
    """

    def __init__(
        self,
        model: HookedModel,
        graph: CircuitGraph,
        tokens: Int[Tensor, "batch pos"],
        positions: Int[Tensor, " batch"],
        patched: Streams | None,
    ) -> None:
        self.model, self.graph = model, graph
        self.tokens, self.positions = tokens, positions
        tape = Tape(model, graph)
        self.clean_logits = tape.run(tokens, positions)
        change = tape.streams.change_to(patched)
        self.patch = tape.streams.each(torch.add, change)
        self.written = change.outputs(model, graph).neg_()
        self.residuals = [reads.attention_residual for reads in tape.layers]
        self.final = tape.final
        self._patched = self._everything_patched(tape)
        self._now = _Written(self.written)

    @torch.no_grad()
    def _everything_patched(
        self, clean: Tape
    ) -> dict[Destination, Float[Tensor, "batch pos d_model"]]:
        """The residual stream at each place where it is read, if all sources were patched."""
        places: dict[Destination, Tensor] = {}
        for layer, reads in enumerate(clean.layers):
            places[Destination(Node("head", layer), "q")] = reads.attention_residual
            if reads.mlp_residual is not None:
                places[Destination(Node("mlp", layer))] = reads.mlp_residual
        places[Destination(Node("logits"))] = clean.final
        total, done = torch.zeros_like(clean.final), 0
        for place, residual in places.items():
            before = self.graph.n_sources_before(place.node)
            total = total + self.written[done:before].sum(dim=0)
            places[place], done = residual.detach() - total, before
        return places

    def patched_logits(self) -> Float[Tensor, "batch vocab"]:
        """Logits with every edge patched."""
        final = self._patched[Destination(Node("logits"))]
        return logits_at(self.model, final, self.positions)

    def logits(self, keep: Mask, *, first_layer: int = 0) -> Float[Tensor, "batch vocab"]:
        """Logits under a mask; differentiable in the mask where gradients are on.

        Args:
            keep: 1 keeps an edge, 0 patches it; values between interpolate.
            first_layer: layers before this one are not run: up to there the mask must agree with
                that of `start_from`, which keeps all edges unless told otherwise. The number of
                layers asks for the logits' own edges alone.
        """
        keep = keep.to(self.written)
        self._now.restart(self.graph.n_sources_before(Node("head", first_layer)))
        if first_layer < self.graph.n_layers:
            with attached(self.model, self._hooks(first_layer, keep)), _Norms(self, keep):
                self._run_from(first_layer)
        final = self._read(Destination(Node("logits")), 1, keep)[0]
        return logits_at(self.model, final, self.positions)

    def head_logits(
        self, keep: Bool[Tensor, "layer head"], *, first_layer: int = 0
    ) -> Float[Tensor, "batch vocab"]:
        """Logits with some heads patched at ``hook_z``; all else is computed from what comes.

        Args:
            keep: the heads that are not patched.
            first_layer: as of `logits`.
        """
        keep = keep.to(self.written.device)[:, None, None, :, None]

        def patch(layer: int, z: Tensor) -> Tensor:
            return torch.where(keep[layer], z, self.patch.z[layer])

        if first_layer == self.graph.n_layers:
            return self.clean_logits
        names = layer_points(self.model, "attn.hook_z")
        changed = [layer for layer in range(self.graph.n_layers) if not keep[layer].all()]
        hooks = [(names[layer], Order.LAST, partial(patch, layer)) for layer in changed]
        with attached(self.model, hooks):
            final = self._run_from(first_layer)
        return logits_at(self.model, final, self.positions)

    @torch.no_grad()
    def start_from(self, keep: Mask | Bool[Tensor, "layer head"]) -> Float[Tensor, "batch vocab"]:
        """Logits under a mask of edges or heads, whose state later passes may start from."""
        if keep.shape == self.graph.exists.shape:
            logits = self.logits(keep)
            self._now.settle()
            return logits
        entering: list[Tensor] = []
        names = layer_points(self.model, "hook_resid_pre")
        with attached(self.model, [(name, Order.LAST, entering.append) for name in names]):
            logits = self.head_logits(keep)
        self.residuals = entering
        return logits

    def _run_from(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """The final residual stream, from a layer on, with what enters it in the clean run."""
        n_layers = self.graph.n_layers
        if layer == 0:
            return self.model(self.tokens, stop_at_layer=n_layers)
        return self.model(self.residuals[layer], start_at_layer=layer, stop_at_layer=n_layers)

    def _hooks(self, first_layer: int, keep: Tensor) -> list[tuple[str, Order, HookFunction]]:
        hooks: list[tuple[str, Order, HookFunction]] = []

        def add(suffix: str, order: Order, function: Callable[..., Tensor | None]) -> None:
            names = layer_points(self.model, suffix)
            for layer in range(first_layer, self.graph.n_layers):
                hooks.append((names[layer], order, partial(function, layer)))

        for slot in "qkv":
            add(f"attn.hook_{slot}", Order.FIRST, partial(self._replace, slot=slot, keep=keep))
        add("attn.hook_z", Order.LAST, self._note_heads)
        if self.graph.has_mlps:
            add("hook_mlp_out", Order.LAST, self._note_mlp)
        return hooks

    def _replace(self, layer: int, value: Tensor, *, slot: str, keep: Tensor) -> Tensor:
        """What the heads of a layer compute from what they read."""
        kind = "head" if slot == "q" or self.graph.n_heads == self.graph.n_kv_heads else "kv_head"
        n_readers = self.graph.n_heads if slot == "q" else self.graph.n_kv_heads
        first = Destination(Node(kind, layer), slot)  # type: ignore[arg-type]
        read = self._read(first, n_readers, keep)
        normed = normalised(self.model, self.model.blocks[layer].ln1, read)
        return projected(self.model, layer, slot, normed).to(value.dtype)

    def _read(
        self, first: Destination, count: int, keep: Tensor
    ) -> Float[Tensor, "destination batch pos d_model"]:
        """The residual stream at neighbouring destinations, under the mask."""
        column = self.graph.destination_index(first)
        place = first if first.slot is None else Destination(Node("head", first.node.layer), "q")
        patched = self._patched[place]
        before = self.graph.n_sources_before(first.node)
        weights = keep[:before, column : column + count].T
        flat = torch.addmm(patched.flatten(), weights, self._now.first(before).flatten(1))
        return flat.view(count, *patched.shape)

    def _note_heads(self, layer: int, z: Tensor) -> None:
        weight = self.model.blocks[layer].attn.W_O
        change = rearrange(z - self.patch.z[layer], "b p head d_head -> head (b p) d_head")
        written = torch.bmm(change, weight.to(z.dtype))
        self._now.append(written.view(len(weight), *z.shape[:2], -1))

    def _note_mlp(self, layer: int, value: Tensor) -> None:
        self._now.append((value - self.patch.mlp[layer])[None])


class _Norms:
    """Replaces what every MLP's normalisation reads, where not every kind has a hook point."""

    def __init__(self, run: MaskedRun, keep: Tensor) -> None:
        self.run, self.keep = run, keep
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        for layer in range(self.run.graph.n_layers if self.run.graph.has_mlps else 0):

            def replace(module: nn.Module, args: Any, layer: int) -> tuple[Tensor]:
                read = self.run._read(Destination(Node("mlp", layer)), 1, self.keep)
                return (read[0],)

            norm = self.run.model.blocks[layer].ln2
            self.handles.append(norm.register_forward_pre_hook(partial(replace, layer=layer)))

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()


class _Written:
    """What the sources write under a mask, minus the patch, in the graph's order.

    Starts from the clean run, or a settled one. Without gradients rows are overwritten in one
    buffer, since copying all sources for every read would cost more than the model does; with
    gradients they are joined.
    """

    def __init__(self, start: Float[Tensor, "source batch pos d_model"]) -> None:
        self._start = start
        self._buffer: Tensor | None = None
        self._valid = 0
        self._parts: list[Tensor] = []
        self._rows = 0

    def restart(self, rows: int) -> None:
        """Begin a pass whose first sources are those of the start."""
        self._rows = rows
        if torch.is_grad_enabled():
            self._parts = [self._start[:rows]]
            return
        self._parts = []
        if self._buffer is None:
            self._buffer = torch.empty_like(self._start)
        if self._valid < rows:
            self._buffer[self._valid : rows] = self._start[self._valid : rows]
        self._valid = rows

    def settle(self) -> None:
        """Later passes begin with what the last one wrote."""
        assert self._buffer is not None
        self._start, self._buffer, self._valid = self._buffer, None, 0

    def append(self, part: Float[Tensor, "some batch pos d_model"]) -> None:
        """The next sources."""
        if self._parts:
            self._parts.append(part)
        else:
            assert self._buffer is not None
            self._buffer[self._rows : self._rows + len(part)] = part
        self._rows += len(part)

    def first(self, rows: int) -> Float[Tensor, "source batch pos d_model"]:
        """The first sources; they must have been written."""
        if self._parts:
            self._parts = [torch.cat(self._parts)]
            return self._parts[0][:rows]
        assert self._buffer is not None
        return self._buffer[:rows]
