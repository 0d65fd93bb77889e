"""Circuit diagrams: the attention edges of one prompt, one panel per model.

1. Check the panels, and round their weights to thousandths, so that the static and the interactive
   figure compare the same integers with the threshold. Scores stay unrounded for tooltips.
2. Draw the first view with the page's own script: it chooses the edges (``attention_edges.js``),
   computes all places (``attention_layout.js``), and writes SVG (``attention_draw.js``).
3. Combine this static SVG, the data and the script in one HTML fragment; the script draws it anew
   when the reader changes an option.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt
from jaxtyping import Bool, Float, Real
from torch import Tensor

from sparse_tl.arguments import Count, checked
from sparse_tl.circuits.prompt.attention import AttentionGraph, EdgeWeight
from sparse_tl.plots.page import palette
from sparse_tl.plots.page.palette import LABEL_SIZE
from sparse_tl.plots.page.rendering import PanelFigure, by_title
from sparse_tl.plots.page.token_text import clip_text, shorten, visible_text

Threshold = Annotated[float, Ge(0), Lt(1)]
"""Smallest weight to draw; 0 shows every edge with a non-zero weight."""
_SIGNED: tuple[EdgeWeight, ...] = ("effect", "first-order")
"""Weights that have a sign, and one value for each target."""
STEPS = 1000
"""Number of integer steps between weights of 0 and 1."""
MOST_UNFOLDED = 12
"""Maximum number of layers of models whose layers are never folded."""

# Maximum number of attention weights on a page, and of effects, at six to ten bytes each.
_MAX_WEIGHTS = 25_000
# Maximum width of an answer in a caption, in pixels.
_ROOM = 70


class CircuitDiagram(PanelFigure):
    """A circuit diagram that displays in notebooks and can be saved to files."""

    drawing = (
        "reach.js",
        "panel_figure.js",
        "attention_edges.js",
        "attention_text.js",
        "attention_layout.js",
        "attention_draw.js",
    )
    scripts = ("scrolled_figure.js", "circuit_diagram.js")


@checked
def attention_diagram(
    panels: Mapping[str, AttentionGraph] | AttentionGraph,
    *,
    target: int = -1,
    weight: EdgeWeight = "attention",
    threshold: Threshold = 0.1,
    transition: str | None = "Sparsity-Regularised Finetuning",
    title: str | None = None,
    size: tuple[Count, Count] | None = None,
) -> CircuitDiagram:
    """Draw which attention edges move information to a predicted token.

    Columns are token positions and rows are layers, upwards. An edge is drawn if the largest
    weight of any head in its layer reaches the threshold; darker and thicker lines have larger
    weights. Edges that are not connected to the predicted token through drawn edges are light; of
    the others, the 32 that carry most are dark (see ``attention_edges.js``). If MLPs have gates, a
    square below a node is an open MLP that writes to it. In models of more than 12 layers,
    neighbouring layers without a line or an open MLP are folded into a band; a click unfolds them.

    Captions say how many edges are open, how many of them reach the threshold, which is the same in
    all panels, and, of what edges carry, the share of these. The first number and the share compare
    models: the fewer edges a model has, the more each carries, so that a sparse model can have more
    edges above a threshold on what edges carry.

    Images of prompts of up to about 30 tokens are 726 px wide with text of at least 11 px, which is
    6 pt at a width of 5.5 in. Longer prompts add 16 px per token: their text is smaller in print.

    Args:
        panels: attention graphs by panel name, from top to bottom, or one. All must trace the same
            prompt, with the same columns and targets.
        target: index into the graphs' targets: the predicted token that is shown first, and in
            images.
        weight: ``"attention"``: gate times attention probability; ``"carried"``: share of the
            query's residual stream that the edge writes, relative to the largest in any panel;
            ``"effect"``: change of the graphs' metric when the edge is removed, likewise;
            ``"first-order"``: estimate of that. Estimates also replace effects that were not
            computed; their lines are dotted.
        threshold: smallest absolute weight to draw, in 0..1, after rounding to thousandths.
        transition: text along the arrow from each panel to the next; ``None`` for no arrow.
        title: title above the panels.
        size: width and height in pixels that columns and rows fill, down to 16 px per token and
            8 px per layer; by default, as above, and at least 25 px per layer.

    Returns:
        The figure: static SVG that a dependency-free script makes interactive.

    Raises:
        ValueError: there is no panel, panels disagree on columns, targets or metric, the target or
            threshold is out of range, effects are requested but absent, or weights are not
            finite.
        TypeError: a panel is not an `AttentionGraph`.
    """
    panels = by_title(panels)
    _check_panels(panels)
    n_targets = len(next(iter(panels.values())).targets)
    if not -n_targets <= target < n_targets:
        raise ValueError(
            f"target {target} is out of range: it is an index into the {n_targets} targets of the "
            "graphs, not a column"
        )
    target %= n_targets
    for graph in panels.values():
        # First-order estimates replace missing effects.
        is_estimate = weight == "effect" and graph.attribution is not None
        graph.edge_weights("first-order" if is_estimate else weight)  # raises if not traced
    limit = max(1, round(threshold * STEPS))
    state = {"target": target, "weight": weight, "limit": limit, "head": -1}
    data = _script_data(_weighted(panels), state) | {"size": size}
    return CircuitDiagram(data, panels, title, transition)


def _check_panels(panels: Mapping[str, AttentionGraph]) -> None:
    """Whether panels can be compared: they have the same prompt, and effects on one metric."""
    shown = {name: (graph.n_columns, graph.targets) for name, graph in panels.items()}
    if len(set(shown.values())) > 1:
        raise ValueError(
            f"panels trace different prompts, whose numbers of columns and targets are {shown}; "
            "draw them as separate figures"
        )
    metrics = {
        name: graph.metric
        for name, graph in panels.items()
        if graph.effect is not None or graph.attribution is not None
    }
    if len(set(metrics.values())) > 1:
        raise ValueError(
            f"effects on different metrics cannot be compared: {metrics}; trace all models with "
            "the same metric="
        )


# ---- weights in thousandths --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Weighted:
    """An attention graph with its weights in thousandths of the largest in any panel.

    Args:
        weights: by kind, for each target, or once for all. Effects are positive if the edge helps,
            and not rounded; estimates replace those that were not computed.
        largest: largest weight of any panel by kind and target, in the unit of that kind.
        exact: which edges have computed effects.
    """

    name: str
    graph: AttentionGraph
    weights: dict[str, Real[Tensor, "target layer head query key"]]
    largest: dict[str, Float[Tensor, " target"]]
    exact: Bool[Tensor, "layer head query key"]


def _weighted(panels: Mapping[str, AttentionGraph]) -> list[_Weighted]:
    """The graphs with weights on one scale for all panels."""
    given = {name: _weights(graph, name) for name, graph in panels.items()}
    largest = dict[str, Tensor]()
    for weights, _ in given.values():
        for kind, values in weights.items():
            most = values.abs().flatten(start_dim=1).amax(dim=1)
            most = torch.ones(1) if kind == "attention" else most
            largest[kind] = torch.maximum(most, largest.get(kind, most))
    weighted = list[_Weighted]()
    for name, (weights, exact) in given.items():
        for kind, values in weights.items():
            values = STEPS * (values / largest[kind].clamp(min=1e-30)[:, None, None, None, None])
            weights[kind] = values if kind in _SIGNED else values.round().int()
        weighted.append(_Weighted(name, panels[name], weights, largest, exact))
    return weighted


def _weights(graph: AttentionGraph, name: str) -> tuple[dict[str, Tensor], Tensor]:
    """The weights by kind, negative if the edge hurts, and which effects were computed."""
    # Half-precision attention can exceed 1 by rounding.
    given = {"attention": graph.attention.clamp(max=1)[None], "first-order": graph.attribution}
    if graph.carried is not None:
        given["carried"] = graph.carried[None]
    exact = torch.ones_like(graph.gates)
    if graph.effect is not None:
        exact = ~graph.effect.isnan().any(dim=0)
        estimates = graph.effect if graph.attribution is None else graph.attribution
        given["effect"] = graph.effect.where(exact, estimates)
    weights = dict[str, Tensor]()
    for kind, values in given.items():
        if values is None:
            continue
        if not values.isfinite().all():
            raise ValueError(
                f"weights of panel {name!r} are NaN or infinite; look for a position that attends "
                "nowhere, or trace effects with attribution=True, which estimates the missing ones"
            )
        weights[kind] = values.detach().double().cpu() * (-1 if kind in _SIGNED else 1)
    return weights, exact


# ---- the script's data -------------------------------------------------------------------------


def quantity_data(graph: AttentionGraph) -> dict[str, Any]:
    """The quantity that effects change, for the scripts: the metric, its unit and its answers."""
    clipped = [
        [clip_text(visible_text(text), LABEL_SIZE, _ROOM) for text in texts]
        for texts in (graph.answers, graph.wrong)
    ]
    return {"metric": graph.metric, "unit": graph.unit, "answers": clipped[0], "wrong": clipped[1]}


_COLOURS: dict[str, Any] = {
    "ink": palette.INK,
    "muted": palette.MUTED,
    "accent": palette.ACCENT,
    "band": palette.BAND,
    "border": palette.BORDER,
    "residual": palette.RESIDUAL,
    "residualPath": palette.RESIDUAL_ON_PATH,
    "reached": palette.NODE_REACHED,
    "unreached": palette.NODE_UNREACHED,
    "mlp": palette.MLP_NODE,
    # From the weakest to the strongest, of positive and of negative weights.
    "lines": {
        "main": (palette.MAIN, palette.MAIN_NEGATIVE),
        "path": (palette.ON_PATH, palette.ON_PATH_NEGATIVE),
        "open": (palette.OFF_PATH, palette.OFF_PATH_NEGATIVE),
    },
}


def _script_data(panels: Sequence[_Weighted], state: dict[str, Any]) -> dict[str, Any]:
    """What the script draws."""
    floors = _smallest_thresholds(panels, state)
    return {
        "state": state,
        "floors": floors,
        "steps": STEPS,
        "mostUnfolded": MOST_UNFOLDED,
        "colours": _COLOURS,
        "targets": panels[0].graph.targets,
        "given": panels[0].graph.given,
        "panels": [_panel_data(panel, floors) for panel in panels],
    }


def _smallest_thresholds(panels: Sequence[_Weighted], state: dict[str, Any]) -> dict[str, int]:
    """For each weight, the lowest threshold, in thousandths, at which a page of bounded size holds
    every edge of every target; at most the requested threshold."""
    floors = {}
    for kinds in (("attention",), ("carried",), _SIGNED):
        given = [panel.weights[kind] for panel in panels for kind in kinds if kind in panel.weights]
        sizes = torch.cat([values.flatten().abs().round() for values in given] or [torch.zeros(0)])
        n_beyond = int((sizes > 0).sum()) - _MAX_WEIGHTS
        floor = 1 if n_beyond <= 0 else int(sizes.topk(_MAX_WEIGHTS + 1).values[-1]) + 1
        floor = min(floor, state["limit"]) if state["weight"] in kinds else floor
        floors |= dict.fromkeys(kinds, floor)
    return floors


def _listed(
    values: Real[Tensor, "layer head query key"],
    floor: int,
    exact: Bool[Tensor, "layer head query key"] | None = None,
) -> dict[str, list[Any]]:
    """The weights that round to at least `floor`, with four digits; the steps between their indices
    in the flat tensor; and, if some are estimates, whether each is exact."""
    indices = (values.abs().round() >= floor).flatten().nonzero().squeeze(1)
    steps = indices.diff(prepend=torch.zeros(1, dtype=indices.dtype))
    weights = values.flatten()[indices]
    if weights.is_floating_point():
        digits = 10.0 ** (3 - weights.abs().log10().floor())
        weights = (weights * digits).round() / digits
    listed: dict[str, list[Any]] = {"steps": steps.tolist(), "values": weights.tolist()}
    if exact is not None and not bool(exact.all()):
        listed["exact"] = exact.flatten()[indices].int().tolist()
    return listed


def _panel_data(panel: _Weighted, floors: Mapping[str, int]) -> dict[str, Any]:
    graph, mlps = panel.graph, panel.graph.mlps
    return {
        "name": shorten(visible_text(panel.name)),
        "shape": [graph.n_layers, graph.n_heads, graph.n_columns],
        "input": [shorten(visible_text(token)) for token in graph.input_tokens],
        "output": [shorten(visible_text(token)) for token in graph.output_tokens],
        "quantity": quantity_data(graph),
        "nEstimated": int((graph.gates & ~panel.exact).sum()),
        "nPossible": graph.n_possible.tolist(),
        "nOpen": graph.gates.sum(dim=(-2, -1)).tolist(),
        "nMlps": None if mlps is None else mlps.numel(),
        "mlps": [] if mlps is None else mlps.nonzero().tolist(),
        "totalCarried": 0 if graph.carried is None else float(graph.carried.sum()),
        "weights": {
            kind: {
                "rows": [
                    _listed(row, floors[kind], panel.exact if kind == "effect" else None)
                    for row in by_target
                ],
                "scales": [float(f"{scale:.4g}") for scale in panel.largest[kind].tolist()],
            }
            for kind, by_target in panel.weights.items()
        },
    }
