"""The weights of a circuit diagram's attention edges, checked and in thousandths.

The static and the interactive figure draw weights rounded to integers, so that they compare the
same numbers with the threshold. ``attention_edges.js`` chooses the edges to draw. Scores stay
unrounded for tooltips.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.circuits.prompt.attention_graph import AttentionGraph
from sparse_tl.plots.page.palette import LABEL_SIZE
from sparse_tl.plots.page.token_text import clip_text, visible_text

STEPS = 1000
"""Number of integer steps between weights of 0 and 1."""
_ROOM = 70
"""Maximum width of an answer in a caption, in pixels."""


@dataclass(frozen=True, eq=False)
class RoundedGraph:
    """An attention graph with weights in thousandths.

    Args:
        name: name of its panel.
        graph: the traced graph.
        attention: gate times attention, 0..1000.
        carried: what edges carry, 0..1000, relative to `most_carried`; ``None`` if unknown.
        most_carried: the largest share carried by an edge of any panel.
        scores: available scores, "effect" and "first-order", of removing an edge; positive: the
            edge helps; -1000..1000 for each target, relative to `scales`, and not rounded.
            Estimates replace effects that were not computed.
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


def quantity_data(graph: AttentionGraph) -> dict[str, Any]:
    """The quantity that effects change, for the scripts: the metric, its unit and its answers."""
    clipped = [
        [clip_text(visible_text(text), LABEL_SIZE, _ROOM) for text in texts]
        for texts in (graph.answers, graph.wrong)
    ]
    return {"metric": graph.metric, "unit": graph.unit, "answers": clipped[0], "wrong": clipped[1]}


def threshold_steps(threshold: float) -> int:
    """A threshold in thousandths; 0 keeps every non-zero edge."""
    return max(1, round(threshold * STEPS))


def round_graphs(panels: Mapping[str, AttentionGraph]) -> list[RoundedGraph]:
    """Check graphs and round their weights to thousandths, on one scale for all panels.

    Args:
        panels: graph of each panel, by name, which error messages mention.

    Raises:
        ValueError: a weight is not finite, an attention weight is outside 0..1, or an impossible
            edge (from a later position, or through a closed gate) has a weight.
    """
    attention = {name: _attention(graph, name) for name, graph in panels.items()}
    carried = {name: _carried(graph, name) for name, graph in panels.items()}
    most = max(
        (float(shares.max()) for shares in carried.values() if shares is not None), default=0
    )
    scores = {name: _scores(graph, name) for name, graph in panels.items()}
    scales = dict[str, Tensor]()
    for found, _ in scores.values():
        for kind, values in found.items():
            largest = values.abs().flatten(start_dim=1).amax(dim=1)
            scales[kind] = torch.maximum(largest, scales.get(kind, largest))

    def rounded(name: str, graph: AttentionGraph) -> RoundedGraph:
        shares, (found, exact) = carried[name], scores[name]
        helps = {
            kind: -values / scales[kind].clamp(min=1e-30)[:, None, None, None, None] * STEPS
            for kind, values in found.items()
        }
        return RoundedGraph(
            name,
            graph,
            (attention[name].clamp(max=1) * STEPS).round().to(torch.int32),
            None if shares is None else (shares / max(most, 1e-30) * STEPS).round().to(torch.int32),
            most,
            helps,
            {kind: scales[kind].tolist() for kind in found},
            exact,
        )

    return [rounded(name, graph) for name, graph in panels.items()]


def _attention(graph: AttentionGraph, name: str) -> Float[Tensor, "layer head query key"]:
    """The attention of a graph, checked."""
    attention = graph.attention.detach().double().cpu()
    _check_finite(attention, f"attention of panel {name!r}")
    low, high = (float(bound) for bound in attention.aminmax())
    # Half-precision attention can exceed 1 by rounding.
    if low < 0 or high > 1 + 1e-2:
        raise ValueError(
            f"expected attention weights of panel {name!r} in 0..1; got {low:.4g}..{high:.4g}; "
            "pass gate times attention probability as `attention`, and signed scores as "
            "`effect` or `attribution`"
        )
    if graph.causal and attention.triu(diagonal=1).any():
        raise ValueError(
            f"expected no attention from later positions in panel {name!r}; got a weight above "
            "the diagonal; check that the last two dimensions are (query, key), or pass "
            "causal=False for bidirectional attention"
        )
    if attention[~graph.gates.cpu()].any():
        raise ValueError(
            f"expected attention of 0 at closed gates in panel {name!r}; got other weights; "
            "multiply the attention probabilities by the gates first"
        )
    return attention


def _carried(graph: AttentionGraph, name: str) -> Float[Tensor, "layer head query key"] | None:
    """What the edges of a graph carry, checked; None if it is unknown."""
    if graph.carried is None:
        return None
    shares = graph.carried.detach().double().cpu()
    _check_finite(shares, f"what edges carry in panel {name!r}")
    if shares.shape != graph.attention.shape or bool((shares < 0).any()):
        raise ValueError(
            f"expected shares of at least 0 as `carried` of panel {name!r}, one per attention "
            f"edge; got shape {tuple(shares.shape)} and a minimum of {shares.min():.4g}"
        )
    return shares


def _scores(
    graph: AttentionGraph, name: str
) -> tuple[
    dict[str, Float[Tensor, "target layer head query key"]], Bool[Tensor, "layer head query key"]
]:
    """The changes of the metric by kind of score, checked; and which effects were computed."""
    scores, exact = dict[str, Tensor](), torch.ones_like(graph.gates)
    for kind, given in {"effect": graph.effect, "first-order": graph.attribution}.items():
        if given is None:
            continue
        values = given.detach().double().cpu()
        expected = (len(graph.targets), *graph.attention.shape)
        if values.shape != expected:
            raise ValueError(
                f"expected {kind} scores of shape {expected} in panel {name!r}, one per target "
                f"and attention edge; got {tuple(values.shape)}"
            )
        if kind == "effect":
            exact = ~values.isnan().any(dim=0)
            if graph.attribution is not None and not bool(exact.all()):
                values = values.where(exact, graph.attribution.detach().double().cpu())
        _check_finite(values, f"{kind} scores of panel {name!r}")
        scores[kind] = values
    return scores, exact


def _check_finite(values: Tensor, what: str) -> None:
    n_bad = int((~values.isfinite()).sum())
    if n_bad:
        raise ValueError(
            f"expected finite {what}; got {n_bad} NaN or infinite values of {values.numel()}; "
            "look for a position that attends nowhere, or a division by 0"
        )
