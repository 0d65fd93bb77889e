"""Gated attention in linear memory: patterns are computed, gated and used a few queries at a time.

Gates do not renormalise, so a query's output depends only on its own row of the pattern:

    output_i = sum_j A_ij p_ij v_j,    p_i = softmax(s_i),    s_i = q_i k^T and what the model adds

The backward pass recomputes each block of s, p and A, with the same noise. No tensor of the size of
the pattern is kept, so memory grows linearly with the number of tokens. Keys that the model masks
for all queries of a block, such as later tokens, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.calls.scopes import autograd
from sparse_tl.gates.passes import Counted
from sparse_tl.gates.sparse.straight_through import EDGES_AT_ONCE
from sparse_tl.lens import AttentionMask, Block, Deferred, Expression, function_name

QUERIES_AT_ONCE = 128
"""Queries per block; fewer would leave out more masked keys, in more and smaller products."""

SMOOTH = ("expected", "cost")
"""The counts that have a gradient."""

GateBlock = Callable[
    [Block, "Tensor | None", Tensor, Tensor, "torch.Generator | None"], tuple[Tensor, Counted]
]
"""Function of block, scores, pattern, query terms and generator: the gated pattern, and counts."""


@dataclass(frozen=True, eq=False)
class GatedAttention:
    """A layer's attention under gates.

    Args:
        pattern: attention pattern.
        scores: attention scores, if the gates read them.
        mask: the layer's mask; keys that it hides from every query of a block are left out.
        row: each query's term in the logits of its gates.
        gate: computes the gates of a block.
        seed: seed of the noise, from which each block seeds its generator; None without noise.
    """

    pattern: Expression
    scores: Expression | None
    mask: AttentionMask
    row: Float[Tensor, "#prompt head #query 1"]
    gate: GateBlock
    seed: int | None

    def __call__(
        self, v: Float[Tensor, "prompt head key d_head"]
    ) -> tuple[Float[Tensor, "prompt head query d_head"], Counted]:
        """The heads' outputs, and the counts of `attention_edges_of_layer`."""
        names: list[str] = []
        q, k = self.pattern.product.args
        read = [] if self.scores is None else self.scores.leaves
        leaves = {id(leaf): leaf for leaf in [self.row, *read, *self.pattern.leaves]}
        output, *found = _Attend.apply(self, names, q, k, v, *leaves.values())
        return output, dict(zip(names, found, strict=True))

    def blocks(self) -> Iterator[tuple[Block, torch.Generator | None]]:
        """All blocks in order, and the generators of their noise."""
        q, k = self.pattern.product.args
        n_prompts, n_heads, n_queries, _ = q.shape
        number = 0
        for first in range(0, n_queries, QUERIES_AT_ONCE):
            queries = slice(first, min(first + QUERIES_AT_ONCE, n_queries))
            keys = self.mask.keys_allowed(queries, (n_queries, k.shape[-1]), q.device)
            n_edges = (queries.stop - first) * (keys.stop - keys.start)
            rows = max(1, EDGES_AT_ONCE.on(q.device) // n_edges)
            heads = min(rows, n_heads)
            for prompts in _slices(n_prompts, max(1, rows // n_heads)):
                for some in _slices(n_heads, heads):
                    generator = None
                    if self.seed is not None:
                        generator = torch.Generator(q.device).manual_seed(self.seed + number)
                    number += 1
                    yield Block(prompts, some, queries, keys), generator

    def on(
        self,
        block: Block,
        generator: torch.Generator | None,
        product: Tensor,
        leaves: dict[int, Tensor],
    ) -> tuple[Tensor, Counted]:
        """The gated pattern of a block and its counts, from that block of each input."""
        known = {id(self.pattern.product): product}
        scores = None if self.scores is None else self.scores.value(leaves, known)
        pattern = self.pattern.value(leaves, known)
        return self.gate(block, scores, pattern, leaves[id(self.row)], generator)


class GatedPattern(Deferred):
    """The gated pattern of a layer, without storage; its product with v is computed by blocks."""

    attention: GatedAttention
    counts: list[Counted] | None

    @classmethod
    def under(
        cls, attention: GatedAttention, pattern: Deferred, counts: list[Counted] | None
    ) -> GatedPattern:
        """A pattern under gates.

        Args:
            attention: the layer's attention under gates.
            pattern: the pattern without gates.
            counts: list to which counts are appended once the pattern is used.
        """
        made = cls.of(pattern.expression)
        made.attention, made.counts = attention, counts
        return made

    def explicit(self) -> Tensor:
        """The values: the product with the identity matrix."""
        if self.computed is None:
            n_prompts, n_heads, _, n_keys = self.shape
            one = torch.eye(n_keys, dtype=self.dtype, device=self.device)
            self.computed = self.times(one.expand(n_prompts, n_heads, -1, -1))
        return self.computed

    def times(
        self, v: Float[Tensor, "prompt head key d_head"]
    ) -> Float[Tensor, "prompt head query d_head"]:
        """The product with values of all keys."""
        output, counted = self.attention(v)
        if self.counts is not None:
            self.counts.append(counted)
            self.counts = None
        return output

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        pattern, name = args[0] if args else None, function_name(func)
        if isinstance(pattern, GatedPattern) and pattern.computed is None:
            if name == "matmul" and len(args) == 2 and args[1].ndim == 4 and not kwargs:
                return pattern.times(args[1])
            if name == "to" and _is_same(pattern, args[1:], kwargs or {}):
                return pattern
        return super().__torch_function__(func, types, args, kwargs)


class _Attend(torch.autograd.Function):
    """The heads' outputs, from q, k, v, the query terms, and whatever else enters the scores."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, attention: GatedAttention, names: list[str], *tensors: Tensor
    ) -> Any:
        q, k, v, *leaves = tensors
        output = v.new_empty(*q.shape[:3], v.shape[-1])
        found: dict[str, Tensor] = {}
        for block, generator in attention.blocks():
            product = _queries(q, block) @ _columns(k, block)
            parts = {id(leaf): block.of(leaf) for leaf in leaves}
            gated, counted = attention.on(block, generator, product, parts)
            output[block.prompts, block.heads, block.queries] = gated @ _keys(v, block)
            for name, values in counted.items():
                if name not in found:
                    size = q.shape[2] if name == "real" else q.shape[1]
                    found[name] = values.new_zeros(q.shape[0], size)
                if name == "real":
                    found[name][block.prompts, block.queries] = values
                else:
                    found[name][block.prompts, block.heads] += values
        names += found
        ctx.attention, ctx.names, ctx.leaves = attention, names, [id(leaf) for leaf in leaves]
        ctx.autocast = _autocast(q.device.type)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(found[name] for name in found if name not in SMOOTH))
        return output, *found.values()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_output: Tensor, *by_counts: Tensor) -> Any:  # type: ignore[override]
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        by_count = dict(zip(ctx.names, by_counts, strict=True))
        views = [_queries, _columns, _keys, *[_leaf] * len(ctx.leaves)]
        sums: list[Tensor | None] = [
            # In half precision, sums over many blocks would be rounded many times.
            torch.zeros_like(values, dtype=torch.promote_types(values.dtype, torch.float32))
            if need
            else None
            for values, need in zip(tensors, needed, strict=True)
        ]
        for block, generator in ctx.attention.blocks():
            each = zip(views, tensors, needed, strict=True)
            parts = [view(t, block).detach().requires_grad_(need) for view, t, need in each]
            q, k, v, *leaves = parts
            by_block = _queries(by_output, block)
            with ctx.autocast():
                with autograd(True):
                    by_id = dict(zip(ctx.leaves, leaves, strict=True))
                    gated, counted = ctx.attention.on(block, generator, q @ k, by_id)
                by_gated = (by_block @ v.mT).to(gated.dtype)
                by_v = gated.detach().mT @ by_block if needed[2] else None
            results = [(gated, by_gated)]
            results += [
                (counted[name], by_count[name][block.prompts, block.heads])
                for name in SMOOTH
                if name in counted and counted[name].requires_grad
            ]
            wanted = [i for i, need in enumerate(needed) if need and i != 2]
            found = torch.autograd.grad(
                [value for value, _ in results],
                [parts[i] for i in wanted],
                [by for _, by in results],
                allow_unused=True,
            )
            for i, part in [*zip(wanted, found, strict=True), (2, by_v)]:
                if part is not None and (total := sums[i]) is not None:
                    views[i](total, block).add_(part)
        found = [
            None if total is None else total.to(values.dtype)
            for total, values in zip(sums, tensors, strict=True)
        ]
        return None, None, *found


def _is_same(pattern: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a `to` with these arguments changes neither dtype nor device."""
    entry = torch.empty(0, dtype=pattern.dtype, device=pattern.device)
    changed = entry.to(*args, **kwargs)
    return (changed.dtype, changed.device) == (entry.dtype, entry.device)


def _queries(values: Tensor, block: Block) -> Tensor:
    return values[block.prompts, block.heads, block.queries]


def _keys(values: Tensor, block: Block) -> Tensor:
    return values[block.prompts, block.heads, block.keys]


def _columns(values: Tensor, block: Block) -> Tensor:
    return values[block.prompts, block.heads, :, block.keys]


def _leaf(values: Tensor, block: Block) -> Tensor:
    return block.of(values)


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """A context manager factory that restores the current autocast settings."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype, enabled=enabled, cache_enabled=False)
