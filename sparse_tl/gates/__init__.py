"""Learnable masks on hook points. 1 keeps, 0 patches, everywhere."""

from sparse_tl.gates.ablation import ablate_attention_edges, ablate_heads
from sparse_tl.gates.attention import AttentionGates, EdgeRecord
from sparse_tl.gates.counting import EdgeCounts
from sparse_tl.gates.distributions import (
    BernoulliGate,
    GateDistribution,
    GateMode,
    HardConcreteGate,
    SigmoidGate,
    expected_size,
)
from sparse_tl.gates.hook_mask import HeadGates, HookMask
from sparse_tl.gates.sparse_transformer import SparseTransformer

__all__ = [
    "AttentionGates",
    "BernoulliGate",
    "EdgeCounts",
    "EdgeRecord",
    "GateDistribution",
    "GateMode",
    "HardConcreteGate",
    "HeadGates",
    "HookMask",
    "SigmoidGate",
    "SparseTransformer",
    "ablate_attention_edges",
    "ablate_heads",
    "expected_size",
]
