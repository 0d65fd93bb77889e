from .circuits import (
    Acdc as Acdc,
)
from .circuits import (
    Circuit as Circuit,
)
from .circuits import (
    Evaluation as Evaluation,
)
from .circuits import (
    Overlap as Overlap,
)
from .circuits import (
    Pruning as Pruning,
)
from .circuits import (
    Roc as Roc,
)
from .circuits import (
    Scores as Scores,
)
from .circuits import (
    acdc as acdc,
)
from .circuits import (
    attribute_attention_edges as attribute_attention_edges,
)
from .circuits import (
    attribute_circuit_edges as attribute_circuit_edges,
)
from .circuits import (
    attribute_heads as attribute_heads,
)
from .circuits import (
    evaluate as evaluate,
)
from .circuits import (
    evaluate_circuit_edges as evaluate_circuit_edges,
)
from .circuits import (
    evaluate_heads as evaluate_heads,
)
from .circuits import (
    from_eap_ig as from_eap_ig,
)
from .circuits import (
    multiplier as multiplier,
)
from .circuits import (
    overlap as overlap,
)
from .circuits import (
    patch_exactly as patch_exactly,
)
from .circuits import (
    prune_circuit_edges as prune_circuit_edges,
)
from .circuits import (
    roc as roc,
)
from .circuits import (
    to_eap_ig as to_eap_ig,
)
from .circuits import (
    trace_attention as trace_attention,
)
from .circuits.attention_graph import (
    AttentionGraph as AttentionGraph,
)
from .data import (
    PromptPairs as PromptPairs,
)
from .data import (
    ShuffledStream as ShuffledStream,
)
from .data import (
    TargetDataset as TargetDataset,
)
from .data import (
    TokenBatch as TokenBatch,
)
from .data import (
    read_documents as read_documents,
)
from .data import (
    token_windows as token_windows,
)
from .explorer import (
    CircuitExplorer as CircuitExplorer,
)
from .explorer import (
    Exploration as Exploration,
)
from .explorer import (
    attention_view as attention_view,
)
from .explorer import (
    explore as explore,
)
from .explorer.figures import (
    circuit_diagram as circuit_diagram,
)
from .gates import (
    AttentionEdgeCounts as AttentionEdgeCounts,
)
from .gates import (
    AttentionEdges as AttentionEdges,
)
from .gates import (
    AttentionGates as AttentionGates,
)
from .gates import (
    BernoulliGate as BernoulliGate,
)
from .gates import (
    CircuitEdges as CircuitEdges,
)
from .gates import (
    GatedRun as GatedRun,
)
from .gates import (
    HardConcreteGate as HardConcreteGate,
)
from .gates import (
    Heads as Heads,
)
from .gates import (
    HookPoints as HookPoints,
)
from .gates import (
    LearnedGates as LearnedGates,
)
from .gates import (
    SigmoidGate as SigmoidGate,
)
from .gates import (
    SparseTransformer as SparseTransformer,
)
from .gates import (
    ablate_attention_edges as ablate_attention_edges,
)
from .gates import (
    ablate_heads as ablate_heads,
)
from .gates import (
    gated as gated,
)
from .gates import (
    hook_points as hook_points,
)
from .graph import (
    CircuitGraph as CircuitGraph,
)
from .head_roles import (
    AblationCurve as AblationCurve,
)
from .head_roles import (
    ContrastiveGates as ContrastiveGates,
)
from .head_roles import (
    HeadRoles as HeadRoles,
)
from .head_roles import (
    ablation_curve as ablation_curve,
)
from .head_roles import (
    fit_contrastive_head_gates as fit_contrastive_head_gates,
)
from .head_roles import (
    fit_head_gates as fit_head_gates,
)
from .lens import (
    load_model as load_model,
)
from .lens import (
    save_model as save_model,
)
from .metrics import (
    log_probability as log_probability,
)
from .metrics import (
    logit_difference as logit_difference,
)
from .metrics import (
    probability_difference as probability_difference,
)
from .models import (
    build_addition_model as build_addition_model,
)
from .models import (
    load_addition_models as load_addition_models,
)
from .models import (
    load_task_models as load_task_models,
)
from .plots import (
    ablation_grid as ablation_grid,
)
from .plots import (
    component_diagram as component_diagram,
)
from .plots import (
    effect_figure as effect_figure,
)
from .plots import (
    gate_trajectories as gate_trajectories,
)
from .tasks import (
    AdditionTask as AdditionTask,
)
from .tasks import (
    DocstringTask as DocstringTask,
)
from .tasks import (
    GreaterThanTask as GreaterThanTask,
)
from .tasks import (
    IOILongTask as IOILongTask,
)
from .tasks import (
    IOITask as IOITask,
)
from .training import (
    PostTraining as PostTraining,
)
from .training import (
    evaluate_held_out as evaluate_held_out,
)
from .training import (
    post_train as post_train,
)

__version__: str
__all__ = [
    "AttentionEdges",
    "CircuitEdges",
    "GatedRun",
    "Heads",
    "HookPoints",
    "LearnedGates",
    "gated",
    "hook_points",
    "AblationCurve",
    "Acdc",
    "AdditionTask",
    "AttentionGates",
    "AttentionGraph",
    "BernoulliGate",
    "Circuit",
    "CircuitExplorer",
    "CircuitGraph",
    "ContrastiveGates",
    "DocstringTask",
    "AttentionEdgeCounts",
    "Evaluation",
    "Exploration",
    "GreaterThanTask",
    "HardConcreteGate",
    "HeadRoles",
    "IOILongTask",
    "IOITask",
    "Overlap",
    "PostTraining",
    "PromptPairs",
    "Pruning",
    "Roc",
    "Scores",
    "ShuffledStream",
    "SigmoidGate",
    "SparseTransformer",
    "TargetDataset",
    "TokenBatch",
    "ablate_attention_edges",
    "ablate_heads",
    "ablation_curve",
    "ablation_grid",
    "acdc",
    "attention_view",
    "attribute_attention_edges",
    "attribute_circuit_edges",
    "attribute_heads",
    "build_addition_model",
    "circuit_diagram",
    "component_diagram",
    "effect_figure",
    "evaluate",
    "evaluate_circuit_edges",
    "evaluate_heads",
    "evaluate_held_out",
    "explore",
    "fit_contrastive_head_gates",
    "fit_head_gates",
    "gate_trajectories",
    "from_eap_ig",
    "load_addition_models",
    "load_model",
    "load_task_models",
    "multiplier",
    "log_probability",
    "logit_difference",
    "overlap",
    "patch_exactly",
    "post_train",
    "probability_difference",
    "prune_circuit_edges",
    "read_documents",
    "roc",
    "save_model",
    "to_eap_ig",
    "token_windows",
    "trace_attention",
]
