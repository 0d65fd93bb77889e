"""Many single patches in one forward pass: each block of rows has one edge or head patched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sparse_tl.graph import Edge, Node
from sparse_tl.lens.attaching import HookFunction, Order, attached
from sparse_tl.lens.masked import MaskedRun
from sparse_tl.lens.points import HookedModel
from sparse_tl.lens.reading import normalised, projected
from sparse_tl.lens.streams import logits_at


def logits_patched_alone(
    run: MaskedRun, parts: Sequence[Edge | Node], layer: int
) -> Float[Tensor, "part batch vocab"]:
    """Logits with each part patched alone.

    Only one part of a row is patched, so everything after it is the model's own forward pass, and
    everything before it is the clean run's.

    Args:
        run: the prompts, with what their sources write and are patched with.
        parts: circuit edges into this layer, or its heads.
        layer: where the pass starts; the number of layers for edges into the logits.
    """
    model, n_parts = run.model, len(parts)
    if layer == run.graph.n_layers:
        final = torch.cat([run.final + _change(run, part) for part in parts])
    else:
        blocks = [_Block(run, part, index) for index, part in enumerate(parts)]
        entering = run.residuals[layer].repeat(n_parts, 1, 1)
        with attached(model, _hooks(blocks, layer)), _mlp_reads(model, blocks, layer):
            n_layers = run.graph.n_layers
            final = model(entering, start_at_layer=layer, stop_at_layer=n_layers)
    logits = logits_at(model, final, run.positions.repeat(n_parts))
    return logits.view(n_parts, len(run.positions), -1)


@dataclass(frozen=True)
class _Block:
    """The rows in which one part is patched."""

    run: MaskedRun
    part: Edge | Node
    index: int

    @property
    def rows(self) -> slice:
        size = len(self.run.positions)
        return slice(self.index * size, (self.index + 1) * size)


def _change(run: MaskedRun, part: Edge | Node) -> Float[Tensor, "batch pos d_model"]:
    assert isinstance(part, Edge)
    return -run.written[run.graph.source_index(part.source)]


def _hooks(blocks: Sequence[_Block], layer: int) -> list[tuple[str, Order, HookFunction]]:
    """One hook for each hook point that some part changes."""
    heads = [block for block in blocks if isinstance(block.part, Node)]
    hooks: list[tuple[str, Order, HookFunction]] = []
    if heads:
        name = f"blocks.{layer}.attn.hook_z"
        hooks.append((name, Order.FIRST, partial(_changed, heads, _patched_head)))
    for slot in "qkv":
        reading = [
            block
            for block in blocks
            if isinstance(block.part, Edge) and block.part.destination.slot == slot
        ]
        if reading:
            name = f"blocks.{layer}.attn.hook_{slot}"
            hooks.append((name, Order.FIRST, partial(_changed, reading, _patched_read)))
    return hooks


def _changed(
    blocks: Sequence[_Block], patched: Callable[[_Block], tuple[int, Tensor]], value: Tensor
) -> Tensor:
    """The activation with one head changed in the rows of each block."""
    value = value.clone()
    for block in blocks:
        head, changed = patched(block)
        value[block.rows, :, head] = changed.to(value.dtype)
    return value


def _patched_head(block: _Block) -> tuple[int, Float[Tensor, "batch pos d_head"]]:
    part, run = block.part, block.run
    assert isinstance(part, Node)
    patched = run.patch.z[part.layer][:, :, part.head]
    return part.head, patched.expand(len(run.positions), -1, -1)


def _patched_read(block: _Block) -> tuple[int, Float[Tensor, "batch pos d_head"]]:
    """q, k or v of the one head that reads the patched edge."""
    run, part = block.run, block.part
    assert isinstance(part, Edge) and part.destination.slot is not None
    layer, head = part.destination.node.layer, part.destination.node.head
    residual = run.residuals[layer] + _change(run, part)
    normed = normalised(run.model, run.model.blocks[layer].ln1, residual)
    return head, projected(run.model, layer, part.destination.slot, normed[None], head)[:, :, 0]


@contextmanager
def _mlp_reads(model: HookedModel, blocks: Sequence[_Block], layer: int) -> Iterator[None]:
    reading = [
        block
        for block in blocks
        if isinstance(block.part, Edge) and block.part.destination.node.kind == "mlp"
    ]

    def replace(module: nn.Module, args: Any) -> tuple[Tensor]:
        residual = args[0].clone()
        for block in reading:
            residual[block.rows] += _change(block.run, block.part)
        return (residual,)

    if not reading:
        yield
        return
    handle = model.blocks[layer].ln2.register_forward_pre_hook(replace)
    try:
        yield
    finally:
        handle.remove()
