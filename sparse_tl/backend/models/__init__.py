"""The adapters of TransformerBridge and HookedTransformer, and the parameters that passes read."""

from __future__ import annotations

import hashlib

from torch import nn

from sparse_tl.backend.core.adapter import Adapter
from sparse_tl.backend.core.devices import whole
from sparse_tl.backend.core.points import HookedModel, HookedTransformer, Model, TransformerBridge
from sparse_tl.backend.models.bridge import BridgeAdapter
from sparse_tl.backend.models.hooked import HookedAdapter


def adapt(model: HookedModel) -> Adapter:
    """The adapter of a model, by its class; for a SparseTransformer, that of the wrapped model."""
    under_gates = getattr(model, "model_under_gates", None)
    inner = model if under_gates is None else under_gates()
    if isinstance(inner, TransformerBridge):
        return BridgeAdapter(inner)
    if isinstance(inner, HookedTransformer):
        return HookedAdapter(inner)
    raise TypeError(
        f"a {type(model).__name__} is no TransformerBridge or HookedTransformer, nor a "
        "SparseTransformer around one"
    )


def read_parameters(module: nn.Module | HookedModel) -> dict[str, nn.Parameter]:
    """The parameters of a module, by name, that forward passes read.

    Bridges also have others: joint parameters that were split and are no longer read.
    """
    assert isinstance(module, nn.Module)
    models = [part for part in module.modules() if isinstance(part, Model)]
    known = {id(p) for model in models for p in model.parameters()}
    read = {id(p) for model in models for p in adapt(model).parameters("all")}
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if id(parameter) in read or id(parameter) not in known
    }


def weights_digest(model: nn.Module | HookedModel) -> str:
    """A hash of the parameters that forward passes read, for telling models apart."""
    digest = hashlib.sha256()
    for name, parameter in read_parameters(model).items():
        flat = whole(parameter.detach()).flatten()
        # Strided samples suffice to distinguish models, and are cheap for billions of weights.
        samples = flat[:: max(1, flat.numel() // 1024)]
        digest.update(name.encode() + samples.double().cpu().numpy().tobytes())
    return digest.hexdigest()
