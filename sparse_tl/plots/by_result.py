"""The figure for each type of result, as returned by ``result.figure()``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparse_tl.circuits import (
    ActivationPatching,
    AttributionGraph,
    Circuit,
    EffectCurve,
    Evaluation,
    FoundCircuit,
    HeadBehaviour,
    LogitAttribution,
    LogitLens,
    NeuronEffects,
    ScoreCheck,
    Scores,
    SeedCurves,
)
from sparse_tl.circuits.prompt.attention import AttentionGraph
from sparse_tl.graph import CircuitGraph, PositionedGraph
from sparse_tl.head_roles import AblationCurve, HeadRoles
from sparse_tl.plots.diagrams.attention_diagram import attention_diagram
from sparse_tl.plots.diagrams.attribution_diagram import attribution_diagram
from sparse_tl.plots.diagrams.component_diagram import component_diagram
from sparse_tl.plots.page.rendering import Figure
from sparse_tl.plots.panels.curves import Parts, ablation_grid, effect_figure
from sparse_tl.plots.panels.maps import head_map, head_roles_figure, layer_map
from sparse_tl.plots.panels.points import neuron_figure, score_figure, skill_figure
from sparse_tl.tasks import SkillComparison

STRONGEST = 60
"""Number of strongest edges drawn for scores of circuit edges."""


def figure(result: Any, **style: Any) -> Figure:
    """Draw a result with the default figure of its type.

    Args:
        result: a circuit of circuit edges (component diagram; its edges are equally wide without
            ``scores``); scores of circuit edges (component diagram of the 60 strongest, or of the
            ``size`` strongest) or of heads, optionally with ``marked`` heads (head map); a found
            circuit (component diagram, or head map with its heads marked); an evaluation or a
            curve (explained effect); checked scores, or effects of neurons (scatter plot);
            activation patching, logit lens or logit attribution (layer map); head behaviour (head
            map); an attention graph (circuit diagram); an attribution graph; an ablation curve;
            head roles (heat map); or compared skills (dumbbells).
        **style: ``title``, and arguments of the function that draws the figure.

    Raises:
        TypeError: there is no figure for this type of result.
    """
    draw = DRAWN.get(type(result))
    if draw is None:
        kinds = ", ".join(sorted(kind.__name__ for kind in DRAWN))
        raise TypeError(f"there is no figure of {type(result).__name__}; there are of {kinds}")
    return draw(result, **style)


def _scores(result: Scores, title: str = "Model", size: int = STRONGEST, **style: Any) -> Figure:
    if isinstance(result.grid, CircuitGraph | PositionedGraph):
        circuit = result.top(min(size, result.grid.n_parts))
        return component_diagram({title: circuit}, scores=result, **style)
    return head_map({title: result}, **style)


def _score_check(result: ScoreCheck, title: str = "", **style: Any) -> Figure:
    return score_figure({title or result.method: result}, **style)


def _titled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """How one result is drawn by a function that takes results by title."""
    return lambda result, title="Model", **style: draw({title: result}, **style)


def _curve(
    result: EffectCurve | SeedCurves,
    title: str = "",
    parts: Parts = "circuit_edges",
    **style: Any,
) -> Figure:
    return effect_figure({title or result.name: [result]}, parts=parts, **style)


def _evaluation(result: Evaluation, name: str = "Model", **style: Any) -> Figure:
    return _curve(result.curve(name), **style)


def _found_circuit(result: FoundCircuit, title: str = "Circuit", **style: Any) -> Figure:
    circuit = result.circuit
    if isinstance(circuit.grid, CircuitGraph):
        return component_diagram({title: circuit}, scores=result.scores, **style)
    return head_map({title: result.scores}, marked={title: circuit.heads}, **style)


def _ablation_curve(result: AblationCurve, title: str = "") -> Figure:
    return ablation_grid({"": {title or result.by.capitalize(): [result]}})


DRAWN: dict[type, Callable[..., Figure]] = {
    Circuit: component_diagram,
    Scores: _scores,
    ScoreCheck: _score_check,
    NeuronEffects: neuron_figure,
    HeadBehaviour: _titled(head_map),
    ActivationPatching: _titled(layer_map),
    LogitLens: _titled(layer_map),
    LogitAttribution: _titled(layer_map),
    AttentionGraph: _titled(attention_diagram),
    AttributionGraph: attribution_diagram,
    EffectCurve: _curve,
    SeedCurves: _curve,
    Evaluation: _evaluation,
    FoundCircuit: _found_circuit,
    AblationCurve: _ablation_curve,
    HeadRoles: head_roles_figure,
    SkillComparison: skill_figure,
}
"""What draws each type of result."""
