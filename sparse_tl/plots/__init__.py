"""Results in, pictures out: nothing here knows a model."""

from sparse_tl.plots.attention_view import AttentionView, attention_view
from sparse_tl.plots.circuit_diagram import CircuitDiagram, circuit_diagram
from sparse_tl.plots.component_diagram import ComponentDiagram, component_diagram
from sparse_tl.plots.curves import EffectCurve, effect_figure, multiplier
from sparse_tl.plots.drawn_circuit import ScoredCircuit
from sparse_tl.plots.head_roles import (
    AblationLine,
    ablation_grid,
    gate_trajectories,
    head_roles_figure,
)
from sparse_tl.plots.plotly_figure import PlotlyFigure, save_figure
from sparse_tl.plots.rendering import SelfContainedFigure

__all__ = [
    "AblationLine",
    "AttentionView",
    "CircuitDiagram",
    "ComponentDiagram",
    "EffectCurve",
    "PlotlyFigure",
    "ScoredCircuit",
    "SelfContainedFigure",
    "ablation_grid",
    "attention_view",
    "circuit_diagram",
    "component_diagram",
    "effect_figure",
    "gate_trajectories",
    "head_roles_figure",
    "multiplier",
    "save_figure",
]
