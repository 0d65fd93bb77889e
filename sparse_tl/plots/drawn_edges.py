"""Which attention edges a circuit diagram draws, and which of them lead to the prediction.

1. Round every weight to thousandths, so that the static figure and the interactive one, which is
   sent these whole numbers, compare the same numbers with the threshold.
2. Merge the heads of a layer: an edge from key to query has the largest weight of any head.
3. Keep the edges at or above the threshold. Those from which the predicted character can be
   reached over kept edges are on the path; the others are merely *open*.
4. An edge on the path carries its weight times the weights along the best route from its end to
   the prediction (1 for each step up the residual stream). The 32 edges that carry most are the
   *main* ones, the remaining edges of a *path* are drawn lighter: in a sparse model every edge on
   the path is a main one, in a dense model they stand out from the web. An edge from a column to
   itself is never a main one, since the residual stream goes the same way at no loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparse_tl.circuits.attention_graph import AttentionGraph, EdgeWeight, ancestors

STEPS = 1000
"""Weights are whole numbers: the steps between a weight of 0 and a weight of 1."""
N_MAIN_EDGES = 32
"""How many lines of a panel are dark at most."""

EdgeKind = Literal["open", "path", "main"]


@dataclass(frozen=True, eq=False)
class RoundedGraph:
    """An attention graph with its weights in thousandths.

    Args:
        name: of its panel.
        graph: as it was traced.
        attention: gate times attention, 0..1000.
        scores: "effect" and "first-order", as far as they are known: of removing an edge, positive
            where the edge helps, -1000..1000 for each target, relative to `scales`.
        scales: the largest absolute effect of each target, in logits.
    """

    name: str
    graph: AttentionGraph
    attention: Int[Tensor, "layer head query key"]
    scores: dict[str, Int[Tensor, "target layer head query key"]]
    scales: dict[str, list[float]]

    def shown(self, weight: EdgeWeight) -> EdgeWeight:
        """What is drawn where a weight is asked for: effects that are not known exactly are
        estimated to first order."""
        return "first-order" if weight == "effect" and "effect" not in self.scores else weight

    def values(self, weight: EdgeWeight, target: int) -> Int[Tensor, "layer head query key"]:
        """The weight of each edge in thousandths, of one target."""
        kind = self.shown(weight)
        return self.attention if kind == "attention" else self.scores[kind][target]

    @property
    def largest(self) -> Int[Tensor, "layer head query key"]:
        """The largest absolute weight that each edge has, of all that can be shown."""
        scores = [values.abs().amax(dim=0) for values in self.scores.values()]
        return torch.stack([self.attention, *scores]).amax(dim=0)

    @property
    def n_views(self) -> int:
        """How many weights an edge has."""
        return 1 + len(self.graph.targets) * len(self.scores)


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
    """What one panel shows.

    Args:
        edges: the lines, in the order of layer, query and key.
        reached: the nodes from which the predicted character can be reached.
        n_attention_edges: edges at or above the threshold, each head counted for itself.
    """

    edges: tuple[DrawnEdge, ...]
    reached: Bool[Tensor, "level column"]
    n_attention_edges: int

    @property
    def n_on_path(self) -> int:
        return sum(edge.kind != "open" for edge in self.edges)


def threshold_steps(threshold: float) -> int:
    """A threshold in thousandths; at 0 every edge that is not 0 passes."""
    return max(1, round(threshold * STEPS))


def round_graph(graph: AttentionGraph, name: str) -> RoundedGraph:
    """The graph's weights in thousandths, checked.

    Args:
        graph: the graph to round.
        name: how error messages call it.

    Raises:
        ValueError: if a weight is not finite, an attention weight is outside 0..1, or an edge
            that cannot exist (from a later position, or through a closed gate) has a weight.
    """
    attention = graph.attention.detach().double().cpu()
    _check_finite(attention, f"attention of panel {name!r}")
    low, high = (float(bound) for bound in attention.aminmax())
    # Half-precision attention can exceed 1 by its rounding error.
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
    """The edges to draw, and those among them that lead to the prediction.

    Args:
        values: signed weights in thousandths.
        limit: draw edges whose absolute weight is at least this, in thousandths.
        read_at: the column at which the prediction is read, at the last level.
    """
    strongest_head = values.abs().argmax(dim=1, keepdim=True)
    merged = values.gather(1, strongest_head).squeeze(1)
    kept = merged.abs() >= limit
    reached = ancestors(kept, read_at)
    on_path = kept & reached[1:, :, None]
    moving = (on_path & ~torch.eye(values.shape[-1], dtype=torch.bool)).flatten().nonzero()[:, 0]
    carried = _carried(merged * kept, read_at).flatten()[moving]
    # Of edges that carry the same, the first in the order of layer, query and key.
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
    # In double precision, as the script does it: both come out alike to the last bit.
    carried = values.abs().double() / STEPS
    strength = torch.zeros(values.shape[-1], dtype=torch.float64)
    strength[read_at] = 1.0
    for layer in reversed(carried.unbind()):
        layer *= strength[:, None]
        strength = torch.maximum(strength, layer.amax(dim=0))
    return carried
