"""Gates on sites: ``gate * clean + (1 - gate) * patch``. 1 keeps, 0 patches, everywhere."""

from sparse_tl.gates.attention import AttentionGates
from sparse_tl.gates.circuit_edges import CircuitEdges
from sparse_tl.gates.counting import AttentionEdgeCounts
from sparse_tl.gates.distributions import (
    BernoulliGate,
    GateDistribution,
    GateMode,
    HardConcreteGate,
    SigmoidGate,
    expected_size,
)
from sparse_tl.gates.learned import LearnedGates, hook_points
from sparse_tl.gates.patches import Patch, PatchName, PatchValues
from sparse_tl.gates.run import GatedRun, ablate_attention_edges, ablate_heads, gated
from sparse_tl.gates.sites import AttentionEdges, ClosedAttentionEdges, Heads, HookPoints, Site
from sparse_tl.gates.sparse_transformer import SparseTransformer

__all__ = [
    "AttentionEdges",
    "AttentionGates",
    "BernoulliGate",
    "CircuitEdges",
    "ClosedAttentionEdges",
    "AttentionEdgeCounts",
    "GateDistribution",
    "GateMode",
    "GatedRun",
    "HardConcreteGate",
    "Heads",
    "HookPoints",
    "LearnedGates",
    "Patch",
    "PatchName",
    "PatchValues",
    "SigmoidGate",
    "Site",
    "SparseTransformer",
    "ablate_attention_edges",
    "ablate_heads",
    "expected_size",
    "gated",
    "hook_points",
]
