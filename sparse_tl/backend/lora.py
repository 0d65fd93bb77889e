"""Low-rank adapters (LoRA) on the projections of a bridge.

A frozen projection ``W x`` becomes ``W x + 2 B A x``, with a trained A ``[rank, in]`` and B
``[out, rank]``. B starts at 0, so that adapters change nothing at first. They are put on the
modules that the bridge calls, not on the transformers model before it is wrapped: a bridge splits
joint projections (GPT-2's q, k and v), and an adapter on the joint one would never be read.

While training, adapters are merged into the weights once per step. With ``W' = W + 2 B A``, a pass
takes one product per projection in place of three, and keeps nothing but the projection's input.
With the gradient ``g`` of the output ``y = W' x``,

    d / d x  =  W'^T g,      d / d A  =  2 (B^T g) x^T,      d / d B  =  2 g (A x)^T

so the gradient of ``W'`` itself, of the size of all weights, is never formed.

Reference: arXiv 2106.09685.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformers.pytorch_utils import Conv1D

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.backend.hook_points import HookedModel, Model, hooks_on
from sparse_tl.backend.hooks import without_user_hooks
from sparse_tl.backend.numerics import HALVES

SCALE = 2
"""Factor of ``B A``."""
BASE = "base_layer"
"""The name of the original projection inside one with an adapter."""


class _Projection(nn.Module):
    """A frozen projection with an adapter."""

    def __init__(self, base: Any, rank: int) -> None:
        super().__init__()
        n_in, n_out = base.weight.shape if isinstance(base, Conv1D) else base.weight.T.shape
        self.in_features, self.out_features = n_in, n_out  # read by TransformerLens
        self.base_layer, self.enabled = base, True
        self.lora_A = nn.Linear(n_in, rank, bias=False)
        self.lora_B = nn.Linear(rank, n_out, bias=False)
        a, b = self.factors()
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        nn.init.zeros_(b)
        for parameter in (a, b):
            parameter.data = parameter.data.to(base.weight)
            if parameter.dtype in HALVES:
                parameter.data = parameter.data.float()  # small updates would be lost to rounding

    @property
    def weight(self) -> Tensor:
        """The frozen weight, whose dtype TransformerLens takes for that of the projection."""
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias, which TransformerLens reads from what it calls."""
        return self.base_layer.bias

    def factors(self) -> list[nn.Parameter]:
        """A and B."""
        return [*self.lora_A.parameters(), *self.lora_B.parameters()]

    def forward(self, x: Float[Tensor, "*row n_in"]) -> Float[Tensor, "*row n_out"]:
        plain = self.base_layer(x)
        if not self.enabled:
            return plain
        added = self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype)))
        return (plain + SCALE * added).to(plain.dtype)


@checked
def add_lora(model: Model, rank: AtLeastOne = 16) -> TransformerBridge:
    """Put a low-rank adapter on every projection of attention and MLPs, in place.

    All other weights are frozen: `post_train` then trains adapters and gates alone. Adapters change
    nothing at first, and start from the same values every time. `save_model` and copies of the
    model hold merged weights; the model itself keeps its adapters until `merge_lora`. For a base in
    half precision, adapters are float32.

    Args:
        model: TransformerBridge with unprocessed weights, as from `load_model`.
        rank: rank of every adapter.

    Returns:
        The model.

    Raises:
        ValueError: the model is not a TransformerBridge, already has adapters, or calls none of its
            projections.
    """
    if not takes_lora(model):
        raise ValueError(
            f"low-rank adapters need a TransformerBridge, which a {type(model).__name__} is not; "
            "load_model makes one from a name or a Hugging Face folder"
        )
    if has_adapters(model):
        raise ValueError(
            f"{model.cfg.model_name!r} has some already. Train those adapters, or make them part "
            "of its weights first: merge_lora(model)"
        )
    components = _projections(model)
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would also seed the GPUs
        components.sort(key=lambda one: isinstance(one.original_component, Conv1D))
        for component in components:
            component.set_original_component(_Projection(component.original_component, rank))
    return model


def takes_lora(model: Model) -> TypeGuard[TransformerBridge]:
    """Whether a model can have adapters."""
    return isinstance(model, TransformerBridge)


@checked
@torch.no_grad()
def merge_lora(model: Model) -> Model:
    """Merge low-rank adapters into the weights that they adapt, and remove them, in place.

    Does nothing to a model without adapters. All weights can be trained afterwards. For a
    SparseTransformer, pass the model inside: ``merge_lora(sparse.model)``.
    """
    if not takes_lora(model) or not lora_layers(model):
        return model
    for component in _components(model):
        layer = component.original_component
        if isinstance(layer, _Projection):
            layer.base_layer.weight.copy_(effective(layer).weight)
            component.set_original_component(layer.base_layer)
    return model.requires_grad_(True)


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has adapters, of this package or of `peft`."""
    return any(hasattr(module, BASE) for module in model.modules())


def lora_layers(model: nn.Module | HookedModel) -> list[Any]:
    """The projections with an adapter in a model."""
    assert isinstance(model, nn.Module)
    return [module for module in model.modules() if isinstance(module, _Projection)]


def lora_parameters(model: nn.Module | HookedModel) -> list[nn.Parameter]:
    """The parameters of low-rank adapters in a model."""
    return [parameter for layer in lora_layers(model) for parameter in layer.factors()]


@contextmanager
def lora_off(model: nn.Module) -> Iterator[None]:
    """Inside the block, the model computes as if it had no low-rank adapters."""
    layers = lora_layers(model)
    try:
        for layer in layers:
            layer.enabled = False
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def effective(module: Any) -> nn.Module:
    """The module itself; for a projection with an adapter, a plain one that computes the same."""
    if not isinstance(module, _Projection):
        return module
    if not module.enabled:
        return module.base_layer
    plain, weight = copy.copy(module.base_layer), module.base_layer.weight
    a, b = module.factors()
    added = (b @ a).T if isinstance(plain, Conv1D) else b @ a
    whole = (weight + SCALE * added).to(weight.dtype)
    plain.__dict__["_parameters"] = {**plain._parameters, "weight": whole}
    return plain


@contextmanager
def effective_weight(component: Any) -> Iterator[None]:
    """Inside the block, the weight that is read from a bridge's component includes its adapter."""
    inner = component.original_component
    component.set_original_component(effective(inner))
    try:
        yield
    finally:
        component.set_original_component(inner)


def _components(model: TransformerBridge) -> list[Any]:
    return [m for m in model.blocks.modules() if isinstance(m, GeneralizedComponent)]


@torch.no_grad()
def _projections(model: TransformerBridge) -> list[Any]:
    """The components around linear maps that a pass calls, in module order."""
    called: set[nn.Module] = set()
    found = [c for c in _components(model) if isinstance(c.original_component, nn.Linear | Conv1D)]
    notes = [(c.original_component, lambda module, *_: called.add(module)) for c in found]
    with without_user_hooks(model), hooks_on(notes):
        model(torch.zeros(1, 2, dtype=torch.long, device=model.embed.W_E.device))
    read = [component for component in found if component.original_component in called]
    if not read:
        raise ValueError(
            f"{model.cfg.model_name!r} calls no projections as modules, to put adapters on"
        )
    return read


# ---- merged, while training ----------------------------------------------------------------------


@contextmanager
def merged_lora(model: nn.Module, dtype: torch.dtype | None) -> Iterator[Callable[[], None]]:
    """Inside the block, adapters act through merged weights, and frozen linear maps are converted.

    Linear maps compute in `dtype`, if it is given. Under autocast, every pass would otherwise
    convert the frozen weights anew. Where a model has adapters, nothing else of its projections is
    trained. Yields a function that merges the adapters anew, to be called when they have changed.
    """
    layers = lora_layers(model)
    inside = {id(part) for layer in layers for part in layer.modules()}
    adapted = {layer: _Adapted(layer, dtype) for layer in layers}
    forwards: dict[Any, _Map] = {**adapted}
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and id(module) not in inside:
            weight = module.weight
            if dtype not in (None, weight.dtype) and not weight.requires_grad:
                forwards[module] = _Map(module, dtype)

    def merge() -> None:
        for layer in adapted.values():
            layer.merge()

    try:
        for module, forward in forwards.items():
            module.forward = forward
        merge()
        yield merge
    finally:
        for module in forwards:
            module.__dict__.pop("forward", None)


class _Map:
    """A frozen linear map in a type of its own."""

    def __init__(self, module: Any, dtype: torch.dtype | None) -> None:
        weight, bias = module.weight.detach(), module.bias
        weight = weight.T if isinstance(module, Conv1D) else weight
        self.weight: Float[Tensor, "n_out n_in"] = weight.to(dtype or weight.dtype)
        self.bias = None if bias is None else bias.detach().to(self.weight.dtype)

    def __call__(self, x: Float[Tensor, "*row n_in"]) -> Float[Tensor, "*row n_out"]:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class _Adapted(_Map):
    """A projection with its adapter merged into the weight."""

    def __init__(self, layer: Any, dtype: torch.dtype | None) -> None:
        base = layer.base_layer
        super().__init__(base, dtype)
        self.layer, self.plain = layer, _Map(base, dtype)
        self.a, self.b = layer.factors()
        # Everything in the memory layout of the weight: copies across layouts are slow.
        weight, transposed = base.weight.detach(), isinstance(base, Conv1D)
        a, b = self.values = self.a.detach(), self.b.detach()
        self.terms = weight.to(a.dtype), *((a.T, b.T) if transposed else (b, a))
        self.merged = torch.empty_like(weight, dtype=self.weight.dtype)
        self.weight = self.merged.T if transposed else self.merged

    @torch.no_grad()
    def merge(self) -> None:
        self.factors = [one.to(self.merged.dtype) for one in self.values]
        if self.merged.dtype == self.a.dtype:
            torch.addmm(*self.terms, alpha=SCALE, out=self.merged)
        else:
            self.merged.copy_(torch.addmm(*self.terms, alpha=SCALE))

    def __call__(self, x: Float[Tensor, "*row n_in"]) -> Float[Tensor, "*row n_out"]:
        if not self.layer.enabled:
            return self.plain(x)
        return _Merged.apply(x, self.a, self.b, self)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, adapted: _Adapted
    ) -> Tensor:
        ctx.dtype, ctx.adapted = x.dtype, adapted
        x = x.to(adapted.weight.dtype)
        ctx.save_for_backward(x)
        return F.linear(x, adapted.weight, adapted.bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_output: Tensor) -> Any:  # type: ignore[override]
        (x,), adapted = ctx.saved_tensors, ctx.adapted
        a, b = adapted.factors
        rows, g = x.flatten(0, -2), by_output.to(x.dtype).flatten(0, -2)
        by_x = by_a = by_b = None
        if ctx.needs_input_grad[0]:
            by_x = (g @ adapted.weight).view(x.shape).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            scaled = {"beta": 0, "alpha": SCALE}
            by_a = torch.addmm(a, (g @ b).T, rows, **scaled).to(adapted.a.dtype)
            by_b = torch.addmm(b, g.T, rows @ a.T, **scaled).to(adapted.b.dtype)
        return by_x, by_a, by_b, None
