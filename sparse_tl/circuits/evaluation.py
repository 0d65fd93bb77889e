"""Evaluate circuits: the metric under circuits, and their explained effect by size.

The explained effect of a circuit C, also called its faithfulness, is

    (m(C) - m(none)) / (m(clean) - m(none)),

where each m is a mean over pairs, and *none* patches everything: with corrupted patches, it is the
corrupted run. Under a circuit of edges, all other circuit edges are patched. Under a circuit of
heads, the outputs of all other heads are patched (at ``hook_z``), and MLPs are recomputed.

The ends of intervals are percentiles over bootstrap draws, of as many pairs as there are with
replacement. The effect of a draw is a ratio of two weighted means, so no model is run again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, Share, checked
from sparse_tl.backend import HookedModel, adapt, in_evaluation_mode
from sparse_tl.circuits.circuit import Circuit, Grid, Scores, check_grid
from sparse_tl.circuits.curves import EffectCurve
from sparse_tl.circuits.pair_runs import PairRuns, value_of
from sparse_tl.data import Positions, PromptPairs
from sparse_tl.gates import CircuitEdges, Heads, Patch
from sparse_tl.graph import CircuitGraph, HeadGrid, PositionedGraph
from sparse_tl.metrics import Metric, explained_effect
from sparse_tl.progress import tracked
from sparse_tl.results import OfPrompts

ENDS = (1 - 0.95) / 2, (1 + 0.95) / 2
"""The ends of a 95 % interval, as shares of the draws below them."""
MANY_EDGES, MANY_HEADS = 2**15, 2**8
"""Models with more run fewer sizes by default: each takes about as long as the prompts."""


@dataclass(frozen=True, eq=False)
class Evaluation(OfPrompts):
    """The metric of every pair under every circuit.

    Args:
        sizes: number of parts that each circuit keeps.
        total: number of parts in the model.
        values: metric under each circuit.
        clean: metric of the whole model.
        none: metric with everything patched.
    """

    sizes: tuple[int, ...]
    total: int
    values: Float[Tensor, "circuit pair"]
    clean: Float[Tensor, " pair"]
    none: Float[Tensor, " pair"]

    @property
    def effect(self) -> Float[Tensor, " circuit"]:
        """The explained effect (faithfulness) of each circuit.

        Raises:
            NoEffectError: the metric is the same with everything patched.
        """
        return explained_effect(self.values, self.clean, self.none)

    @property
    def deviation(self) -> Float[Tensor, " circuit"]:
        """How far single pairs are from the whole model, in units of the mean effect.

            mean |m(C) - m(clean)| / |mean (m(clean) - m(none))|

        In the explained effect, a ratio of means, errors of pairs cancel: a circuit that explains 1
        has the effect on average, and one with a deviation of 0 in every pair.
        """
        errors = (self.values - self.clean).abs().mean(dim=-1)
        return errors / (self.clean - self.none).mean().abs()

    def interval(self) -> tuple[Float[Tensor, " circuit"], Float[Tensor, " circuit"]]:
        """Lower and upper ends of a 95 % bootstrap interval of the explained effect over pairs."""
        return effect_interval(self.values, self.clean, self.none)

    @checked
    def size_interval(self, effect: Share = 0.9) -> tuple[float | None, float | None]:
        """Lower and upper ends of a 95 % bootstrap interval of `EffectCurve.size_at` over pairs.

        The sizes must be increasing. An end is ``None`` if the draw there misses `effect`, the
        explained effect to reach, above 0 and at most 1.
        """
        drawn = effect_draws(self.values, self.clean, self.none)
        curves = [EffectCurve("", self.sizes, *[draw] * 3) for draw in drawn.tolist()]
        sizes = [curve.size_at(effect) for curve in [*curves, self.curve("")]]
        ranked = sorted(sizes, key=lambda size: math.inf if size is None else size)
        low, high = (end * (len(ranked) - 1) for end in ENDS)
        return ranked[math.floor(low)], ranked[math.ceil(high)]

    def curve(self, name: str) -> EffectCurve:
        """The explained effect with its interval, for plotting; sizes must be increasing."""
        low, high = self.interval()
        return EffectCurve(name, self.sizes, self.effect.tolist(), low.tolist(), high.tolist())

    def to_pandas(self) -> pd.DataFrame:
        """One row per circuit: size, explained effect with interval, deviation, mean metric."""
        low, high = self.interval()
        effects = {"explained_effect": self.effect, "low": low, "high": high}
        means = {"deviation": self.deviation, "metric": self.values.mean(dim=1)}
        return pd.DataFrame({"size": self.sizes, **effects, **means})

    def __repr__(self) -> str:
        effects = zip(self.sizes, self.effect.tolist(), strict=True)
        by_size = ", ".join(f"{size}: {effect:.2f}" for size, effect in effects)
        return f"Evaluation(explained effect of {len(self.clean)} pairs by size: {by_size})"


def effect_interval(
    circuit: Float[Tensor, "*circuit pair"], clean: Float[Tensor, " pair"], none: Tensor
) -> tuple[Float[Tensor, "*circuit"], Float[Tensor, "*circuit"]]:
    """The ends of `Evaluation.interval`; of a mean over pairs, where clean is 1 and none 0."""
    effect, drawn = explained_effect(circuit, clean, none), effect_draws(circuit, clean, none)
    low, high = drawn.quantile(torch.tensor(ENDS, dtype=clean.dtype), dim=0)
    # With few pairs, a percentile interval may exclude the effect: widen it to include it.
    return torch.minimum(low, effect), torch.maximum(high, effect)


def effect_draws(
    circuit: Float[Tensor, "*circuit pair"],
    clean: Float[Tensor, " pair"],
    none: Float[Tensor, " pair"],
) -> Float[Tensor, " draw *circuit"]:
    """The explained effect on pairs drawn with replacement, for each of 1,000 draws.

    Draws in which the patch has no effect, or the opposite effect, have no meaningful ratio and are
    left out.
    """
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(len(clean), (1000, len(clean)), generator=generator)
    weights = torch.zeros(pairs.shape, dtype=clean.dtype)
    weights.scatter_add_(1, pairs, torch.ones_like(weights))
    total = weights @ (clean - none)
    usable = total.sign() == (clean - none).mean().sign()
    explained = torch.tensordot(weights[usable], circuit - none, dims=([1], [-1]))
    return explained / total[usable].view(-1, *[1] * (explained.ndim - 1))


@checked
@in_evaluation_mode
def evaluate(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric | Literal["kl"],
    circuits: Circuit | Sequence[Circuit],
    *,
    patch: Patch = "corrupted",
    batch_size: AtLeastOne = 32,
    progress: bool = True,
) -> Evaluation:
    """The metric under each circuit, with everything else patched; one forward pass per circuit.

    Other arguments are those of `attribute_circuit_edges`.

    Args:
        metric: metric function; or "kl", the divergence from the whole model's predictions,
            ``KL(model || circuit)``, in nats.
        circuits: one circuit or several, of edges, of edges by position, or of heads. Their spans
            must be those of `pairs`.

    Raises:
        ValueError: no circuit is given, a circuit belongs to another model, or the pairs lack its
            positions.
    """
    graph = adapt(model).graph
    listed = [circuits] if isinstance(circuits, Circuit) else list(circuits)
    if not listed or len({circuit.grid for circuit in listed}) > 1:
        raise ValueError(
            "give one circuit or more, all of edges (at the same positions) or all of heads"
        )
    grid = listed[0].grid
    check_grid(graph, grid, CircuitGraph, PositionedGraph, HeadGrid)
    positions = positions_of(grid, pairs)
    site = Heads() if grid == graph.heads else CircuitEdges()
    runs = PairRuns(model, site, pairs, patch, batch_size, positions=positions)
    return evaluated(runs, metric, listed, progress)


@torch.no_grad()
def evaluated(
    runs: PairRuns,
    metric: Metric | Literal["kl"],
    circuits: Sequence[Circuit],
    progress: bool = False,
) -> Evaluation:
    """`evaluate`, on prompts whose patches are recorded already."""
    by_batch = list[Tensor]()
    with tracked("evaluating", len(circuits) * len(runs), progress) as step:
        for batch, run in runs:
            ends = run.clean_logits, runs.everything_patched(run)
            values = [value_of(metric, logits, batch, run) for logits in ends]
            for circuit in circuits:
                values.append(value_of(metric, run.logits(circuit.mask), batch, run))
                step()
            by_batch.append(torch.stack(values).cpu().double())
    clean, none, *values = torch.cat(by_batch, dim=1)
    sizes, total = tuple(map(len, circuits)), circuits[0].grid.n_parts
    values, start = torch.stack(values), runs.batches[0].start
    return Evaluation(sizes, total, values, clean, none, prompt_start=start)


def positions_of(grid: Grid, pairs: PromptPairs) -> Positions | None:
    """The kind of a grid's positions, if it has any; checks that the pairs have them."""
    if not isinstance(grid, PositionedGraph):
        return None
    positions: Positions = "tokens" if grid.of_tokens else "spans"
    names = pairs.spans_of(positions).names
    if names != grid.positions:
        raise ValueError(
            f"the positions of the circuit are {grid.positions}, and those of the pairs {names}"
        )
    return positions


@checked
def evaluate_circuit_edges(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric | Literal["kl"],
    scores: Scores,
    sizes: Sequence[int] | None = None,
    *,
    signed: bool = False,
    patch: Patch = "corrupted",
    **options: Any,
) -> Evaluation:
    """The explained effect (faithfulness) of circuits of the best-scored edges, by size.

    Edges without effect (`Circuit.connected`) are dropped; sizes that differ by such edges alone
    are evaluated once.

    Args:
        pairs: prompt pairs, ideally not the ones that were scored.
        scores: scores that rank the edges.
        sizes: numbers of top-ranked edges to evaluate; by default two for each doubling, or one in
            graphs of more than 32,768 edges (`log_sizes`).
        signed: rank by how much an edge helps instead of by absolute score.
        patch: patch of the other edges, as in `evaluate`.
        **options: further arguments of `evaluate`.
    """
    if sizes is None:
        n = scores.grid.n_parts
        sizes = log_sizes(n, per_doubling=1 if n > MANY_EDGES else 2)
    connected = (scores.top(size, signed=signed).connected(patch=patch) for size in sorted(sizes))
    circuits = {len(circuit): circuit for circuit in connected}
    return evaluate(model, pairs, metric, list(circuits.values()), patch=patch, **options)


@checked
def evaluate_heads(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric | Literal["kl"],
    scores: Scores,
    sizes: Sequence[int] | None = None,
    **options: Any,
) -> Evaluation:
    """The explained effect (faithfulness) of circuits of the best-scored heads, by size.

    The arguments are those of `evaluate_circuit_edges`, without `signed`. By default, `sizes` are
    all up to 32 heads (8 in models of more than 256 heads), and two for each doubling beyond.

    Raises:
        ValueError: the scores are not of heads, or as in `evaluate`.
    """
    check_grid(adapt(model).graph, scores.grid, HeadGrid)
    if sizes is None:
        n = scores.grid.n_parts
        sizes = log_sizes(n, all_up_to=8 if n > MANY_HEADS else 32)
    return evaluate(model, pairs, metric, [scores.top(size) for size in sizes], **options)


def log_sizes(total: int, *, per_doubling: int = 2, all_up_to: int = 0) -> tuple[int, ...]:
    """0, `total`, `per_doubling` sizes for each doubling, and every size up to `all_up_to`."""
    steps = math.ceil(math.log2(total) * per_doubling) if total > 1 else 0
    between = {round(2 ** (step / per_doubling)) for step in range(steps)}
    between.update(range(all_up_to + 1))
    return tuple(sorted({0, total} | {size for size in between if size < total}))
