"""The figure for each type of result, as returned by ``result.figure()``."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from sparse_tl.circuits import (
    ActivationPatching,
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
from sparse_tl.plots.diagrams.circuit_diagram import CircuitDiagram, circuit_diagram
from sparse_tl.plots.diagrams.component_diagram import ComponentDiagram, component_diagram
from sparse_tl.plots.page.rendering import Figure
from sparse_tl.plots.panels.curves import Parts, effect_figure
from sparse_tl.plots.panels.grid_figure import GridFigure
from sparse_tl.plots.panels.head_map import head_map
from sparse_tl.plots.panels.head_roles import ablation_grid, head_roles_figure
from sparse_tl.plots.panels.layer_map import layer_map
from sparse_tl.plots.panels.points import neuron_figure, score_figure, skill_figure
from sparse_tl.tasks import SkillComparison

STRONGEST = 60
"""Number of strongest edges drawn for scores of circuit edges."""


@singledispatch
def figure(result: Any, **style: Any) -> Figure:
    """Draw a result with the default figure of its type.

    Args:
        result: a circuit of circuit edges (component diagram; its edges are equally wide without
            ``scores``); scores of circuit edges (component diagram of the 60 strongest, or of the
            ``size`` strongest) or of heads, optionally with ``marked`` heads (head map); an
            evaluation, curve or found circuit (explained effect); checked scores, or effects of
            neurons (scatter plot); activation patching, logit lens or logit attribution (layer
            map); head behaviour (head map); an attention graph (circuit diagram); an ablation
            curve; head roles (heat map); or compared skills (dumbbells).
        **style: ``title``, and arguments of the function that draws the figure.

    Raises:
        TypeError: there is no figure for this type of result.
    """
    kinds = sorted(kind.__name__ for kind in figure.registry if kind is not object)
    raise TypeError(f"expected one of {', '.join(kinds)} to draw; got {type(result).__name__}")


@figure.register(Circuit)
def _(result: Circuit, *, scores: Scores | None = None, **style: Any) -> ComponentDiagram:
    return component_diagram(result, scores=scores, **style)


@figure.register(Scores)
def _(
    result: Scores, *, title: str = "Model", size: int = STRONGEST, **style: Any
) -> GridFigure | ComponentDiagram:
    if isinstance(result.grid, CircuitGraph | PositionedGraph):
        circuit = result.top(min(size, result.grid.n_parts))
        return component_diagram({title: circuit}, scores=result, **style)
    return head_map({title: result}, **style)


@figure.register(ScoreCheck)
def _(result: ScoreCheck, *, title: str = "", **style: Any) -> GridFigure:
    return score_figure({title or result.method: result}, **style)


@figure.register(NeuronEffects)
def _(result: NeuronEffects, **style: Any) -> GridFigure:
    return neuron_figure(result, **style)


@figure.register(HeadBehaviour)
def _(result: HeadBehaviour, *, title: str = "Model", **style: Any) -> GridFigure:
    return head_map({title: result}, **style)


@figure.register(ActivationPatching)
@figure.register(LogitLens)
@figure.register(LogitAttribution)
def _(
    result: ActivationPatching | LogitLens | LogitAttribution, *, title: str = "Model"
) -> GridFigure:
    return layer_map({title: result})


@figure.register(AttentionGraph)
def _(result: AttentionGraph, **style: Any) -> CircuitDiagram:
    return circuit_diagram({"Model": result}, **style)


@figure.register(EffectCurve)
@figure.register(SeedCurves)
def _(
    result: EffectCurve | SeedCurves,
    *,
    parts: Parts = "circuit_edges",
    title: str = "",
    **style: Any,
) -> GridFigure:
    return effect_figure({title or result.name: [result]}, parts=parts, **style)


@figure.register(Evaluation)
def _(result: Evaluation, *, name: str = "Model", **style: Any) -> Figure:
    return figure(result.curve(name), **style)


@figure.register(FoundCircuit)
def _(result: FoundCircuit, *, title: str = "Model", **style: Any) -> GridFigure:
    methods = result.to_pandas()["method"].head(2)  # the best, and the next best
    curves = [result.evaluations[method].curve(method) for method in reversed([*methods])]
    parts: Parts = "circuit_edges" if isinstance(result.circuit.grid, CircuitGraph) else "heads"
    return effect_figure({title: curves}, parts=parts, level=result.at, **style)


@figure.register(AblationCurve)
def _(result: AblationCurve, *, title: str = "") -> GridFigure:
    return ablation_grid({"": {title or result.by.capitalize(): [result]}})


@figure.register(HeadRoles)
def _(result: HeadRoles) -> GridFigure:
    return head_roles_figure(result)


@figure.register(SkillComparison)
def _(result: SkillComparison) -> GridFigure:
    return skill_figure(result)
