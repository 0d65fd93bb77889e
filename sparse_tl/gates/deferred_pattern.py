"""Patterns without storage: gated, or of a model without gates, and used block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.gates.blockwise import GatedAttention
from sparse_tl.gates.passes import Counted
from sparse_tl.lens import (
    AttachedHooks,
    Block,
    Deferred,
    DeferredScores,
    HookedModel,
    HookFunction,
    Order,
    adapt,
    function_name,
)
from sparse_tl.scopes import scope


class GatedPattern(Deferred):
    """The gated pattern of a layer without storage; its product with v is computed by blocks."""

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


@scope
def attention_by_blocks(model: HookedModel) -> Iterator[None]:
    """Inside the block, a model without gates computes attention of long prompts by blocks too."""
    adapter, scores = adapt(model), dict[int, Tensor]()

    def use(layer: int, pattern: Tensor) -> Tensor | None:
        read = scores.pop(layer)
        if not (isinstance(read, Deferred) and isinstance(pattern, Deferred)):
            return None
        bias = torch.zeros(adapter.n_heads, device=adapter.device)
        same = GatedAttention(read.expression, pattern.expression, bias, _ungated, None)
        return GatedPattern.under(same, pattern, None)

    names = zip(
        adapter.layer_points("attn.hook_attn_scores"),
        adapter.layer_points("attn.hook_pattern"),
        strict=True,
    )
    hooks: list[tuple[str, Order, HookFunction]] = []
    for layer, (score, pattern) in enumerate(names):
        hooks.append((score, Order.LAST, partial(scores.__setitem__, layer)))
        hooks.append((pattern, Order.FIRST, partial(use, layer)))
    attached = AttachedHooks(adapter, hooks)
    deferred = DeferredScores(adapter, attached)
    try:
        yield
    finally:
        deferred.remove()
        attached.remove()


def _ungated(
    _block: Block, _scores: Tensor, pattern: Tensor, _bias: Tensor, _generator: Any
) -> tuple[Tensor, Counted]:
    return pattern, {}


def _is_same(pattern: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a `to` with these arguments changes neither dtype nor device."""
    entry = torch.empty(0, dtype=pattern.dtype, device=pattern.device)
    changed = entry.to(*args, **kwargs)
    return (changed.dtype, changed.device) == (entry.dtype, entry.device)
