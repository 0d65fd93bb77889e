"""Gated attention in linear memory: patterns are computed, gated and used a few queries at a time.

Gates do not renormalise, so a query's output depends only on its own row of the pattern:

    output_i = sum_j A_ij p_ij v_j,    p_i = softmax(s_i),    s_i = q_i k^T and what the model adds

The backward pass recomputes each block of s, p and A, with the same noise. No tensor of the size of
the pattern is kept, so memory grows linearly with the number of tokens. Keys that the model masks
for all queries of a block, such as later tokens, are left out.

`torch.utils.checkpoint` on every block does the same with less code; at 2,048 tokens it takes 12 %
longer and 200 MB more, since the gradient of each slice of k and v is as large as k and v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.backend import AttentionMask, Block, Deferred, Expression, function_name
from sparse_tl.contexts import autograd
from sparse_tl.devices import SizeByDevice
from sparse_tl.gates.sparse.counting import Counted

QUERIES_AT_ONCE = 128
"""Queries per block; fewer would leave out more masked keys, in more and smaller products."""
EDGES_AT_ONCE = SizeByDevice(cpu=2**20, elsewhere=2**24)
"""Edges per block, but for those of one head in one prompt."""


@dataclass(eq=False)
class GatedAttention:
    """A layer's attention under gates.

    Args:
        pattern: attention pattern.
        scores: attention scores, if the gates read them.
        mask: the layer's mask; keys that it hides from every query of a block are left out.
        row: each query's term in the logits of its gates.
        gate: function of block, scores, pattern, query terms and generator that returns the block's
            gated pattern, and counts.
        generator: generator of the noise, on the device of the scores; None without noise.
    """

    pattern: Expression
    scores: Expression | None
    mask: AttentionMask
    row: Float[Tensor, "#prompt head #query 1"]
    gate: Callable[..., tuple[Tensor, Counted]]
    generator: torch.Generator | None
    _before: Tensor | None = field(default=None, init=False)

    @cached_property
    def leaves(self) -> list[Tensor]:
        """What enters the gated pattern besides q and k, each once."""
        read = [] if self.scores is None else self.scores.leaves
        return [*{id(leaf): leaf for leaf in [self.row, *read, *self.pattern.leaves]}.values()]

    def __call__(
        self, v: Float[Tensor, "prompt head key d_head"]
    ) -> tuple[Float[Tensor, "prompt head query d_head"], Counted]:
        """The heads' outputs, and the counts of `counted_edges`."""
        output, expected, cost, counts = _Attend.apply(
            self, *self.pattern.product.args, v, *self.leaves
        )
        smooth = {"expected": expected, "cost": cost}
        return output, counts | {name: sums for name, sums in smooth.items() if sums is not None}

    @cached_property
    def blocks(self) -> list[Block]:
        """All blocks, in order."""
        q, k = self.pattern.product.args
        n_prompts, n_heads, n_queries, _ = q.shape
        parts, found = [*_slices(n_queries, QUERIES_AT_ONCE)], []
        ranges = self.mask.keys_allowed(parts, (n_queries, k.shape[-1]))
        for queries, keys in zip(parts, ranges, strict=True):
            n_edges = (queries.stop - queries.start) * (keys.stop - keys.start)
            rows = max(1, EDGES_AT_ONCE.on(q.device) // n_edges)
            for prompts in _slices(n_prompts, max(1, rows // n_heads)):
                for heads in _slices(n_heads, rows):
                    found.append(Block(prompts, heads, queries, keys))
        return found

    def noise(self) -> torch.Generator | None:
        """A generator of the blocks' noise: of the same noise in every pass over them."""
        if self.generator is None:
            return None
        if self._before is None:  # states, unlike numbers, are read without waiting for a GPU
            self._before = self.generator.get_state()
            return self.generator
        return torch.Generator(self.generator.device).set_state(self._before)

    def on(
        self, block: Block, generator: Any, product: Tensor, leaves: Sequence[Tensor]
    ) -> tuple[Tensor, Counted]:
        """The gated pattern of a block and its counts, from that block of each input."""
        by_id = {id(leaf): part for leaf, part in zip(self.leaves, leaves, strict=True)}
        known = {id(self.pattern.product): product}
        scores = None if self.scores is None else self.scores.value(by_id, known)
        return self.gate(block, scores, self.pattern.value(by_id, known), leaves[0], generator)


class GatedPattern(Deferred):
    """The gated pattern of a layer, without storage; its product with v is computed by blocks."""

    attention: GatedAttention
    counts: list[Counted] | None
    """List to which the counts are appended once the pattern is used."""

    @classmethod
    def under(cls, attention: GatedAttention, counts: list[Counted] | None) -> GatedPattern:
        made = cls.of(attention.pattern)
        made.attention, made.counts = attention, counts
        return made

    def explicit(self) -> Tensor:
        """The values: the product with the identity matrix."""
        if self.computed is None:
            one = torch.eye(self.shape[3], dtype=self.dtype, device=self.device)
            self.computed = self.times(one.expand(*self.shape[:2], -1, -1))
        return self.computed

    def times(self, v: Tensor) -> Tensor:
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
            if name == "to":
                entry = torch.empty(0, dtype=pattern.dtype, device=pattern.device)
                if func(entry, *args[1:], **(kwargs or {})) is entry:
                    return pattern  # neither dtype nor device changes
        return super().__torch_function__(func, types, args, kwargs)


class _Attend(torch.autograd.Function):
    """The heads' outputs, from q, k, v, the query terms, and whatever else enters the scores."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, attention: GatedAttention, *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Counted]:
        q, _, v, *_ = tensors
        output = v.new_empty(*q.shape[:3], v.shape[-1])
        found: Counted = {}
        generator = attention.noise()
        for block in attention.blocks:
            q_here, k_here, v_here, *leaves = _parts(block, tensors)
            gated, counted = attention.on(block, generator, q_here @ k_here, leaves)
            output[block.prompts, block.heads, block.queries] = gated @ v_here
            for name, values in counted.items():
                axis, place = (2, block.queries) if name == "real" else (1, block.heads)
                total = found.setdefault(name, values.new_zeros(len(q), q.shape[axis]))
                total[block.prompts, place] += values
        device = q.device.type
        kind, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.autocast = partial(torch.autocast, device, kind, enabled, cache_enabled=False)
        ctx.attention = attention
        ctx.save_for_backward(*tensors)
        return output, found.pop("expected", None), found.pop("cost", None), found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, by_output: Tensor, by_expected: Any, by_cost: Any, _: Any
    ) -> tuple[Tensor | None, ...]:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        sums = [
            # In half precision, sums over many blocks would be rounded many times.
            torch.zeros_like(values, dtype=torch.promote_types(values.dtype, torch.float32))
            if need
            else values  # unused
            for values, need in zip(tensors, needed, strict=True)
        ]
        generator = ctx.attention.noise()
        for block in ctx.attention.blocks:
            inputs = [part.detach() for part in _parts(block, tensors)]
            for part, need in zip(inputs, needed, strict=True):
                part.requires_grad_(need)
            q, k, v, *leaves = inputs
            by_block = by_output[block.prompts, block.heads, block.queries]
            with ctx.autocast():
                with autograd(True):
                    gated, counted = ctx.attention.on(block, generator, q @ k, leaves)
                by_gated = (by_block @ v.mT).to(gated.dtype)
                by_v = gated.detach().mT @ by_block if needed[2] else None
            results, gradients = [gated], [by_gated]
            for name, by_count in (("expected", by_expected), ("cost", by_cost)):
                if name in counted and counted[name].requires_grad:
                    results.append(counted[name])
                    gradients.append(by_count[block.prompts, block.heads])
            wanted = [i for i, need in enumerate(needed) if need and i != 2]
            found = torch.autograd.grad(
                results, [inputs[i] for i in wanted], gradients, allow_unused=True
            )
            totals = _parts(block, sums)
            for i, part in [*zip(wanted, found, strict=True), (2, by_v)]:
                if part is not None:
                    totals[i].add_(part)
        by_tensor = [
            total.to(values.dtype) if need else None
            for total, values, need in zip(sums, tensors, needed, strict=True)
        ]
        return None, *by_tensor


def _parts(block: Block, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The block of q, k, v and of what else enters, which broadcasts to the pattern; as views."""
    q, k, v, *leaves = tensors
    return [
        q[block.prompts, block.heads, block.queries],
        k[block.prompts, block.heads, :, block.keys],
        v[block.prompts, block.heads, block.keys],
        *map(block.of, leaves),
    ]


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
