"""Evaluate circuits: the metric under circuits, and their explained effect by size.

The explained effect of a circuit C, also called its faithfulness, is

    (m(C) - m(none)) / (m(clean) - m(none)),

where each m is a mean over pairs, and *none* patches everything: with corrupted patches, it is the
corrupted run. Under a circuit of edges, all other circuit edges are patched. Under a circuit of
heads, the outputs of all other heads are patched (at ``hook_z``), and MLPs are recomputed.

How much it depends on the choice of prompts is measured by bootstrap draws: each draws as many
pairs as there are, with replacement. The explained effect of a draw is a ratio of two weighted
means, so no model is run again; the ends of an interval are percentiles over draws.

Results of several training seeds are summarised by medians. The median curve has the median effect
at each size. Sizes and multipliers are computed per seed, then reported as median and range.

What a search measures along the way is different: sampled gates, a single batch, or a circuit with
edges that have no effect. So a search reports the `Faithfulness` of a run of the circuit that it
returns, with everything in it kept and everything else patched (`FaithfulnessRuns`).
"""

from __future__ import annotations

import math
import operator
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, Seed, Share, checked
from sparse_tl.backend import HookedModel, adapt, in_evaluation_mode
from sparse_tl.circuits.circuit import Circuit, Scores, check_grid
from sparse_tl.circuits.pair_runs import PairRuns, value_of
from sparse_tl.data import Positions, PromptPairs
from sparse_tl.gates import CircuitEdges, Heads, Patch
from sparse_tl.graph import CircuitGraph, HeadGrid, PositionedGraph
from sparse_tl.metrics import Metric, NoEffectError, divergence, explained_effect, measure
from sparse_tl.progress import tracked
from sparse_tl.results import Result

ENDS = (1 - 0.95) / 2, (1 + 0.95) / 2
"""The ends of a 95 % interval, as shares of the draws below them."""


@dataclass(frozen=True, eq=False)
class Evaluation(Result):
    """The metric of every pair under every circuit.

    Args:
        sizes: number of parts that each circuit keeps.
        total: number of parts in the model.
        values: metric under each circuit.
        clean: metric of the whole model.
        none: metric with everything patched.
        prompt_start: text that every prompt started with, such as BOS; ``None`` if not known.
    """

    sizes: tuple[int, ...]
    total: int
    values: Float[Tensor, "circuit pair"]
    clean: Float[Tensor, " pair"]
    none: Float[Tensor, " pair"]
    prompt_start: str | None = None

    @property
    def effect(self) -> Float[Tensor, " circuit"]:
        """The explained effect (faithfulness) of each circuit.

        Raises:
            NoEffectError: the metric is the same with everything patched.
        """
        return explained_effect(self.values, self.clean, self.none)

    def interval(self) -> tuple[Float[Tensor, " circuit"], Float[Tensor, " circuit"]]:
        """Lower and upper ends of a 95 % bootstrap interval of the explained effect over pairs.

        Pairs are drawn with replacement; the ends are percentiles of the explained effect.
        """
        ends, effect = torch.tensor(ENDS, dtype=self.clean.dtype), self.effect
        drawn = effect_draws(self.values, self.clean, self.none)
        low, high = drawn.quantile(ends, dim=0) if len(drawn) else (effect, effect)
        # With few pairs, a percentile interval may exclude the effect: widen it to include it.
        return torch.minimum(low, effect), torch.maximum(high, effect)

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
        """One row per circuit: size, explained effect with its interval, and mean metric."""
        low, high = self.interval()
        effects = {"explained_effect": self.effect, "low": low, "high": high}
        return pd.DataFrame({"size": self.sizes, **effects, "metric": self.values.mean(dim=1)})

    def __repr__(self) -> str:
        effects = zip(self.sizes, self.effect.tolist(), strict=True)
        by_size = ", ".join(f"{size}: {effect:.2f}" for size, effect in effects)
        return f"Evaluation(explained effect of {len(self.clean)} pairs by size: {by_size})"


@dataclass(frozen=True)
class EffectCurve(Result):
    """The explained effect of circuits of growing size, for one model on one task.

    Lists and arrays are converted to tuples of plain numbers.

    Args:
        name: name of the model.
        sizes: number of parts that each circuit keeps, increasing.
        mean: explained effect at each size; 1: that of the whole model.
        low: lower end of the interval at each size.
        high: upper end of the interval at each size.
    """

    name: str
    sizes: Sequence[int]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]

    def __post_init__(self) -> None:
        # Unlike arrays and tensors, tuples compare, print and serialise.
        for name, kind in (
            ("sizes", operator.index),
            ("mean", float),
            ("low", float),
            ("high", float),
        ):
            object.__setattr__(self, name, tuple(map(kind, getattr(self, name))))
        lengths = {len(self.sizes), len(self.mean), len(self.low), len(self.high)}
        rising = (np.diff((-1, *self.sizes)) > 0).all()
        if not (self.sizes and len(lengths) == 1 and rising):
            raise ValueError(
                f"the curve {self.name!r} needs sizes from 0 that increase, and one effect with "
                f"its interval at each; the sizes are {list(self.sizes)}"
            )
        low, mean, high = map(np.array, (self.low, self.mean, self.high))
        if not (np.isfinite([low, mean, high]).all() and (low <= high).all()):
            raise ValueError(
                f"the effects of the curve {self.name!r} must be finite, and low the lower end of "
                "an interval, not its half-width"
            )

    @checked
    def size_at(self, level: Share = 0.9) -> float | None:
        """The size from which the mean is at or above a level, interpolated in the logarithm.

        With n_i the largest size whose effect e_i is below the level, and n_j the next size,
        ``log n = log n_i + (level - e_i) / (e_j - e_i) * (log n_j - log n_i)``; a size of 0 counts
        as 1. If all effects reach the level, this is the smallest measured size.

        Args:
            level: explained effect, above 0 and at most 1.

        Returns:
            Number of parts, at least 1 and usually fractional; ``None`` if the effect of the
            largest size is below the level.
        """
        below = [index for index, effect in enumerate(self.mean) if effect < level]
        if not below:
            return float(max(self.sizes[0], 1))
        before = below[-1]
        if before + 1 == len(self.sizes):
            return None
        start, end = (math.log(max(size, 1)) for size in self.sizes[before : before + 2])
        rise = self.mean[before + 1] - self.mean[before]
        return math.exp(start + (level - self.mean[before]) / rise * (end - start))

    def effect_at(self, size: float) -> float:
        """The mean at a size, interpolated between measured sizes as in `size_at`.

        Raises:
            ValueError: the size is outside the measured range.
        """
        after = bisect_left(self.sizes, size)
        if after < len(self.sizes) and self.sizes[after] == size:
            return self.mean[after]
        if not self.sizes[0] <= size <= self.sizes[-1]:
            raise ValueError(
                f"the curve {self.name!r} was measured for sizes from {self.sizes[0]:,} to "
                f"{self.sizes[-1]:,}, not for {size:,}"
            )
        start, middle, end = (
            math.log(max(n, 1)) for n in (self.sizes[after - 1], size, self.sizes[after])
        )
        share = (middle - start) / (end - start) if end > start else 1.0
        return self.mean[after - 1] + share * (self.mean[after] - self.mean[after - 1])

    def to_pandas(self) -> pd.DataFrame:
        """One row per size: name, size, mean, low, high."""
        columns = {"size": self.sizes, "mean": self.mean, "low": self.low, "high": self.high}
        return pd.DataFrame({"name": [self.name] * len(self.sizes), **columns})


@checked
def multiplier(dense: EffectCurve, sparse: EffectCurve, level: Share = 0.9) -> float | None:
    """How many times as many parts the dense model needs: ``dense.size_at / sparse.size_at``.

    Both curves are of one task. Above 1 if the sparse model needs fewer parts; ``None`` if a curve
    does not reach the level, an explained effect above 0 and at most 1.
    """
    of_dense, of_sparse = dense.size_at(level), sparse.size_at(level)
    return None if of_dense is None or of_sparse is None else of_dense / of_sparse


@checked
@dataclass(frozen=True)
class SeedCurves(Result):
    """The explained effect of one model on one task, for several training seeds.

    Args:
        seeds: training seeds, all different.
        curves: one curve per seed, all with the same name.
    """

    seeds: Sequence[Seed]
    curves: Sequence[EffectCurve]

    def __post_init__(self) -> None:
        object.__setattr__(self, "seeds", tuple(self.seeds))
        object.__setattr__(self, "curves", tuple(self.curves))
        names = [curve.name for curve in self.curves]
        if not 1 <= len(set(self.seeds)) == len(self.seeds) == len(names) or len(set(names)) > 1:
            raise ValueError(
                "give one curve for each seed, all seeds different, of a model of one name; the "
                f"seeds are {list(self.seeds)}, and the curves of {names}"
            )

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.curves[0].name

    @cached_property
    def median(self) -> EffectCurve:
        """The median effect over seeds at each size, with the range over seeds as the interval.

        It has all sizes that were measured for some seed within the range measured for every seed,
        interpolated where a seed has no measurement (`EffectCurve.effect_at`). A single seed keeps
        its curve and interval.
        """
        if len(self.curves) == 1:
            return self.curves[0]
        first = max(curve.sizes[0] for curve in self.curves)
        last = min(curve.sizes[-1] for curve in self.curves)
        sizes = sorted({size for curve in self.curves for size in curve.sizes})
        common = [size for size in sizes if first <= size <= last]
        effects = [[curve.effect_at(size) for curve in self.curves] for size in common]
        medians, low, high = (
            [summary(at_size) for at_size in effects] for summary in (statistics.median, min, max)
        )
        return EffectCurve(self.name, common, medians, low, high)

    def sizes_at(self, level: float = 0.9) -> tuple[float | None, ...]:
        """`EffectCurve.size_at` of every seed; ``None`` for a seed that misses the level."""
        return tuple(curve.size_at(level) for curve in self.curves)

    def size_at(self, level: float = 0.9) -> float | None:
        """The median over seeds of the size at a level; seeds that miss it count as the largest."""
        return median_size(self.sizes_at(level))

    def to_pandas(self) -> pd.DataFrame:
        """One row per seed and size: seed, name, size, mean, low, high."""
        tables = [curve.to_pandas() for curve in self.curves]
        for seed, table in zip(self.seeds, tables, strict=True):
            table.insert(0, "seed", seed)
        return pd.concat(tables, ignore_index=True)

    def __repr__(self) -> str:
        return f"SeedCurves({self.name!r}, seeds {list(self.seeds)})"


@checked
def seed_multipliers(dense: SeedCurves, sparse: SeedCurves, level: Share = 0.9) -> pd.Series:
    """The `multiplier` of each seed's dense model and the sparse model made from it.

    Returns:
        Multipliers by seed; NaN if the seed's dense or sparse model misses the level.

    Raises:
        ValueError: the models have different seeds.
    """
    if dense.seeds != sparse.seeds:
        raise ValueError(
            "dense and sparse curves must be of the same seeds in the same order; they are of "
            f"{list(dense.seeds)} and {list(sparse.seeds)}"
        )
    pairs = zip(dense.curves, sparse.curves, strict=True)
    values = [multiplier(*pair, level=level) for pair in pairs]
    return pd.Series(values, list(dense.seeds), dtype=float, name="multiplier")


def multiplier_words(multipliers: pd.Series) -> tuple[str, ...]:
    """Texts for figures, such as "23.6x (18 to 31)" and "1 of 3 seeds: not reached"."""
    texts, found = [], multipliers.dropna()
    if len(found):
        # 9.96 becomes 10, not 10.0.
        low, high = (
            format(end, ",.0f" if end >= 9.95 else ".1f") for end in found.agg(["min", "max"])
        )
        between = f" ({low} to {high})" if len(found) > 1 else ""
        texts.append(f"{found.median():,.1f}x{between}")
    if missing := len(multipliers) - len(found):
        of = f"{missing} of {len(multipliers)} seeds: " if len(multipliers) > 1 else ""
        texts.append(f"{of}not reached")
    return tuple(texts)


def median_size(sizes: Sequence[float | None]) -> float | None:
    """The median of sizes; those not reached (None) count as larger than all others."""
    median = statistics.median(math.inf if size is None else size for size in sizes)
    return median if math.isfinite(median) else None


def effect_draws(
    circuit: Float[Tensor, "*circuit pair"],
    clean: Float[Tensor, " pair"],
    none: Float[Tensor, " pair"],
    resamples: int = 1000,
) -> Float[Tensor, " draw *circuit"]:
    """The explained effect on pairs drawn with replacement, for each draw.

    Draws in which the patch has no effect, or the opposite effect, have no meaningful ratio and are
    left out.
    """
    generator = torch.Generator().manual_seed(0)
    n_pairs = len(clean)
    pairs = torch.randint(n_pairs, (resamples, n_pairs), generator=generator)
    weights = torch.zeros(resamples, n_pairs, dtype=clean.dtype)
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
    metric: Metric,
    circuits: Circuit | Sequence[Circuit],
    *,
    patch: Patch = "corrupted",
    batch_size: AtLeastOne = 32,
    progress: bool = True,
) -> Evaluation:
    """The metric under each circuit, with everything else patched; one forward pass per circuit.

    Other arguments are those of `attribute_circuit_edges`.

    Args:
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
    positions = positions_of(grid, pairs) if isinstance(grid, PositionedGraph) else None
    site = Heads() if grid == graph.heads else CircuitEdges()
    runs = PairRuns(model, site, pairs, patch, batch_size, positions=positions)
    by_batch: list[tuple[Tensor, ...]] = []
    with torch.no_grad(), tracked("evaluating", len(listed) * len(runs), progress) as step:
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
    """The kind of a circuit's positions, tokens or spans; checks that the pairs have them."""
    positions = "tokens" if grid.of_tokens else "spans"
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
    metric: Metric,
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
        sizes: numbers of top-ranked edges to evaluate; `log_sizes` of all edges by default.
        signed: rank by how much an edge helps instead of by absolute score.
        patch: patch of the other edges, as in `evaluate`.
        **options: further arguments of `evaluate`.
    """
    sizes = log_sizes(scores.grid.n_parts) if sizes is None else sizes
    connected = (scores.top(size, signed=signed).connected(patch=patch) for size in sorted(sizes))
    circuits = {len(circuit): circuit for circuit in connected}
    return evaluate(model, pairs, metric, list(circuits.values()), patch=patch, **options)


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


def log_sizes(total: int, *, per_doubling: int = 2, all_up_to: int = 0) -> tuple[int, ...]:
    """0, `total`, `per_doubling` sizes for each doubling, and every size up to `all_up_to`."""
    steps = math.ceil(math.log2(total) * per_doubling) if total > 1 else 0
    between = {round(2 ** (step / per_doubling)) for step in range(steps)}
    between.update(range(all_up_to + 1))
    return tuple(sorted({0, total} | {size for size in between if size < total}))


@dataclass(frozen=True)
class Faithfulness(Result):
    """How much of a model's predictions a circuit preserves, as means over prompt pairs.

    Args:
        divergence: ``KL(model || circuit)`` of the next-token distributions, in nats.
        explained_effect: explained effect on the metric of the search; for "kl",
            ``1 - KL(model || circuit) / KL(model || everything patched)``. NaN if patching
            everything does not change the metric.
        n_pairs: number of prompt pairs.
    """

    finite = False
    divergence: float
    explained_effect: float
    n_pairs: int

    def __str__(self) -> str:
        # A divergence below 1e-6 nats is rounding error. Adding 0 turns -0 into 0.
        nats, effect = round(self.divergence, 6) + 0, round(self.explained_effect, 3) + 0
        return f"{nats:.3g} nats, explained effect {effect:.3f}, on {self.n_pairs:,} pairs"


@dataclass(frozen=True, eq=False)
class SearchResult(Result):
    """The circuit that a search returns, its faithfulness, and the history of the search.

    Args:
        circuit: parts that are kept, without edges that have no effect (that are on no path).
        n_kept: number of parts that the search kept, including edges without effect.
        searched: faithfulness of the circuit on the pairs of the search.
        held_out: faithfulness of the circuit on held-out pairs, if there are any.
        history: one row per step of the search.
    """

    circuit: Circuit
    n_kept: int
    searched: Faithfulness
    held_out: Faithfulness | None
    history: pd.DataFrame

    def to_pandas(self) -> pd.DataFrame:
        """The search history."""
        return self.history

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>" + self.circuit._repr_html_()

    def _description(self) -> str:
        """The circuit and its faithfulness as text."""
        dropped = self.n_kept - len(self.circuit)
        kept = f", {self.n_kept:,} with those without effect" if dropped else ""
        held_out = f"; held out: {self.held_out}" if self.held_out else ""
        return f"{self.circuit!r}{kept}; {self.searched}{held_out}"


class FaithfulnessRuns:
    """Runs of circuits on the pairs of a search, and on held-out pairs if there are any.

    All pairs are first run with everything patched: what cannot be measured raises before a search.
    """

    def __init__(
        self, runs: PairRuns, metric: Metric | Literal["kl"], held_out: PromptPairs | None
    ) -> None:
        self._metric, self._runs = metric, [runs]
        if held_out is not None:
            others = PairRuns(runs.model, runs.site, held_out, runs.patch, runs.batch_size)
            self._runs.append(others)
        self.of(torch.zeros(runs.site.shape(runs.adapter), dtype=torch.bool))

    def of(self, mask: Bool[Tensor, "*axes"]) -> tuple[Faithfulness, Faithfulness | None]:
        """The faithfulness of a circuit on the pairs of the search, and on the held-out ones."""
        searched, *others = (self._on(runs, mask) for runs in self._runs)
        return searched, others[0] if others else None

    @torch.no_grad()
    def _on(self, runs: PairRuns, mask: Bool[Tensor, "*axes"]) -> Faithfulness:
        measured = []
        for batch, run in runs:
            clean, circuit = run.clean_logits, run.logits(mask)
            logits = circuit, clean, runs.everything_patched(run)
            nats = divergence(circuit, clean)
            values = [value_of(self._metric, each, batch, run) for each in logits]
            measured.append(torch.stack([nats, *values]).cpu().double())
        nats, *values = torch.cat(measured, dim=1)
        try:
            effect = explained_effect(*values).item()
        except NoEffectError:
            effect = math.nan
        return Faithfulness(nats.mean().item(), effect, len(nats))
