"""Convert a bridge to a plain `transformers` model, which can be copied and saved.

A bridge cannot: its copies depend on the original, and its parameter names mix those of the wrapped
model with TransformerLens's. If it has split a joint projection (GPT-2's q, k and v), passes read
the parts, and the joint weights keep their initial values. In the plain model, low-rank adapters
are merged into the weights, and sharded weights are gathered on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedModel

from sparse_tl.calls.scopes import autograd, scope
from sparse_tl.lens.core.devices import has_sharded_weights, whole
from sparse_tl.lens.core.lora import BASE, effective, lora_layers
from sparse_tl.lens.core.points import Model
from sparse_tl.lens.loading.fidelity import check_same, few_logits, is_known

_WRAPPED = "_original_component"
_unset: WeakKeyDictionary[TransformerBridge, bool] = WeakKeyDictionary()
_named: WeakSet[TransformerBridge] = WeakSet()
"""Bridges that are known to name all weights of their wrapped models."""


def plain_model(model: TransformerBridge) -> Any:
    """A hook-free `transformers` model that shares all weights except joint and adapted ones.

    If the weights are sharded, it has copies on the CPU instead, and all processes have to call
    this.

    Raises:
        ValueError: the bridge does not wrap a `transformers` model, or the plain model computes
            something other than the bridge does, as with processed weights.
    """
    if not isinstance(model.original_model, PreTrainedModel):
        raise ValueError(
            "expected a bridge around a model of transformers, to copy, train or save it; "
            f"{model.cfg.model_name!r} is a bridge around a {type(model.original_model).__name__}"
        )
    with torch.random.fork_rng(devices=[]):  # initial weights are drawn, and discarded
        plain = _assembled(model)
    if not has_sharded_weights(model):  # else it was checked before
        check_same(model, *few_logits(plain.eval()))
    return plain.train(model.original_model.training)


def _assembled(model: TransformerBridge) -> Any:
    joined = {split.joint: split.joined() for split in _splits(model)}
    wrapped: Any = model.original_model
    sharded = has_sharded_weights(model)
    tensors: dict[str, Tensor] = {}
    adapted = {layer.base_layer: layer for layer in lora_layers(wrapped)}
    for name, module in wrapped.named_modules(remove_duplicate=False):
        merged = effective(adapted[module]) if module in adapted else module
        own = {**merged._parameters, **merged._buffers, **joined.get(module, {})}
        path = [part for part in name.split(".") if part not in ("", _WRAPPED, BASE)]
        for kind, tensor in own.items():
            if tensor is not None:
                tensor = whole(tensor.detach())
                tensors[".".join([*path, kind])] = tensor.cpu() if sharded else tensor
    with torch.device("meta"):
        plain: Any = type(wrapped)(copy.deepcopy(wrapped.config))
    missing = [name for name in plain.state_dict() if name not in tensors]
    if missing:
        raise _unnamed(wrapped, missing)
    plain.load_state_dict({name: tensors[name] for name in plain.state_dict()}, assign=True)
    for name, _ in list(plain.named_buffers(remove_duplicate=False)):  # a state dict may lack some
        path, _, kind = name.rpartition(".")
        setattr(plain.get_submodule(path), kind, tensors[name])
    plain.tie_weights()
    plain.generation_config = copy.deepcopy(getattr(wrapped, "generation_config", None))
    return plain


def check_raw(model: Model) -> None:
    """Check that the weights of a model can be copied and saved, and so trained.

    Raises:
        ValueError: they cannot; see `plain_model`.
    """
    if isinstance(model, TransformerBridge) and not has_sharded_weights(model):
        plain_model(model)


def check_wrapped(model: Model) -> None:
    """Check that a bridge computes the same as its wrapped model.

    Processed weights are compared only when they are read, since passes with them are correct.

    Raises:
        ValueError: the bridge computes something else.
    """
    if not isinstance(model, TransformerBridge) or is_known(model) or model.compatibility_mode:
        return
    if isinstance(model.original_model, PreTrainedModel):
        plain_model(model)


def check_named(model: Model) -> None:
    """Check that a bridge names all weights of its wrapped model, so that it can be saved.

    Raises:
        ValueError: it does not.
    """
    if not isinstance(model, TransformerBridge) or model in _named or has_sharded_weights(model):
        return
    if isinstance(model.original_model, PreTrainedModel):
        with torch.random.fork_rng(devices=[]):
            _assembled(model)
        _named.add(model)


def plain_copy(model: TransformerBridge) -> Any:
    """Like `plain_model`, but without shared weights."""
    return copy.deepcopy(plain_model(model))


def unread_parameters(model: TransformerBridge) -> list[nn.Parameter]:
    """The parameters that no pass reads, or that the wrapped model lacks."""
    found = [p for split in _splits(model) for p in split.joint.parameters()]
    bias = getattr(model.unembed.original_component, "bias", None)
    if isinstance(bias, nn.Parameter) and _is_unset(model, bias):
        found.append(bias)
    return found


def _is_unset(model: TransformerBridge, bias: Tensor) -> bool:
    """Whether TransformerLens (3.9 to 4.0) added the bias: whether it was 0 when first seen."""
    if model not in _unset:
        _unset[model] = not bool(bias.any())
    return _unset[model]


def _unnamed(whole: nn.Module, parts: Sequence[str]) -> ValueError:
    return ValueError(
        f"expected a bridge that names all weights of its {type(whole).__name__}, to copy, train "
        f"or save it; it does not say where those of {list(parts)[:5]} belong"
    )


@scope
def _holding(module: nn.Module, values: dict[str, Tensor]) -> Iterator[None]:
    """Inside the block, a module has these values as its parameters."""
    kept = dict(module._parameters)
    try:
        module._parameters |= {
            name: nn.Parameter(some, requires_grad=False) for name, some in values.items()
        }
        yield
    finally:
        module._parameters |= kept


@dataclass(frozen=True)
class _Split:
    """A joint projection that a bridge has split into parts.

    Args:
        made: function that splits a module of transformers.
        whole: module that was split.
        joint: joint projection in that module.
        parts: parts made from it.
    """

    made: Callable[[nn.Module], Sequence[nn.Module]]
    whole: nn.Module
    joint: nn.Module
    parts: list[nn.Module]

    @autograd(False)
    def joined(self) -> dict[str, Tensor]:
        """The weights of the joint projection, reassembled from the parts, whatever its layout.

        Splitting a tensor of indices reveals where each entry of a part belongs.
        """
        kept, found = dict(self.joint.named_parameters()), dict[str, Tensor]()
        numbers = {
            kind: torch.arange(some.numel(), dtype=torch.float64, device=some.device).view(
                some.shape
            )
            for kind, some in kept.items()
        }
        with _holding(self.joint, numbers):
            made = self.made(self.whole)
            where = {kind: [getattr(part, kind).detach().long() for part in made] for kind in kept}
        for kind, tensor in kept.items():
            parts = [whole(getattr(effective(part), kind).detach()) for part in self.parts]
            flat = parts[0].new_empty(tensor.numel())
            for index, values in zip(where[kind], parts, strict=True):
                flat[index.flatten().to(flat.device)] = values.flatten()
            found[kind] = flat.view(tensor.shape)
        return found


def _splits(model: TransformerBridge) -> list[_Split]:
    """The joint projections in a bridge's blocks, as its components describe them."""
    found: list[_Split] = []
    for part in [part for block in model.blocks for part in block.modules()]:
        if hasattr(part, "split_qkv_matrix"):
            joint = getattr(part.submodules.get("qkv"), "name", None)
            found.append(_split(part, part.split_qkv_matrix, joint, ("q", "k", "v")))
        if hasattr(part, "split_gate_up_matrix"):
            found.append(_split(part, part.split_gate_up_matrix, part.fused_attr, ("gate", "in")))
    return found


def _split(
    bridge: Any, made: Callable[..., Any], joint: str | None, names: Sequence[str]
) -> _Split:
    whole = bridge.original_component
    if joint is None or not hasattr(whole, joint):
        raise _unnamed(whole, names)
    inner = getattr(whole, joint)
    parts = [getattr(bridge, name).original_component for name in names]
    return _Split(made, whole, getattr(inner, "original_component", inner), parts)
