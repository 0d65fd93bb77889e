"""Circuits to touch: widgets for notebooks, recomputed by the running kernel."""

from sparse_tl.circuits.removal import AttentionEdge, Head
from sparse_tl.explorer.browser import attention_view
from sparse_tl.explorer.session import Exploration, NodeReading, TokenChange, TokenScore
from sparse_tl.explorer.widget import CircuitExplorer, explore

__all__ = [
    "AttentionEdge",
    "CircuitExplorer",
    "Exploration",
    "Head",
    "NodeReading",
    "TokenChange",
    "TokenScore",
    "attention_view",
    "explore",
]
