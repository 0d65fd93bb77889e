"""Make a transformer's attention sparse without hurting its loss, and see what does a task.

The public names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_tl.batches import TokenBatch
    from sparse_tl.circuits import (
        Acdc,
        AttentionEdgeScores,
        Circuit,
        EdgeScores,
        Evaluation,
        HeadCircuit,
        HeadScores,
        Overlap,
        Pruning,
        Roc,
        acdc,
        attribute_attention_edges,
        attribute_edges,
        attribute_heads,
        evaluate,
        evaluate_edges,
        evaluate_heads,
        from_eap_ig,
        overlap,
        patch_exactly,
        prune_edges,
        roc,
        to_eap_ig,
        trace_attention,
    )
    from sparse_tl.figures import circuit_diagram
    from sparse_tl.flow import AttentionFlow
    from sparse_tl.graph import CircuitGraph
    from sparse_tl.head_roles import (
        AblationCurve,
        ContrastiveGates,
        HeadRoles,
        ablation_curve,
        fit_contrastive_head_gates,
        fit_head_gates,
    )
    from sparse_tl.hooks import load_model, save_model
    from sparse_tl.masks import (
        AttentionGates,
        BernoulliGate,
        EdgeCounts,
        HardConcreteGate,
        HeadGates,
        HookMask,
        SigmoidGate,
        SparseTransformer,
        ablate_attention_edges,
        ablate_heads,
    )
    from sparse_tl.models import (
        build_addition_model,
        load_addition_models,
        load_task_models,
        sparsify_addition_model,
        train_addition_model,
    )
    from sparse_tl.plots import (
        ScoredCircuit,
        ablation_grid,
        component_diagram,
        effect_figure,
        save_figure,
    )
    from sparse_tl.prompts import PromptPairs
    from sparse_tl.targets import TargetDataset
    from sparse_tl.tasks import (
        AdditionTask,
        DocstringTask,
        GreaterThanTask,
        IOILongTask,
        IOITask,
    )
    from sparse_tl.training import (
        PostTraining,
        ShuffledStream,
        evaluate_held_out,
        post_train,
        read_documents,
        token_windows,
    )

_HOMES = {
    "TokenBatch": "batches",
    "Acdc": "circuits",
    "AttentionEdgeScores": "circuits",
    "Circuit": "circuits",
    "EdgeScores": "circuits",
    "Evaluation": "circuits",
    "HeadCircuit": "circuits",
    "HeadScores": "circuits",
    "Overlap": "circuits",
    "Pruning": "circuits",
    "Roc": "circuits",
    "acdc": "circuits",
    "attribute_attention_edges": "circuits",
    "attribute_edges": "circuits",
    "attribute_heads": "circuits",
    "evaluate": "circuits",
    "evaluate_edges": "circuits",
    "evaluate_heads": "circuits",
    "from_eap_ig": "circuits",
    "overlap": "circuits",
    "patch_exactly": "circuits",
    "prune_edges": "circuits",
    "roc": "circuits",
    "to_eap_ig": "circuits",
    "trace_attention": "circuits",
    "circuit_diagram": "figures",
    "AttentionFlow": "flow",
    "CircuitGraph": "graph",
    "AblationCurve": "head_roles",
    "ContrastiveGates": "head_roles",
    "HeadRoles": "head_roles",
    "ablation_curve": "head_roles",
    "fit_contrastive_head_gates": "head_roles",
    "fit_head_gates": "head_roles",
    "load_model": "hooks",
    "save_model": "hooks",
    "AttentionGates": "masks",
    "BernoulliGate": "masks",
    "EdgeCounts": "masks",
    "HardConcreteGate": "masks",
    "HeadGates": "masks",
    "HookMask": "masks",
    "SigmoidGate": "masks",
    "SparseTransformer": "masks",
    "ablate_attention_edges": "masks",
    "ablate_heads": "masks",
    "build_addition_model": "models",
    "load_addition_models": "models",
    "load_task_models": "models",
    "sparsify_addition_model": "models",
    "train_addition_model": "models",
    "ScoredCircuit": "plots",
    "ablation_grid": "plots",
    "save_figure": "plots",
    "component_diagram": "plots",
    "effect_figure": "plots",
    "PromptPairs": "prompts",
    "TargetDataset": "targets",
    "AdditionTask": "tasks",
    "DocstringTask": "tasks",
    "GreaterThanTask": "tasks",
    "IOILongTask": "tasks",
    "IOITask": "tasks",
    "PostTraining": "training",
    "ShuffledStream": "training",
    "evaluate_held_out": "training",
    "post_train": "training",
    "read_documents": "training",
    "token_windows": "training",
}

__version__ = "0.1.0"
__all__ = [
    "AblationCurve",
    "Acdc",
    "AdditionTask",
    "AttentionEdgeScores",
    "AttentionFlow",
    "AttentionGates",
    "BernoulliGate",
    "Circuit",
    "CircuitGraph",
    "ContrastiveGates",
    "DocstringTask",
    "EdgeCounts",
    "EdgeScores",
    "Evaluation",
    "GreaterThanTask",
    "HardConcreteGate",
    "HeadCircuit",
    "HeadGates",
    "HeadRoles",
    "HeadScores",
    "HookMask",
    "IOILongTask",
    "IOITask",
    "Overlap",
    "PostTraining",
    "PromptPairs",
    "Pruning",
    "Roc",
    "ScoredCircuit",
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
    "attribute_attention_edges",
    "attribute_edges",
    "attribute_heads",
    "build_addition_model",
    "circuit_diagram",
    "component_diagram",
    "effect_figure",
    "evaluate",
    "evaluate_edges",
    "evaluate_heads",
    "evaluate_held_out",
    "fit_contrastive_head_gates",
    "fit_head_gates",
    "from_eap_ig",
    "load_addition_models",
    "load_model",
    "load_task_models",
    "overlap",
    "patch_exactly",
    "post_train",
    "prune_edges",
    "read_documents",
    "roc",
    "save_figure",
    "save_model",
    "sparsify_addition_model",
    "to_eap_ig",
    "token_windows",
    "trace_attention",
    "train_addition_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sparse_tl' has no attribute {name!r}")
    return getattr(import_module(f"sparse_tl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
