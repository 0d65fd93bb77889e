"""Low-rank adapters (LoRA) on the projections of a bridge, made with `peft`.

A frozen projection ``W x`` becomes ``W x + 2 B A x``, with a trained A ``[rank, in]`` and B
``[out, rank]``. B starts at 0, so that adapters change nothing at first. They are put on the
modules that the bridge calls, not on the transformers model before it is wrapped: a bridge splits
joint projections (GPT-2's q, k and v), and an adapter on the joint one would never be read.

Reference: arXiv 2106.09685.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformers.pytorch_utils import Conv1D

from sparse_tl.calls.arguments import AtLeastOne, checked
from sparse_tl.calls.scopes import autograd, scope
from sparse_tl.lens.core.architecture import HALVES
from sparse_tl.lens.core.attaching import hooks_on, without_user_hooks
from sparse_tl.lens.core.points import HookedModel, Model

SCALE = 2
"""Factor of ``B A``."""
BASE = "base_layer"
"""The name of the original projection inside one with an adapter."""
NAME = "default"
"""The name of every adapter, in `peft`'s dictionaries of adapters."""


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
            projections; the rank is below 1 or above d_model.
    """
    if not isinstance(model, TransformerBridge):
        raise ValueError(
            "expected a TransformerBridge, to put low-rank adapters on the modules inside; got a "
            f"{type(model).__name__}. load_model makes one from a name or a Hugging Face folder"
        )
    if has_adapters(model):
        raise ValueError(
            f"expected a model without adapters; {model.cfg.model_name!r} has some already. Train "
            "those, or make them part of its weights first: merge_lora(model)"
        )
    if rank > model.cfg.d_model:
        raise ValueError(f"expected a rank of at most {model.cfg.d_model}, d_model; got {rank}")
    _put_adapters_on(model, projections(model), rank)
    return model


def _put_adapters_on(model: TransformerBridge, components: list[Any], rank: int) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` would also seed the GPUs
        for transposed in (False, True):
            holder = nn.ModuleDict(
                {
                    str(number): component.original_component
                    for number, component in enumerate(components)
                    if isinstance(component.original_component, Conv1D) == transposed
                }
            )
            if not holder:
                continue
            config = LoraConfig(
                r=rank,
                lora_alpha=SCALE * rank,
                target_modules=list(holder),
                fan_in_fan_out=transposed,
            )
            inject_adapter_in_model(config, holder, NAME)
            for number, layer in holder.items():
                components[int(number)].set_original_component(layer)
    for parameter in lora_parameters(model):
        if parameter.dtype in HALVES:
            parameter.data = parameter.data.float()  # small updates would be lost to rounding


def takes_lora(model: Model) -> bool:
    """Whether a model can have adapters."""
    return isinstance(model, TransformerBridge)


@checked
@autograd(False)
def merge_lora(model: Model) -> Model:
    """Merge low-rank adapters into the weights that they adapt, and remove them, in place.

    Does nothing to a model without adapters. All weights can be trained afterwards.

    Raises:
        TypeError: `model` is not a TransformerLens model, but, for example, a SparseTransformer.
    """
    if not isinstance(model, Model):
        raise TypeError(
            "expected a model of TransformerLens, such as the `model` of a SparseTransformer; got "
            f"a {type(model).__name__}"
        )
    if not isinstance(model, TransformerBridge) or not lora_layers(model):
        return model
    for component in _components(model):
        if is_lora(component.original_component):
            _merge(component)
    return model.requires_grad_(True)


def _merge(component: Any) -> None:
    layer = component.original_component
    layer.base_layer.weight.copy_(effective(layer).weight)
    component.set_original_component(layer.base_layer)


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has `peft` adapters of any kind."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and any(isinstance(m, tuners.BaseTunerLayer) for m in model.modules())


def lora_layers(model: nn.Module | HookedModel) -> list[Any]:
    """The projections with an adapter in a model."""
    assert isinstance(model, nn.Module)
    return [module for module in model.modules() if is_lora(module)]


def lora_parameters(model: nn.Module | HookedModel) -> list[nn.Parameter]:
    """The parameters of low-rank adapters in a model."""
    return _parameters(lora_layers(model))


def _parameters(layers: Sequence[Any]) -> list[nn.Parameter]:
    return [
        parameter
        for layer in layers
        for name, part in layer.named_children()
        if name != BASE
        for parameter in part.parameters()
    ]


@scope
def lora_off(model: nn.Module) -> Iterator[None]:
    """Inside the block, the model computes as if it had no low-rank adapters."""
    layers = lora_layers(model)
    flags = [(parameter, parameter.requires_grad) for parameter in _parameters(layers)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, flag in flags:  # peft changes them all
            parameter.requires_grad_(flag)


def is_lora(module: nn.Module | None) -> bool:
    """Whether a module is a projection with an adapter."""
    layers = sys.modules.get("peft.tuners.lora.layer")  # without peft there are no adapters
    return layers is not None and isinstance(module, layers.Linear)


def effective(module: Any) -> nn.Module:
    """The module itself; for a projection with an adapter, a plain one that computes the same."""
    if not is_lora(module):
        return module
    if module.disable_adapters:
        return module.base_layer
    plain, weight = copy.copy(module.base_layer), module.base_layer.weight
    whole = (weight + module.get_delta_weight(NAME)).to(weight.dtype)
    plain.__dict__["_parameters"] = {**plain._parameters, "weight": whole}
    return plain


@scope
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


@autograd(False)
def projections(model: TransformerBridge) -> list[Any]:
    """The components around linear maps that a pass calls, in module order."""
    called: set[nn.Module] = set()
    found = [
        component
        for component in _components(model)
        if isinstance(component.original_component, (nn.Linear, Conv1D))
    ]

    def note(module: nn.Module, *_: Any) -> None:
        called.add(module)

    with without_user_hooks(model), hooks_on([(c.original_component, note) for c in found]):
        model(torch.zeros(1, 2, dtype=torch.long, device=model.embed.W_E.device))
    read = [component for component in found if component.original_component in called]
    if not read:
        raise ValueError(
            f"expected a model whose attention and MLPs have projections as modules, to put "
            f"adapters on; {model.cfg.model_name!r} calls none"
        )
    return read
