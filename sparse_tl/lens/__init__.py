"""The only part of the package that knows TransformerLens: adapters, hooks, checks, loading."""

from sparse_tl.lens.adapter import Adapter as Adapter, adapt as adapt
from sparse_tl.lens.architecture import model_config as model_config
from sparse_tl.lens.attaching import (
    AttachedHooks as AttachedHooks,
    HookFunction as HookFunction,
    Order as Order,
    attached as attached,
)
from sparse_tl.lens.checks import check_circuits as check_circuits, check_gates as check_gates
from sparse_tl.lens.loading import (
    build_model as build_model,
    load_model as load_model,
    save_model as save_model,
)
from sparse_tl.lens.norms import Norm as Norm
from sparse_tl.lens.points import (
    HookedModel as HookedModel,
    Model as Model,
    layer_points as layer_points,
)
from sparse_tl.lens.recording import (
    EMBEDDED as EMBEDDED,
    Activations as Activations,
    destination_points as destination_points,
    heads_written as heads_written,
    record as record,
    residual_points as residual_points,
    source_outputs as source_outputs,
    source_points as source_points,
)
from sparse_tl.lens.shortcuts import only_at as only_at
