"""Which attention edges a circuit diagram draws, and which of them lead to the prediction.

1. Round every weight to thousandths, so that the static and the interactive figure, which gets
   these integers, compare the same numbers with the threshold.
2. Merge the heads of a layer: an edge from key to query has the largest weight of any head.
3. Keep the edges at or above the threshold. Those from which kept edges lead to the predicted
   token are on the path; the others are merely *open*.
4. An edge on the path carries its weight times the weights along the best route from its end to
   the prediction (1 for each step up the residual stream). The 32 edges that carry most are the
   *main* ones; other edges on a *path* are lighter. In a sparse model usually every edge on the
   path is a main edge; in a dense model the main edges stand out. An edge from a column to itself
   is never a main edge, since the residual stream takes the same way without loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.circuits.attention_graph import AttentionGraph, EdgeWeight, ancestors

STEPS = 1000
"""Weights are integers: the number of steps between a weight of 0 and of 1."""
N_MAIN_EDGES = 32
"""Maximum number of dark lines in a panel."""

EdgeKind = Literal["open", "path", "main"]


@dataclass(frozen=True, eq=False)
class RoundedGraph:
    """An attention graph with weights in thousandths.

    Args:
        name: name of its panel.
        graph: the traced graph.
        attention: gate times attention, 0..1000.
        scores: available scores, "effect" and "first-order", of removing an edge; positive: the
            edge helps; -1000..1000 for each target, relative to `scales`.
        scales: largest absolute effect of each target, in logits.
    """

    name: str
    graph: AttentionGraph
    attention: Int[Tensor, "layer head query key"]
    scores: dict[str, Int[Tensor, "target layer head query key"]]
    scales: dict[str, list[float]]

    def shown(self, weight: EdgeWeight) -> EdgeWeight:
        """The weight that is drawn for a requested one: effects that are not known exactly are
        replaced by first-order estimates."""
        return "first-order" if weight == "effect" and "effect" not in self.scores else weight

    def values(self, weight: EdgeWeight, target: int) -> Int[Tensor, "layer head query key"]:
        """The weight of each edge for one target, in thousandths."""
        kind = self.shown(weight)
        return self.attention if kind == "attention" else self.scores[kind][target]


@dataclass(frozen=True)
class DrawnEdge:
    """One line of the figure: an attention edge after the maximum over heads."""

    layer: int
    query: int
    key: int
    value: int
    kind: EdgeKind


@dataclass(frozen=True, eq=False)
class EdgeSelection:
    """Contents of one panel.

    Args:
        edges: lines, ordered by layer, query and key.
        reached: nodes from which the predicted token can be reached.
        n_attention_edges: number of edges at or above the threshold, counted per head.
    """

    edges: tuple[DrawnEdge, ...]
    reached: Bool[Tensor, "level column"]
    n_attention_edges: int

    @property
    def n_on_path(self) -> int:
        return sum(edge.kind != "open" for edge in self.edges)


def threshold_steps(threshold: float) -> int:
    """A threshold in thousandths; 0 keeps every non-zero edge."""
    return max(1, round(threshold * STEPS))


def round_graph(graph: AttentionGraph, name: str) -> RoundedGraph:
    """Check a graph and round its weights to thousandths.

    Args:
        graph: graph to round.
        name: panel name for error messages.

    Raises:
        ValueError: a weight is not finite, an attention weight is outside 0..1, or an impossible
            edge (from a later position, or through a closed gate) has a weight.
    """
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
            "the diagonal; check that the last two dimensions are (query, key), or say "
            "causal=False where attention is bidirectional"
        )
    if attention[~graph.gates.cpu()].any():
        raise ValueError(
            f"expected attention 0 where the gate is closed in panel {name!r}; got other weights; "
            "multiply the attention probabilities by the gates first"
        )
    rounded = (attention.clamp(max=1) * STEPS).round().to(torch.int32)
    scores, scales = {}, {}
    for kind, given in {"effect": graph.effect, "first-order": graph.attribution}.items():
        if given is None:
            continue
        values = given.detach().double().cpu()
        _check_finite(values, f"{kind} scores of panel {name!r}")
        expected = (len(graph.targets), *attention.shape)
        if values.shape != expected:
            raise ValueError(
                f"expected {kind} scores of shape {expected} in panel {name!r}, one per target "
                f"and attention edge; got {tuple(values.shape)}"
            )
        largest = values.abs().flatten(start_dim=1).amax(dim=1)
        helps = -values / largest.clamp(min=1e-30)[:, None, None, None, None]
        scores[kind], scales[kind] = (helps * STEPS).round().to(torch.int32), largest.tolist()
    return RoundedGraph(name, graph, rounded, scores, scales)


def _check_finite(values: Tensor, what: str) -> None:
    n_bad = int((~values.isfinite()).sum())
    if n_bad:
        raise ValueError(
            f"expected finite {what}; got {n_bad} NaN or infinite values of {values.numel()}; "
            "look for a position that attends nowhere, or a division by 0"
        )


def select_edges(
    values: Int[Tensor, "layer head query key"], limit: int, read_at: int
) -> EdgeSelection:
    """The edges to draw, and which of them lead to the prediction.

    Args:
        values: signed weights in thousandths.
        limit: smallest absolute weight to draw, in thousandths.
        read_at: column where the prediction is read, at the last level.
    """
    strongest_head = values.abs().argmax(dim=1, keepdim=True)
    merged = values.gather(1, strongest_head).squeeze(1)
    kept = merged.abs() >= limit
    reached = ancestors(kept, read_at)
    on_path = kept & reached[1:, :, None]
    moving = (on_path & ~torch.eye(values.shape[-1], dtype=torch.bool)).flatten().nonzero()[:, 0]
    carried = _carried(merged * kept, read_at).flatten()[moving]
    # Ties are broken by layer, query and key.
    best = carried.argsort(descending=True, stable=True)[:N_MAIN_EDGES]
    rank = on_path.int().flatten().index_fill(0, moving[best], 2).view_as(merged)
    kinds = get_args(EdgeKind)
    edges = tuple(
        DrawnEdge(layer, query, key, value, kinds[kind])
        for (layer, query, key), value, kind in zip(
            kept.nonzero().tolist(), merged[kept].tolist(), rank[kept].tolist(), strict=True
        )
    )
    return EdgeSelection(edges, reached, int((values.abs() >= limit).sum()))


def _carried(
    values: Int[Tensor, "layer query key"], read_at: int
) -> Float[Tensor, "layer query key"]:
    """For each edge, the largest product of weights over the routes through it."""
    # In double precision, as in the script, so that both agree to the last bit.
    carried = values.abs().double() / STEPS
    strength = torch.zeros(values.shape[-1], dtype=torch.float64)
    strength[read_at] = 1.0
    for layer in reversed(carried.unbind()):
        layer *= strength[:, None]
        strength = torch.maximum(strength, layer.amax(dim=0))
    return carried
