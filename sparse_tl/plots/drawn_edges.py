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

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sparse_tl.circuits.attention_graph import AttentionGraph, EdgeWeight, ancestors
from sparse_tl.plots.edge_styles import STEPS, EdgeKind

Place = tuple[int, int, int]
"""Layer, query and key of an edge."""

N_MAIN_EDGES = 32
"""How many lines of a panel are dark at most."""


@dataclass(frozen=True, eq=False)
class RoundedScores:
    """Effects of removing edges in thousandths, positive where the edge helps.

    Args:
        values: -1000..1000 for each target, relative to ``scales``.
        scales: the largest absolute effect of each target, in logits.
    """

    values: Int[Tensor, "target layer head query key"]
    scales: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class RoundedGraph:
    """The weights of an attention graph in thousandths.

    Args:
        attention: gate times attention, 0..1000.
        scores: "effect" and "first-order", as far as they are known.
    """

    attention: Int[Tensor, "layer head query key"]
    scores: dict[str, RoundedScores]

    def shown(self, weight: EdgeWeight) -> EdgeWeight:
        """What is drawn where a weight is asked for: effects that are not known exactly are
        estimated to first order."""
        return "first-order" if weight == "effect" and "effect" not in self.scores else weight

    def values(self, weight: EdgeWeight, target: int) -> Int[Tensor, "layer head query key"]:
        """The weight of each edge in thousandths, of one target."""
        kind = self.shown(weight)
        return self.attention if kind == "attention" else self.scores[kind].values[target]


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
        n_possible_edges: all the edges that there could be, ``L * H * T (T + 1) / 2``, or
            ``L * H * T^2`` where attention is bidirectional.
    """

    edges: tuple[DrawnEdge, ...]
    reached: Bool[Tensor, "level column"]
    n_attention_edges: int
    n_possible_edges: int

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
    rounded_attention = (attention.clamp(max=1) * STEPS).round().to(torch.int32)
    given = {"effect": graph.effect, "first-order": graph.attribution}
    return RoundedGraph(
        rounded_attention,
        {
            kind: _rounded_scores(scores, (len(graph.targets), *attention.shape), kind, name)
            for kind, scores in given.items()
            if scores is not None
        },
    )


def _rounded_scores(
    scores: Tensor, expected: tuple[int, ...], kind: str, name: str
) -> RoundedScores:
    scores = scores.detach().double().cpu()
    _check_finite(scores, f"{kind} scores of panel {name!r}")
    if tuple(scores.shape) != expected:
        raise ValueError(
            f"expected {kind} scores of shape {expected} in panel {name!r}, one per target "
            f"and attention edge; got {tuple(scores.shape)}"
        )
    scales = scores.abs().flatten(start_dim=1).amax(dim=1)
    helps = -scores / scales.clamp(min=1e-30)[:, None, None, None, None]
    return RoundedScores((helps * STEPS).round().to(torch.int32), tuple(scales.tolist()))


def _check_finite(values: Tensor, what: str) -> None:
    n_bad = int((~values.isfinite()).sum())
    if n_bad:
        raise ValueError(
            f"expected finite {what}; got {n_bad} NaN or infinite values of {values.numel()}; "
            "look for a position that attends nowhere, or a division by 0"
        )


def select_edges(
    values: Int[Tensor, "layer head query key"], limit: int, read_at: int, n_pairs: int
) -> EdgeSelection:
    """The edges to draw, and those among them that lead to the prediction.

    Args:
        values: signed weights in thousandths.
        limit: draw edges whose absolute weight is at least this, in thousandths.
        read_at: the column at which the prediction is read, at the last level.
        n_pairs: pairs of columns that a head can join.
    """
    n_layers, n_heads, n_columns, _ = values.shape
    strongest_head = values.abs().argmax(dim=1, keepdim=True)
    merged = values.gather(1, strongest_head).squeeze(1)
    kept = merged.abs() >= limit
    reached = ancestors(kept, read_at)
    lines: dict[Place, int] = {
        (layer, query, key): int(merged[layer, query, key])
        for layer, query, key in kept.nonzero().tolist()
    }
    carried = _carried(lines, n_layers, n_columns, read_at)
    path = {place for place in lines if reached[place[0] + 1, place[1]]}
    moving = [(layer, query, key) for layer, query, key in path if query != key]
    main = set(sorted(moving, key=lambda place: (-carried[place], place))[:N_MAIN_EDGES])
    edges = tuple(
        DrawnEdge(*place, value, "main" if place in main else "path" if place in path else "open")
        for place, value in lines.items()
    )
    return EdgeSelection(
        edges,
        reached,
        n_attention_edges=int((values.abs() >= limit).sum()),
        n_possible_edges=n_layers * n_heads * n_pairs,
    )


def _carried(
    lines: dict[Place, int], n_layers: int, n_columns: int, read_at: int
) -> dict[Place, float]:
    """For each edge, the largest product of weights over the routes through it."""
    # Python floats rather than tensors: the script does the same arithmetic to the last bit.
    strength = [float(column == read_at) for column in range(n_columns)]
    by_layer: list[dict[Place, int]] = [{} for _ in range(n_layers)]
    for place, value in lines.items():
        by_layer[place[0]][place] = value
    carried: dict[Place, float] = {}
    for edges in reversed(by_layer):
        below = list(strength)
        for (layer, query, key), value in edges.items():
            carried[layer, query, key] = abs(value) / STEPS * strength[query]
            below[key] = max(below[key], carried[layer, query, key])
        strength = below
    return carried
