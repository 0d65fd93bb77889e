"""The only part of the package that knows TransformerLens: hook points, hooks, loading."""

from sparse_tl.lens.attaching import AttachedHooks, Order, attached
from sparse_tl.lens.lean import lean
from sparse_tl.lens.loading import build_model, load_model, model_config, save_model
from sparse_tl.lens.masked import MaskedRun
from sparse_tl.lens.points import (
    AttentionShape,
    HookedModel,
    Model,
    attention_shape,
    check_hook_points,
    embedding_matrix,
    hook_point,
    layer_points,
)
from sparse_tl.lens.reading import PulledGradients
from sparse_tl.lens.single import logits_patched_alone
from sparse_tl.lens.stacked import final_under_heads
from sparse_tl.lens.streams import (
    EMBEDDED,
    Streams,
    Tape,
    graph_of,
    logits_at,
    unembedded,
)

__all__ = [
    "EMBEDDED",
    "AttachedHooks",
    "AttentionShape",
    "HookedModel",
    "MaskedRun",
    "Model",
    "Order",
    "Streams",
    "Tape",
    "attached",
    "attention_shape",
    "build_model",
    "check_hook_points",
    "embedding_matrix",
    "final_under_heads",
    "graph_of",
    "hook_point",
    "layer_points",
    "lean",
    "load_model",
    "logits_at",
    "logits_patched_alone",
    "model_config",
    "PulledGradients",
    "save_model",
    "unembedded",
]
