"""Figures of results, independent of models."""

from sparse_tl.plots.by_result import figure as figure
from sparse_tl.plots.diagrams.attention_diagram import (
    CircuitDiagram as CircuitDiagram,
    attention_diagram as attention_diagram,
)
from sparse_tl.plots.diagrams.attention_maps import (
    AttentionView as AttentionView,
    attention_maps as attention_maps,
)
from sparse_tl.plots.diagrams.attribution_diagram import (
    attribution_diagram as attribution_diagram,
)
from sparse_tl.plots.diagrams.component_diagram import (
    ComponentDiagram as ComponentDiagram,
    component_diagram as component_diagram,
)
from sparse_tl.plots.page.rendering import Figure as Figure
from sparse_tl.plots.panels.curves import (
    ablation_grid as ablation_grid,
    effect_figure as effect_figure,
    gate_trajectories as gate_trajectories,
)
from sparse_tl.plots.panels.grid import GridFigure as GridFigure
from sparse_tl.plots.panels.maps import (
    head_map as head_map,
    head_roles_figure as head_roles_figure,
    layer_map as layer_map,
)
from sparse_tl.plots.panels.points import (
    neuron_figure as neuron_figure,
    score_figure as score_figure,
    skill_figure as skill_figure,
)
