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
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sparse_tl.calls.scopes import autograd, scope
from sparse_tl.lens.core.lora import BASE, NAME, is_lora


@scope
def merged_lora(model: nn.Module, dtype: torch.dtype | None) -> Iterator[Callable[[], None]]:
    """Inside the block, adapters act through merged weights, and frozen linear maps are converted.

    Args:
        model: a model whose weights are on one device. Where it has adapters, nothing else of its
            projections is trained.
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
                module.forward = _Map(module, dtype)
                changed.append(module)

        def merge() -> None:
            for adapter in maps:
                adapter.merge()

        merge()
        yield merge
    finally:
        for module in changed:
            del module.forward


class _Map:
    """A frozen linear map ``x W + b`` in a type of its own."""

    def __init__(self, module: Any, dtype: torch.dtype | None) -> None:
        weight, bias = module.weight.detach(), module.bias
        weight = weight if isinstance(module, Conv1D) else weight.T
        self.weight = weight.to(dtype or weight.dtype)
        self.bias = None if bias is None else bias.detach().to(self.weight.dtype)

    def __call__(self, x: Float[Tensor, "*row n_in"]) -> Float[Tensor, "*row n_out"]:
        return self.product(self.rows(x)).view(*x.shape[:-1], -1)

    def rows(self, x: Float[Tensor, "*row n_in"]) -> Float[Tensor, "rows n_in"]:
        return x.to(self.weight.dtype).reshape(-1, len(self.weight))

    def product(self, rows: Float[Tensor, "rows n_in"]) -> Float[Tensor, "rows n_out"]:
        if self.bias is None:
            return torch.mm(rows, self.weight)
        return torch.addmm(self.bias, rows, self.weight)


class _Adapted(_Map):
    """A projection with its adapter merged into the weight."""

    def __init__(self, layer: Any, dtype: torch.dtype | None) -> None:
        base = getattr(layer, BASE)
        self.layer, self.scale = layer, layer.scaling[NAME]
        self.plain = _Map(base, dtype)
        self.bias = self.plain.bias
        self.a, self.b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
        self.known_a, self.known_b = self.a.detach(), self.b.detach()
        self.a_T = self.known_a.T
        # Everything in the memory layout of the weight: copies across layouts are slow.
        weight = base.weight.detach()
        transposed = isinstance(base, Conv1D)
        factors = (self.a_T, self.known_b.T) if transposed else (self.known_b, self.known_a)
        self.factors = weight.to(self.a.dtype), *factors
        self.merged = torch.empty_like(weight, dtype=self.plain.weight.dtype)
        self.weight = self.merged if transposed else self.merged.T
        self.weight_T = self.weight.T

    @autograd(False)
    def merge(self) -> None:
        if self.merged.dtype == self.a.dtype:
            torch.addmm(*self.factors, alpha=self.scale, out=self.merged)
        else:
            self.merged.copy_(torch.addmm(*self.factors, alpha=self.scale))

    def __call__(self, x: Float[Tensor, "*row n_in"]) -> Float[Tensor, "*row n_out"]:
        if self.layer.disable_adapters:
            return self.plain(x)
        return _Merged.apply(x, self.a, self.b, self)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, adapted: _Adapted
    ) -> Tensor:
        rows = adapted.rows(x)
        ctx.shape, ctx.dtype, ctx.adapted = x.shape, x.dtype, adapted
        ctx.save_for_backward(rows)
        return adapted.product(rows).view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_output: Tensor) -> Any:  # type: ignore[override]
        (rows,), adapted = ctx.saved_tensors, ctx.adapted
        g = by_output.to(rows.dtype).reshape(-1, adapted.weight.shape[1])
        by_x = by_a = by_b = None
        if ctx.needs_input_grad[0]:
            by_x = (g @ adapted.weight_T).view(ctx.shape).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            known = (adapted.known_a, adapted.known_b, adapted.a_T)
            a, b, a_T = (some.to(rows.dtype) for some in known)
            how = {"beta": 0, "alpha": adapted.scale}  # a and b only give the shapes
            by_a = torch.addmm(a, (g @ b).T, rows, **how).to(adapted.a.dtype)
            by_b = torch.addmm(b, g.T, rows @ a_T, **how).to(adapted.b.dtype)
        return by_x, by_a, by_b, None
