"""Which parts do a task: measurements on dense and sparse models alike."""

from sparse_tl.circuits.attribution import attribute_edges, attribute_heads
from sparse_tl.circuits.evaluation import (
    Evaluation,
    evaluate,
    evaluate_edges,
    evaluate_heads,
    log_sizes,
)
from sparse_tl.circuits.exact import patch_exactly
from sparse_tl.circuits.scores import (
    Circuit,
    EdgeScores,
    HeadCircuit,
    HeadScores,
    from_eap_ig,
    to_eap_ig,
)
from sparse_tl.circuits.trace import trace_attention

__all__ = [
    "Circuit",
    "EdgeScores",
    "Evaluation",
    "HeadCircuit",
    "HeadScores",
    "attribute_edges",
    "attribute_heads",
    "evaluate",
    "evaluate_edges",
    "evaluate_heads",
    "from_eap_ig",
    "log_sizes",
    "patch_exactly",
    "to_eap_ig",
    "trace_attention",
]
