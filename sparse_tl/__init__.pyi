from .backend import (
    add_lora as add_lora,
    checkpointed_activations as checkpointed_activations,
    load_model as load_model,
    merge_lora as merge_lora,
    save_model as save_model,
    shard_model as shard_model,
)
from .circuits import (
    Circuit as Circuit,
    Scores as Scores,
    acdc as acdc,
    attribute_attention_edges as attribute_attention_edges,
    attribute_circuit_edges as attribute_circuit_edges,
    attribute_heads as attribute_heads,
    attribute_logits as attribute_logits,
    attribution_graph as attribution_graph,
    check_scores as check_scores,
    circuit_sizes_per_prompt as circuit_sizes_per_prompt,
    evaluate as evaluate,
    evaluate_circuit_edges as evaluate_circuit_edges,
    evaluate_heads as evaluate_heads,
    evaluate_mib as evaluate_mib,
    find_circuit as find_circuit,
    from_eap_ig as from_eap_ig,
    head_behaviour as head_behaviour,
    load_mib as load_mib,
    logit_lens as logit_lens,
    measure_skill as measure_skill,
    multiplier as multiplier,
    neuron_effects as neuron_effects,
    overlap as overlap,
    patch_activations as patch_activations,
    patch_exactly as patch_exactly,
    prune_circuit_edges as prune_circuit_edges,
    roc as roc,
    save_mib as save_mib,
    to_circuit_tracer as to_circuit_tracer,
    to_eap_ig as to_eap_ig,
    trace_attention as trace_attention,
)
from .data import (
    PromptPairs as PromptPairs,
    ShuffledStream as ShuffledStream,
    TargetDataset as TargetDataset,
    TextStream as TextStream,
    TokenBatch as TokenBatch,
    read_documents as read_documents,
    text_rows as text_rows,
    token_windows as token_windows,
)
from .explorer import (
    attention_view as attention_view,
    explore as explore,
)
from .explorer.figures import circuit_diagram as circuit_diagram
from .gates import (
    AttentionEdges as AttentionEdges,
    CircuitEdges as CircuitEdges,
    GatedRun as GatedRun,
    Heads as Heads,
    HookPoints as HookPoints,
    Intervention as Intervention,
    SparseTransformer as SparseTransformer,
    ablate_attention_edges as ablate_attention_edges,
    ablate_heads as ablate_heads,
    gated as gated,
    intervene as intervene,
    steer as steer,
)
from .graph import CircuitGraph as CircuitGraph
from .head_roles import (
    ablation_curve as ablation_curve,
    fit_contrastive_head_gates as fit_contrastive_head_gates,
    fit_head_gates as fit_head_gates,
)
from .metrics import (
    log_probability as log_probability,
    logit_difference as logit_difference,
    probability_difference as probability_difference,
)
from .plots import (
    ablation_grid as ablation_grid,
    attribution_diagram as attribution_diagram,
    component_diagram as component_diagram,
    effect_figure as effect_figure,
    gate_trajectories as gate_trajectories,
    head_map as head_map,
    layer_map as layer_map,
)
from .tasks import (
    AdditionTask as AdditionTask,
    AnaphorTask as AnaphorTask,
    CapitalsTask as CapitalsTask,
    DocstringTask as DocstringTask,
    GreaterThanTask as GreaterThanTask,
    InductionTask as InductionTask,
    IOILongTask as IOILongTask,
    IOITask as IOITask,
    SubjectVerbTask as SubjectVerbTask,
    compare_continuations as compare_continuations,
    compare_skills as compare_skills,
    continuations as continuations,
    task_report as task_report,
)
from .training import (
    evaluate_held_out as evaluate_held_out,
    post_train as post_train,
    sampled_windows as sampled_windows,
)
from .zoo import (
    get_language_model as get_language_model,
    load_addition_models as load_addition_models,
    load_language_model as load_language_model,
    load_language_models as load_language_models,
    load_task_models as load_task_models,
)

__version__: str
