"""Gated patterns without storage, used block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.gates.blockwise import GatedAttention
from sparse_tl.gates.passes import Counted
from sparse_tl.lens import Deferred, function_name


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


def _is_same(pattern: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a `to` with these arguments changes neither dtype nor device."""
    entry = torch.empty(0, dtype=pattern.dtype, device=pattern.device)
    changed = entry.to(*args, **kwargs)
    return (changed.dtype, changed.device) == (entry.dtype, entry.device)
