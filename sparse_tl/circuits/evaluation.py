"""Evaluate circuits: the metric under circuits, and their explained effect by size.

The explained effect of a circuit C, also called its faithfulness, is

    (m(C) - m(none)) / (m(clean) - m(none)),

where each m is a mean over pairs, and *none* patches everything: with corrupted patches, it is the
corrupted run. Under a circuit of edges, all other circuit edges are patched. Under a circuit of
heads, the outputs of all other heads are patched (at ``hook_z``), and MLPs are recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_tl.calls.arguments import AtLeastOne, checked
from sparse_tl.calls.scopes import autograd
from sparse_tl.circuits.circuit import Circuit, check_grid
from sparse_tl.circuits.effect import Evaluation
from sparse_tl.circuits.pair_runs import PairRuns, clean_logits
from sparse_tl.circuits.scores import Scores
from sparse_tl.data import Positions, PromptPairs
from sparse_tl.gates import CircuitEdges, Heads, Patch
from sparse_tl.lens import HookedModel, adapt, in_evaluation_mode
from sparse_tl.metrics import Metric, check_wrong, chooses_right, is_right, measure
from sparse_tl.parts.graph import CircuitGraph
from sparse_tl.parts.grids import HeadGrid
from sparse_tl.parts.positioned_graph import PositionedGraph
from sparse_tl.progress import tracked


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
    """The metric under each circuit, with everything else patched; one forward pass per circuit.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs.
        metric: metric function with one value per pair.
        circuits: one circuit or several, of edges, of edges by position, or of heads. Their spans
            must be those of `pairs`.
        patch: patch of everything outside a circuit, as in `PatchedPairs`.
        batch_size: prompt pairs per forward pass.
        progress: whether to show a progress bar.

    Raises:
        ValueError: no circuit is given, a circuit belongs to another model, the pairs lack its
            positions, the patch is unknown, or the metric is not one finite number per pair.
    """
    graph = adapt(model).graph
    listed = [circuits] if isinstance(circuits, Circuit) else list(circuits)
    if not listed or len({circuit.grid for circuit in listed}) > 1:
        raise ValueError(
            "expected one circuit or more, all of edges (at the same positions) or all of heads"
        )
    grid = listed[0].grid
    check_grid(graph, grid, CircuitGraph, PositionedGraph, HeadGrid)
    positions = positions_of(grid, pairs) if isinstance(grid, PositionedGraph) else None
    site = Heads() if grid == graph.heads else CircuitEdges()
    runs = PairRuns(model, site, pairs, patch, batch_size, positions=positions)
    by_batch: list[tuple[Tensor, ...]] = []
    with autograd(False), tracked("evaluating", len(listed) * len(runs), progress) as step:
        for batch, run in runs:
            clean = measure(metric, run.clean_logits, batch)
            values = [clean, measure(metric, runs.everything_patched(run), batch)]
            for circuit in listed:
                values.append(measure(metric, run.logits(circuit.mask), batch))
                step()
            by_batch.append(tuple(value.cpu().double() for value in values))
    clean, none, *values = map(torch.cat, zip(*by_batch, strict=True))
    sizes = tuple(map(len, listed))
    return Evaluation(sizes, grid.n_parts, torch.stack(values), clean, none, pairs.start)


def positions_of(grid: PositionedGraph, pairs: PromptPairs) -> Positions:
    """The kind of a circuit's positions, "tokens" or "spans", checked against those of the pairs.

    Raises:
        ValueError: the pairs have other positions.
    """
    positions = "tokens" if grid.of_tokens else "spans"
    names = pairs.spans_of(positions).names
    if names != grid.positions:
        raise ValueError(
            f"expected pairs with the positions of the circuit, {grid.positions}; these have "
            f"{names}"
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
    """The explained effect (faithfulness) of circuits of the best-scored edges, by size.

    Edges without effect (`Circuit.connected`) are dropped; sizes that differ by such edges alone
    are evaluated once.

    Args:
        model: dense or sparse model.
        pairs: prompt pairs, ideally not the ones that were scored.
        metric: metric function with one value per pair.
        scores: scores that rank the edges.
        sizes: numbers of top-ranked edges to evaluate; `log_sizes` of all edges by default.
        signed: rank by how much an edge helps instead of by absolute score.
        **options: further arguments of `evaluate`.
    """
    sizes = log_sizes(scores.grid.n_parts) if sizes is None else sizes
    patch = options.get("patch", "corrupted")
    connected = (scores.top(size, signed=signed).connected(patch=patch) for size in sorted(sizes))
    circuits = {len(circuit): circuit for circuit in connected}
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
    """The explained effect (faithfulness) of circuits of the best-scored heads, by size.

    The arguments are those of `evaluate_circuit_edges`, without `signed`. By default, `sizes` are
    all sizes up to 32 heads, and eight per doubling beyond.

    Raises:
        ValueError: the scores are not of heads, or as in `evaluate`.
    """
    check_grid(adapt(model).graph, scores.grid, HeadGrid)
    if sizes is None:
        sizes = log_sizes(scores.grid.n_parts, per_doubling=8, all_up_to=32)
    return evaluate(model, pairs, metric, [scores.top(size) for size in sizes], **options)


@checked
@in_evaluation_mode
@autograd(False)
def accuracy(
    model: HookedModel, pairs: PromptPairs, *, choice: bool = False, batch_size: AtLeastOne = 32
) -> float:
    """The share of clean prompts, 0 to 1, whose most likely next token is an answer.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs.
        choice: instead, count prompts in which an answer is more likely than every wrong answer,
            however likely other tokens are. `measure_skill` compares this share with chance.
        batch_size: prompts per forward pass.

    Raises:
        ValueError: `choice` is true and a pair has no wrong answer, or the model cannot run the
            prompts.
    """
    if choice:
        check_wrong(pairs)
    judge = chooses_right if choice else is_right
    runs = clean_logits(model, pairs, batch_size)
    right = [judge(logits, batch).cpu() for batch, logits in runs]
    return torch.cat(right).double().mean().item()


def log_sizes(total: int, *, per_doubling: int = 2, all_up_to: int = 0) -> tuple[int, ...]:
    """0, `total`, and logarithmically spaced sizes between them.

    Args:
        total: the largest size.
        per_doubling: number of sizes per doubling.
        all_up_to: size up to which every size is included.
    """
    steps = math.ceil(math.log2(total) * per_doubling) if total > 1 else 0
    between = {round(2 ** (step / per_doubling)) for step in range(steps)}
    between.update(range(all_up_to + 1))
    return tuple(sorted({0, total} | {size for size in between if size < total}))
