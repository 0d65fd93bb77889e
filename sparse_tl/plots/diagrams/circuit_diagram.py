"""Circuit diagrams: the attention edges of one prompt, one panel per model.

1. Check the panels, and round their weights to thousandths, so that the static and the interactive
   figure compare the same integers with the threshold. Scores stay unrounded for tooltips.
2. Compute the layout (`circuit_svg`), and choose the edges to draw with the page's own script
   (``attention_edges.js``).
3. Draw the static SVG (`circuit_svg`).
4. Combine the SVG, its data and the script in one HTML fragment; the script redraws the lines when
   the reader changes an option.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.arguments import Count, checked
from sparse_tl.circuits.prompt.attention import AttentionGraph, EdgeWeight
from sparse_tl.plots.diagrams.circuit_svg import (
    Layout,
    PanelLayout,
    draw_svg,
    drawn_token,
    lay_out,
    line_styles,
    prediction_arrow,
)
from sparse_tl.plots.page import palette
from sparse_tl.plots.page.palette import LABEL_SIZE
from sparse_tl.plots.page.rendering import (
    FIRST_VIEW,
    PanelFigure,
    Surround,
    run_script,
    script_json,
)
from sparse_tl.plots.page.token_text import clip_text, shorten, visible_text

Threshold = Annotated[float, Ge(0), Lt(1)]
"""Smallest weight to draw; 0 shows every edge with a non-zero weight."""
STEPS = 1000
"""Number of integer steps between weights of 0 and 1."""
CIRCUIT_DRAWING = ("reach.js", "attention_edges.js", "attention_text.js")
"""Scripts that draw the edges, on a page and in Python."""

# Maximum number of attention weights on a page, and of effects, at six to ten bytes each.
_MAX_WEIGHTS = 25_000
# Maximum width of an answer in a caption, in pixels.
_ROOM = 70


class CircuitDiagram(PanelFigure):
    """A circuit diagram that displays in notebooks and can be saved to files."""

    scripts = (*CIRCUIT_DRAWING, "scrolled_figure.js", "layer_folds.js", "circuit_diagram.js")


@checked
def circuit_diagram(
    panels: Mapping[str, AttentionGraph],
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

    Captions say how many edges are open, and how many of them reach the threshold, which is the
    same in all panels. The first number compares models: the fewer edges a model has, the more each
    carries, so that a sparse model can have more edges above a threshold on what edges carry.

    Images of prompts of up to about 30 tokens are 726 px wide with text of at least 11 px, which is
    6 pt at a width of 5.5 in. Longer prompts add 16 px per token: their text is smaller in print.

    Args:
        panels: attention graphs by panel name, from top to bottom. All must trace the same prompt,
            with the same columns and targets.
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
            threshold is out of range, effects are requested but absent, or weights are not finite
            or out of range.
        TypeError: a panel is not an `AttentionGraph`.
    """
    _check_panels(panels)
    n_targets = len(next(iter(panels.values())).targets)
    if not -n_targets <= target < n_targets:
        raise ValueError(
            f"target {target} is out of range: it is an index into the {n_targets} targets of the "
            "graphs, not a column"
        )
    target %= n_targets
    rounded = _round_graphs(panels)
    for graph in panels.values():
        # First-order estimates replace missing effects.
        is_estimate = weight == "effect" and graph.attribution is not None
        graph.edge_weights("first-order" if is_estimate else weight)  # raises if not traced
    surround = Surround(tuple(panels), title, transition)
    limit = max(1, round(threshold * STEPS))
    state = {"target": target, "weight": weight, "limit": limit, "head": -1}
    drawn = [_drawn(panel, weight, target, limit) for panel in rounded]
    layout = lay_out(list(panels.values()), surround, drawn, size)
    data = script_json(_script_data(rounded, layout, state))
    shown = list(zip(panels.values(), run_script(CIRCUIT_DRAWING, FIRST_VIEW, data), strict=True))
    svg = draw_svg(shown, layout, surround, target=target, weight=weight)
    return CircuitDiagram(svg, data, surround)


def _check_panels(panels: Mapping[str, AttentionGraph]) -> None:
    """Whether panels can be compared: they have the same prompt, and effects on one metric."""
    if not panels:
        raise ValueError('there is no panel; pass {"Base Model": trace_attention(...)}')
    first_name, first = next(iter(panels.items()))
    for name, graph in panels.items():
        for what in ("n_columns", "targets"):
            one, other = getattr(first, what), getattr(graph, what)
            if one != other:
                raise ValueError(
                    f"panels trace different prompts: {what} {one} in {first_name!r} and {other} "
                    f"in {name!r}; draw them as separate figures"
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
class _RoundedGraph:
    """An attention graph with weights in thousandths.

    Args:
        carried: what edges carry, relative to `most_carried`, the most that any edge carries.
        scores: "effect" and "first-order" scores of removing an edge, for each target: positive if
            the edge helps, relative to `scales`, not rounded. Estimates replace effects that were
            not computed.
        scales: largest absolute effect of each target in any panel, in the metric's unit.
        exact: which edges have computed effects.
    """

    name: str
    graph: AttentionGraph
    attention: Int[Tensor, "layer head query key"]
    carried: Int[Tensor, "layer head query key"] | None
    most_carried: float
    scores: dict[str, Float[Tensor, "target layer head query key"]]
    scales: dict[str, list[float]]
    exact: Bool[Tensor, "layer head query key"]


def _round_graphs(panels: Mapping[str, AttentionGraph]) -> list[_RoundedGraph]:
    """The graphs with weights on one scale for all panels."""
    carried = {n: _finite(g.carried, n) for n, g in panels.items() if g.carried is not None}
    most = max((float(shares.max()) for shares in carried.values()), default=0)
    scores = {name: _scores(graph, name) for name, graph in panels.items()}
    scales = dict[str, Tensor]()
    for found, _ in scores.values():
        for kind, values in found.items():
            largest = values.abs().flatten(start_dim=1).amax(dim=1)
            scales[kind] = torch.maximum(largest, scales.get(kind, largest))
    rounded = list[_RoundedGraph]()
    for name, graph in panels.items():
        attention, (found, exact) = _finite(graph.attention, name), scores[name]
        some = graph.gates.cpu().tril() if graph.causal else graph.gates.cpu()
        # Half-precision attention can exceed 1 by rounding.
        if attention.min() < 0 or attention.max() > 1 + 1e-2 or attention[~some].any():
            raise ValueError(
                f"attention[..., query, key] of panel {name!r} must be gate times probability: in "
                "0..1, and 0 at closed gates and, unless causal=False, at later keys"
            )
        shares = _in_steps(carried[name] / max(most, 1e-30)) if name in carried else None
        helps = {
            kind: -values / scales[kind].clamp(min=1e-30)[:, None, None, None, None] * STEPS
            for kind, values in found.items()
        }
        sizes = {kind: scales[kind].tolist() for kind in found}
        attention = _in_steps(attention.clamp(max=1))
        rounded.append(_RoundedGraph(name, graph, attention, shares, most, helps, sizes, exact))
    return rounded


def _in_steps(values: Tensor) -> Tensor:
    return (values * STEPS).round().to(torch.int32)


def _scores(graph: AttentionGraph, name: str) -> tuple[dict[str, Tensor], Tensor]:
    """The changes of the metric by kind of score, and which effects were computed."""
    scores, exact = dict[str, Tensor](), torch.ones_like(graph.gates)
    for kind, given in {"effect": graph.effect, "first-order": graph.attribution}.items():
        if given is None:
            continue
        values = given.detach().double().cpu()
        if kind == "effect":
            exact = ~values.isnan().any(dim=0)
            if graph.attribution is not None:
                values = values.where(exact, graph.attribution.detach().double().cpu())
        scores[kind] = _finite(values, name)
    return scores, exact


def _finite(values: Tensor, name: str) -> Tensor:
    values = values.detach().double().cpu()
    if not values.isfinite().all():
        raise ValueError(
            f"weights of panel {name!r} are NaN or infinite; look for a position that attends "
            "nowhere, or trace effects with attribution=True, which estimates the missing ones"
        )
    return values


def _drawn(
    panel: _RoundedGraph, weight: EdgeWeight, target: int, limit: int
) -> Bool[Tensor, "layer query key"]:
    """Which lines the first view draws."""
    weights: Tensor = panel.attention
    if weight == "carried" and panel.carried is not None:
        weights = panel.carried
    elif weight in ("effect", "first-order"):
        weights = panel.scores[weight if weight in panel.scores else "first-order"][target]
    # The script rounds halves up.
    return ((weights.abs() + 0.5).floor() >= limit).any(dim=1)


# ---- the script's data -------------------------------------------------------------------------


def quantity_data(graph: AttentionGraph) -> dict[str, Any]:
    """The quantity that effects change, for the scripts: the metric, its unit and its answers."""
    clipped = [
        [clip_text(visible_text(text), LABEL_SIZE, _ROOM) for text in texts]
        for texts in (graph.answers, graph.wrong)
    ]
    return {"metric": graph.metric, "unit": graph.unit, "answers": clipped[0], "wrong": clipped[1]}


def _script_data(
    panels: Sequence[_RoundedGraph], layout: Layout, state: dict[str, Any]
) -> dict[str, Any]:
    """The data from which the script redraws the lines of the static figure."""
    floors = _smallest_thresholds(panels, state)
    return {
        "state": state,
        "floors": floors,
        "steps": STEPS,
        "columns": layout.columns,
        "bow": layout.bow,
        "styles": line_styles(layout.line_scale),
        "paint": {
            "reached": palette.NODE_REACHED,
            "unreached": palette.NODE_UNREACHED,
            "predicted": palette.ACCENT,
        },
        "targets": panels[0].graph.targets,
        "given": panels[0].graph.given,
        "panels": [
            _panel_data(panel, floors, layout, panel_layout)
            for panel, panel_layout in zip(panels, layout.panels, strict=True)
        ],
    }


def _smallest_thresholds(panels: Sequence[_RoundedGraph], state: dict[str, Any]) -> dict[str, int]:
    """For each weight, the lowest threshold, in thousandths, at which a page of bounded size holds
    every edge of every target; at most the requested threshold."""
    weights = {
        "attention": [panel.attention for panel in panels],
        "carried": [panel.carried for panel in panels if panel.carried is not None],
        "effect": [values for panel in panels for values in panel.scores.values()],
    }
    floors = {}
    for kind, values in weights.items():
        sizes = torch.cat([each.flatten().abs().round() for each in values] or [torch.zeros(0)])
        n_beyond = int((sizes > 0).sum()) - _MAX_WEIGHTS
        floor = 1 if n_beyond <= 0 else int(sizes.topk(_MAX_WEIGHTS + 1).values[-1]) + 1
        is_shown = kind == {"first-order": "effect"}.get(state["weight"], state["weight"])
        floors[kind] = min(floor, state["limit"]) if is_shown else floor
    return floors | {"first-order": floors["effect"]}


def _listed(
    values: Int[Tensor, "layer head query key"] | Float[Tensor, "layer head query key"],
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


def _panel_data(
    panel: _RoundedGraph, floors: Mapping[str, int], layout: Layout, panel_layout: PanelLayout
) -> dict[str, Any]:
    graph = panel.graph
    outputs = [visible_text(token) for token in graph.output_tokens]
    mlps = ""
    if graph.mlps is not None:
        mlps = f"; {int(graph.mlps.sum()):,} of {graph.mlps.numel():,} MLPs open"
    return {
        "name": shorten(visible_text(panel.name)),
        "shape": [graph.n_layers, graph.n_heads, graph.n_columns],
        "levels": panel_layout.levels,
        "row": panel_layout.row,
        "radii": panel_layout.radii,
        "folds": panel_layout.folds,
        "reach": panel_layout.reach,
        "bend": panel_layout.bend,
        "swing": panel_layout.swing,
        "input": [shorten(visible_text(token)) for token in graph.input_tokens],
        "output": [shorten(token) for token in outputs],
        # The text above a given column if its prediction is shown.
        "above": {column: drawn_token(outputs[column], layout) for column in graph.given},
        "arrows": [
            prediction_arrow(layout, panel_layout, column, read_at)
            for column, read_at in graph.targets
        ],
        "quantity": quantity_data(graph),
        "nEstimated": int((graph.gates & ~panel.exact).sum()),
        "nPossible": graph.n_possible.tolist(),
        "nOpen": graph.gates.sum(dim=(-2, -1)).tolist(),
        "mlps": mlps,
        "attention": _listed(panel.attention, floors["attention"]),
        "carried": None if panel.carried is None else _listed(panel.carried, floors["carried"]),
        "mostCarried": float(f"{panel.most_carried:.4g}"),
        "scores": {
            kind: {
                "rows": [
                    _listed(row, floors[kind], panel.exact if kind == "effect" else None)
                    for row in values
                ],
                "scales": [float(f"{scale:.4g}") for scale in panel.scales[kind]],
            }
            for kind, values in panel.scores.items()
        },
    }
