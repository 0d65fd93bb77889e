"""The only part of the package that knows TransformerLens: adapters, hooks, checks, loading."""

from sparse_tl.lens.adapter import Adapter, adapt
from sparse_tl.lens.architecture import model_config
from sparse_tl.lens.attaching import AttachedHooks, HookFunction, Order, attached
from sparse_tl.lens.checks import check_circuits, check_gates
from sparse_tl.lens.loading import build_model, load_model, save_model
from sparse_tl.lens.norms import Norm
from sparse_tl.lens.points import (
    HookedModel,
    Model,
    check_hook_points,
    hook_point,
    layer_points,
)
from sparse_tl.lens.recording import (
    EMBEDDED,
    Activations,
    destination_points,
    heads_written,
    record,
    residual_points,
    source_outputs,
    source_points,
)
from sparse_tl.lens.shortcuts import only_at

__all__ = [
    "EMBEDDED",
    "Activations",
    "Adapter",
    "AttachedHooks",
    "HookFunction",
    "HookedModel",
    "Model",
    "Norm",
    "Order",
    "adapt",
    "attached",
    "build_model",
    "check_circuits",
    "check_gates",
    "check_hook_points",
    "destination_points",
    "heads_written",
    "hook_point",
    "layer_points",
    "load_model",
    "model_config",
    "only_at",
    "record",
    "residual_points",
    "save_model",
    "source_outputs",
    "source_points",
]
