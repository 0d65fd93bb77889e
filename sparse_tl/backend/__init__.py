"""The only subpackage that imports TransformerLens: adapters, hooks, checks, loading."""

from sparse_tl.backend.adapters import (
    adapt as adapt,
    read_parameters as read_parameters,
    weights_digest as weights_digest,
)
from sparse_tl.backend.attention import (
    EVERYTHING as EVERYTHING,
    AttentionMask as AttentionMask,
    Block as Block,
    Expression as Expression,
)
from sparse_tl.backend.bridges import (
    boot as boot,
    check_raw as check_raw,
)
from sparse_tl.backend.checks import (
    check_circuits as check_circuits,
    check_gates as check_gates,
    check_mlps as check_mlps,
    check_same_alone as check_same_alone,
    check_score_gates as check_score_gates,
    check_sums_under_hooks as check_sums_under_hooks,
    check_whole as check_whole,
)
from sparse_tl.backend.deferred import (
    Deferred as Deferred,
    defer_scores as defer_scores,
    explicit as explicit,
    function_name as function_name,
)
from sparse_tl.backend.devices import (
    checked_device as checked_device,
    has_sharded_weights as has_sharded_weights,
    is_sharded as is_sharded,
    processes as processes,
    whole as whole,
)
from sparse_tl.backend.hook_points import (
    EMBEDDED as EMBEDDED,
    SLOTS as SLOTS,
    HookedModel as HookedModel,
    Model as Model,
    hooked as hooked,
)
from sparse_tl.backend.hooked_folder import build_model as build_model, model_config as model_config
from sparse_tl.backend.hooks import (
    OWN as OWN,
    Activations as Activations,
    AttachedHooks as AttachedHooks,
    Hook as Hook,
    Order as Order,
    attached as attached,
    enters as enters,
    evaluation_mode as evaluation_mode,
    frozen as frozen,
    gate_hooks as gate_hooks,
    hooks_besides as hooks_besides,
    in_evaluation_mode as in_evaluation_mode,
    in_use as in_use,
    mask_hooks as mask_hooks,
    record as record,
    source_outputs as source_outputs,
    without_user_hooks as without_user_hooks,
)
from sparse_tl.backend.inputs import (
    HeadOrName as HeadOrName,
    check_numbers as check_numbers,
    check_padding as check_padding,
    check_pairs as check_pairs,
    check_reference as check_reference,
    check_rows as check_rows,
    check_tokens as check_tokens,
    heads_of as heads_of,
)
from sparse_tl.backend.interface import Adapter as Adapter, repeated as repeated
from sparse_tl.backend.large_models import (
    checkpointed_activations as checkpointed_activations,
    shard_model as shard_model,
)
from sparse_tl.backend.load import (
    check_folder as check_folder,
    load_model as load_model,
    save_model as save_model,
)
from sparse_tl.backend.lora import (
    add_lora as add_lora,
    lora_off as lora_off,
    lora_parameters as lora_parameters,
    merge_lora as merge_lora,
    merged_lora as merged_lora,
    takes_lora as takes_lora,
)
from sparse_tl.backend.neurons import (
    neuron_coefficients as neuron_coefficients,
    neuron_directions as neuron_directions,
)
from sparse_tl.backend.numerics import tolerance as tolerance
from sparse_tl.backend.relevance import relevance_rules as relevance_rules
