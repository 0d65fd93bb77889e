"""Evaluate circuits: the metric under a mask, and the explained effect at growing circuit sizes.

The explained effect of a circuit C is ``(m(C) - m(none)) / (m(clean) - m(none))``, where each m is
a mean over pairs and *none* is the model with everything patched: the corrupted run, under
corrupted patches. Circuits of edges patch every other circuit edge; circuits of heads patch the
outputs of all other heads (at ``hook_z``), while MLPs are recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_tl import ranks
from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.effect import Evaluation
from sparse_tl.circuits.pair_runs import PairRuns, clean_logits
from sparse_tl.circuits.scores import Scores
from sparse_tl.data import Positions, PromptPairs
from sparse_tl.gates import CircuitEdges, Heads, Patch
from sparse_tl.grids import HeadGrid
from sparse_tl.lens import HookedModel, adapt, in_evaluation_mode
from sparse_tl.metrics import Metric, check_wrong, chooses_right, is_right, measure
from sparse_tl.positioned_graph import PositionedGraph
from sparse_tl.progress import tracked
from sparse_tl.scopes import autograd


@checked
@in_evaluation_mode
def evaluate(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    circuits: Circuit | Sequence[Circuit],
    *,
    patch: Patch = "corrupted",
    batch_size: AtLeastOne = 32,
    progress: bool = True,
) -> Evaluation:
    """The metric under circuits, with everything else patched; one forward pass per circuit.

    Several ranks divide the pairs among them, and all return the whole result.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs.
        metric: metric function with one value per pair.
        circuits: one circuit or several, of edges, of edges by position, or of heads. Named spans
            are those of `pairs`.
        patch: patch at everything outside a circuit, as in `PairRuns`.
        batch_size: prompt pairs per forward pass.
        progress: whether to show a progress bar.

    Raises:
        ValueError: no circuit is given, a circuit belongs to another model's graph, the pairs lack
            its positions, the patch is unknown, or the metric is not one finite number per pair.
    """
    graph = adapt(model).graph
    asked = [circuits] if isinstance(circuits, Circuit) else list(circuits)
    if not asked or len({circuit.site for circuit in asked}) > 1:
        raise ValueError(
            "expected one circuit or more, all of edges (at the same positions) or all of heads"
        )
    own = asked[0].site
    positions = positions_of(own, pairs) if isinstance(own, PositionedGraph) else None
    if (own.graph if isinstance(own, PositionedGraph) else own) not in (graph, graph.heads):
        raise ValueError(
            f"expected circuits of the model's own {graph!r}, or of its heads; got one of {own!r}"
        )
    site = Heads() if own == graph.heads else CircuitEdges()
    runs = PairRuns(model, site, pairs, patch, batch_size, positions=positions, shared=True)
    found: list[tuple[Tensor, ...]] = []
    with autograd(False), tracked("evaluating", len(asked) * len(runs), progress) as step:
        for batch, run in runs:
            clean = measure(metric, run.clean_logits, batch)
            values = [clean, measure(metric, runs.everything_patched(run), batch)]
            for circuit in asked:
                values.append(measure(metric, run.logits(circuit.mask), batch))
                step()
            found.append(tuple(value.cpu().double() for value in values))
    clean, none, *values = map(torch.cat, zip(*ranks.in_order(found), strict=True))
    sizes = tuple(map(len, asked))
    return Evaluation(sizes, own.n_parts, torch.stack(values), clean, none, pairs.start)


def positions_of(site: PositionedGraph, pairs: PromptPairs) -> Positions:
    """What the positions of a circuit are; checked to be those of the pairs."""
    positions = "tokens" if site.of_tokens else "spans"
    if pairs.spans_of(positions).names != site.positions:
        raise ValueError(
            f"expected pairs with the positions of the circuit, {site.positions}; these have "
            f"{pairs.spans_of(positions).names}"
        )
    return positions


@checked
def evaluate_circuit_edges(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    scores: Scores,
    sizes: Sequence[int] | None = None,
    *,
    signed: bool = False,
    **options: Any,
) -> Evaluation:
    """The explained effect of the best-scored edges at growing circuit sizes.

    Edges without effect (`Circuit.connected`) are dropped, as are sizes that add no other edge.

    Args:
        model: dense or sparse model.
        pairs: prompt pairs, ideally other than those that the scores come from.
        metric: metric function with one value per pair.
        scores: scores that rank the edges.
        sizes: numbers of top-ranked edges to evaluate; `log_sizes` of all edges by default.
        signed: rank by how much an edge helps instead of by absolute value.
        **options: further arguments of `evaluate`.
    """
    sizes = log_sizes(scores.site.n_parts) if sizes is None else sizes
    patch = options.get("patch", "corrupted")
    joined = (scores.top(size, signed=signed).connected(patch=patch) for size in sorted(sizes))
    circuits = {len(circuit): circuit for circuit in joined}
    return evaluate(model, pairs, metric, list(circuits.values()), **options)


@checked
def evaluate_heads(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    scores: Scores,
    sizes: Sequence[int] | None = None,
    **options: Any,
) -> Evaluation:
    """The explained effect of the best-scored heads at growing circuit sizes.

    The arguments are those of `evaluate_circuit_edges`, but for the default of `sizes`: all up to
    32, and of more heads eight to a doubling.

    Raises:
        ValueError: the scores are not of heads, or as in `evaluate`.
    """
    if not isinstance(scores.site, HeadGrid):
        raise ValueError(f"expected scores of heads, as from attribute_heads; got {scores!r}")
    if sizes is None:
        sizes = log_sizes(scores.site.n_parts, per_doubling=8, all_up_to=32)
    return evaluate(model, pairs, metric, [scores.top(size) for size in sizes], **options)


@checked
@in_evaluation_mode
@autograd(False)
def accuracy(
    model: HookedModel, pairs: PromptPairs, *, choice: bool = False, batch_size: AtLeastOne = 32
) -> float:
    """Share of clean prompts, 0 to 1, whose top prediction at the read position is an answer.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs.
        choice: count the prompts in which an answer is likelier than every wrong one instead,
            whatever else the model finds likely. `measure_skill` compares this with chance.
        batch_size: prompts per forward pass.

    Raises:
        ValueError: a pair has no wrong answer to choose against, or the model cannot run the
            prompts.
    """
    if choice:
        check_wrong(pairs)
    is_one = chooses_right if choice else is_right
    logits = clean_logits(model, pairs, batch_size)
    right = [is_one(found, batch).cpu() for batch, found in logits]
    return torch.cat(ranks.in_order(right)).double().mean().item()


def log_sizes(total: int, *, per_doubling: int = 2, all_up_to: int = 0) -> tuple[int, ...]:
    """0 and `total`, with logarithmically spaced sizes between them.

    Args:
        total: the largest size.
        per_doubling: number of sizes to a doubling.
        all_up_to: no size is left out up to this one.
    """
    steps = math.ceil(math.log2(total) * per_doubling) if total > 1 else 0
    between = {round(2 ** (step / per_doubling)) for step in range(steps)}
    between.update(range(all_up_to + 1))
    return tuple(sorted({0, total} | {size for size in between if size < total}))
