"""Projections that compute with adapters merged into their weights, once per step of training.

With the merged weight ``W' = W + 2 B A``, a pass takes one product per projection, as without
adapters, in place of three, and keeps nothing but the projection's input. With the gradient ``g``
of the output ``y = W' x``,

    d / d x  =  W'^T g,      d / d A  =  2 (B^T g) x^T,      d / d B  =  2 g (A x)^T

so the gradient of ``W'`` itself, of the size of all weights, is never formed. Under autocast, the
frozen weights of all linear maps are converted once, instead of in every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sparse_tl.calls.scopes import autograd, scope
from sparse_tl.lens.core.lora import BASE, NAME, is_lora


@scope
def merged_lora(model: nn.Module, dtype: torch.dtype | None) -> Iterator[Callable[[], None]]:
    """Inside the block, adapters act through merged weights, and frozen linear maps are converted.

    Args:
        model: a model whose weights are on one device; other than adapters, its linear maps that
            need no gradient stay as they are.
        dtype: type that linear maps compute in; None for that of their weights.

    Yields:
        A function that merges the adapters anew; to be called whenever they have changed.
    """
    adapted = [m for m in model.modules() if is_lora(m)]
    inner = {id(part) for m in adapted for part in m.modules()}
    frozen: list[Any] = [
        m
        for m in model.modules()
        if isinstance(m, nn.Linear | Conv1D) and id(m) not in inner and not m.weight.requires_grad
    ]
    maps = [_Adapted(layer, dtype) for layer in adapted]
    changed: list[nn.Module] = []
    try:
        for layer, adapter in zip(adapted, maps, strict=True):
            layer.forward = adapter
            changed.append(layer)
        for module in frozen if dtype is not None else ():
            if module.weight.dtype != dtype:
                module.forward = _converted(module, dtype)
                changed.append(module)

        def merge() -> None:
            for adapter in maps:
                adapter.merge()

        merge()
        yield merge
    finally:
        for module in changed:
            del module.forward


class _Adapted:
    """The forward pass of a projection with an adapter."""

    def __init__(self, layer: Any, dtype: torch.dtype | None) -> None:
        self.layer, base = layer, getattr(layer, BASE)
        same = dtype in (None, base.weight.dtype)
        self.plain = base if same else _converted(base, dtype)
        self.a, self.b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
        self.bias = base.bias
        self.base = base.weight.T if isinstance(base, Conv1D) else base.weight
        self.scale = layer.scaling[NAME]
        self.merged = torch.empty_like(
            self.base, dtype=dtype or base.weight.dtype, memory_format=torch.contiguous_format
        )

    @autograd(False)
    def merge(self) -> None:
        exact = torch.addmm(self.base.to(self.a.dtype), self.b, self.a, alpha=self.scale)
        self.merged.copy_(exact)

    def __call__(self, x: Tensor) -> Tensor:
        if self.layer.disable_adapters:
            return self.plain(x)
        return _Merged.apply(x, self.a, self.b, self.merged, self.bias, self.scale)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None, scale: float
    ) -> Tensor:
        ctx.dtype, ctx.scale = x.dtype, scale
        x = x.to(weight.dtype)
        ctx.save_for_backward(x, a, b, weight)
        return F.linear(x, weight, None if bias is None else bias.to(weight.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_output: Tensor) -> Any:  # type: ignore[override]
        x, a, b, weight = ctx.saved_tensors
        by_output = by_output.to(weight.dtype)
        by_x = by_a = by_b = None
        if ctx.needs_input_grad[0]:
            by_x = (by_output @ weight).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            g, x = by_output.flatten(0, -2), x.flatten(0, -2)
            small_a, small_b = a.to(weight.dtype), b.to(weight.dtype)
            by_a = ((g @ small_b).T @ x).to(a.dtype).mul_(ctx.scale)
            by_b = (g.T @ (x @ small_a.T)).to(b.dtype).mul_(ctx.scale)
        return by_x, by_a, by_b, None, None, None


def _converted(module: Any, dtype: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    """The forward pass of a frozen linear map with its weights in another type."""
    weight = module.weight.detach()
    weight = (weight.T if isinstance(module, Conv1D) else weight).to(dtype).contiguous()
    bias = None if module.bias is None else module.bias.detach().to(dtype)
    return lambda x: F.linear(x.to(dtype), weight, bias)
