"""Which parts do a task: measurements on dense and sparse models alike."""

from sparse_tl.circuits.attribution import attribute_edges, attribute_heads
from sparse_tl.circuits.scores import Circuit, EdgeScores, HeadScores, from_eap_ig, to_eap_ig
from sparse_tl.circuits.trace import trace_attention

__all__ = [
    "Circuit",
    "EdgeScores",
    "HeadScores",
    "attribute_edges",
    "attribute_heads",
    "from_eap_ig",
    "to_eap_ig",
    "trace_attention",
]
