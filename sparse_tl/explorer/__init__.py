"""Interactive circuits: notebook widgets, recomputed by the running kernel."""

from sparse_tl.explorer.exploration import Exploration as Exploration
from sparse_tl.explorer.figures import attention_view as attention_view
from sparse_tl.explorer.graph_explorer import GraphExplorer as GraphExplorer
from sparse_tl.explorer.widget import CircuitExplorer as CircuitExplorer, explore as explore
