"""Which parts do a task: measurements on dense and sparse models alike."""

from sparse_tl.circuits.acdc import acdc
from sparse_tl.circuits.attention_graph import AttentionGraph
from sparse_tl.circuits.attribution import (
    attribute_attention_edges,
    attribute_circuit_edges,
    attribute_heads,
)
from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.comparison import Overlap, Roc, overlap, roc
from sparse_tl.circuits.effect import EffectCurve, Evaluation, multiplier
from sparse_tl.circuits.evaluation import (
    accuracy,
    evaluate,
    evaluate_circuit_edges,
    evaluate_heads,
    log_sizes,
)
from sparse_tl.circuits.exact import patch_exactly
from sparse_tl.circuits.interchange import from_eap_ig, to_eap_ig
from sparse_tl.circuits.outcomes import Acdc, Pruning
from sparse_tl.circuits.pruning import prune_circuit_edges
from sparse_tl.circuits.scores import Scores
from sparse_tl.circuits.trace import trace_attention

__all__ = [
    "Acdc",
    "AttentionGraph",
    "Circuit",
    "EffectCurve",
    "Evaluation",
    "Overlap",
    "Pruning",
    "Roc",
    "Scores",
    "accuracy",
    "acdc",
    "attribute_attention_edges",
    "attribute_circuit_edges",
    "attribute_heads",
    "evaluate",
    "evaluate_circuit_edges",
    "evaluate_heads",
    "from_eap_ig",
    "log_sizes",
    "multiplier",
    "overlap",
    "patch_exactly",
    "prune_circuit_edges",
    "roc",
    "to_eap_ig",
    "trace_attention",
]
