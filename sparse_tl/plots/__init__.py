"""Results in, pictures out: nothing here knows a model."""

from sparse_tl.plots.attention_view import AttentionView, attention_view
from sparse_tl.plots.by_result import figure
from sparse_tl.plots.circuit_diagram import CircuitDiagram, circuit_diagram
from sparse_tl.plots.component_diagram import ComponentDiagram, component_diagram
from sparse_tl.plots.curves import effect_figure
from sparse_tl.plots.grid_figure import GridFigure
from sparse_tl.plots.head_roles import ablation_grid, gate_trajectories, head_roles_figure
from sparse_tl.plots.rendering import Figure

__all__ = [
    "AttentionView",
    "CircuitDiagram",
    "ComponentDiagram",
    "Figure",
    "GridFigure",
    "ablation_grid",
    "attention_view",
    "circuit_diagram",
    "component_diagram",
    "effect_figure",
    "figure",
    "gate_trajectories",
    "head_roles_figure",
]
