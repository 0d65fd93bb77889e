"""Circuits to touch: widgets for notebooks, recomputed by the running kernel."""

from sparse_tl.explorer.exploration import Exploration
from sparse_tl.explorer.figures import attention_view
from sparse_tl.explorer.widget import CircuitExplorer, explore

__all__ = ["CircuitExplorer", "Exploration", "attention_view", "explore"]
