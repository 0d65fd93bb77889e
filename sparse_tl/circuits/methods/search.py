"""Find small circuits, of a task and of each prompt.

`find_circuit` ranks all parts on one half of the pairs: circuit edges by the mean over pairs of the
absolute EAP-IG score, heads by EAP-IG and by their exact effects, and both by backward elimination.
It cuts every ranking at falling sizes and returns the smallest circuit that, like all larger ones
of its ranking, reaches the level on the other half. `circuit_sizes_per_prompt` does this for the
ranking of each single pair, on that pair.

*Backward elimination* (`Elimination`) starts from the best parts by score, goes through groups of
parts, from coarse to fine and late ones first, and runs every circuit that it considers. Of a
group, or its weaker half, it drops whichever gains more, if that gains anything and loses at most
`STEP` of the explained effect:

    gain = price * (number of parts dropped) - (increase of the mean deviation)

The mean deviation, ``mean |m(C) - m(clean)| / |mean (m(clean) - m(none))|`` with means over pairs,
also counts what would cancel between pairs in the explained effect. Of N parts, the start keeps the
n with the largest ``left * log(N / n) - (loss of explained effect)``, where ``left`` is what may
still be lost: down to the level minus `MARGIN`, since other pairs may need more parts. The price
rises from pass to pass, each of which loses at most half of ``left``. ``docs/circuits.md`` says
why.

Under a time limit, a pass leaves out finer groups that would take more than a fraction `FINE` of
the time left, unless no coarser group can be dropped at any price; a third of the time that the
rankings leave, or what `EVALUATED` circuits take, is kept for evaluation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from itertools import accumulate
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, Positive, Seed, Share, checked
from sparse_tl.backend import HookedModel, adapt, in_evaluation_mode
from sparse_tl.circuits.circuit import Circuit, Grid, Scores
from sparse_tl.circuits.curves import EffectCurve
from sparse_tl.circuits.evaluation import Evaluation, evaluate, evaluated, log_sizes
from sparse_tl.circuits.methods.attribution import Method, attribute_circuit_edges, attribute_heads
from sparse_tl.circuits.methods.faithfulness import runs_of_search
from sparse_tl.circuits.methods.patching import patch_exactly
from sparse_tl.circuits.pair_runs import PairRuns, settings_at_once
from sparse_tl.data import PromptPairs
from sparse_tl.gates import CircuitEdges, Heads, Patch
from sparse_tl.graph import CircuitGraph
from sparse_tl.metrics import Metric, NoEffectError, explained_effect, measure
from sparse_tl.progress import tracked
from sparse_tl.results import Result

SHRINKS = 0.93
"""Maximum ratio of the size of one evaluated circuit of a search to that of the next larger one."""
CLOSE = 0.01
"""Where a ranking reaches the level, it is cut at sizes that differ by at most this fraction."""
RATIOS = 4
"""Number of equal ratios into which the gap between two sizes is divided."""
EVALUATED = 32
"""Maximum number of circuits that an elimination under a time limit leaves time to evaluate."""
MARGIN = 0.05
"""How far below the level the search goes on, in explained effect."""
STEP = 0.02
"""Largest loss of explained effect in one step; doubled whenever no group loses less."""
RATIO = 1.3
"""Ratio between adjacent sizes of the grid that the start is chosen from."""
FINE = 1 / 4
"""Maximum fraction of the time left that finer groups may take: the price has yet to rise."""
SHARES = (0, 1 / 2)
"""Fractions of a group that are kept."""


@dataclass(frozen=True, eq=False)
class FoundCircuit(Result):
    """The smallest circuit found that reaches an explained effect on held-out pairs.

    `figure` draws the circuit, which need not consist of the largest scores.

    Args:
        circuit: the circuit.
        method: the method that found it.
        at: explained effect that was asked for.
        searched: evaluation of the circuit on the pairs of the search.
        held_out: its evaluation on the held-out pairs.
        evaluations: every circuit that was run on the held-out pairs, of growing size, by method;
            down to the first below the level.
        seconds: time that each method took to rank the parts.
        scores: scores that the search started from: attribution, or exact effects for heads.
    """

    circuit: Circuit
    method: str
    at: float
    searched: Evaluation
    held_out: Evaluation
    evaluations: dict[str, Evaluation]
    seconds: dict[str, float]
    scores: Scores

    def to_pandas(self) -> pd.DataFrame:
        """One row per method, the smallest circuit first.

        Columns give the size of the method's smallest circuit that reaches `at`, its explained
        effect on held-out pairs with an interval, and the seconds that the method took.
        """
        rows = []
        for method, evaluation in self.evaluations.items():
            first = reached(evaluation, self.at)
            row = evaluation.to_pandas().drop(columns="metric").iloc[first : first + 1]
            rows.append(row.assign(method=method, seconds=self.seconds[method]))
        table = pd.concat(rows).sort_values("size", kind="stable", ignore_index=True)
        return table[["method", "size", "explained_effect", "low", "high", "seconds"]]

    def _repr_html_(self) -> str:
        drawn = self.figure() if isinstance(self.circuit.grid, CircuitGraph) else self.circuit
        return f"<p>{escape(repr(self))}</p>" + drawn._repr_html_()

    def __repr__(self) -> str:
        first, *others = self.to_pandas().itertuples()
        next_best = f"; next best: {others[0].size:,} by {others[0].method}" if others else ""
        return (
            f"FoundCircuit({len(self.circuit):,} of {self.circuit.grid.n_parts:,} "
            f"{self.circuit.grid.noun}, by {self.method}, explain {first.explained_effect:.3f} "
            f"({first.low:.3f} to {first.high:.3f}) of the effect on {len(self.held_out.clean):,} "
            f"held-out pairs, {self.at:g} asked for{next_best})"
        )


@dataclass(frozen=True, eq=False)
class CircuitSizes(Result):
    """How many circuit edges each prompt pair needs on its own.

    Args:
        sizes: size for each pair, usually fractional; infinite if the level is not reached, NaN if
            the patch does not change the metric of the pair.
        level: explained effect to reach.
        total: number of circuit edges in the model.
        prompt_start: text that every prompt started with, such as BOS; ``None`` if not known.
    """

    finite = False
    sizes: Float[Tensor, " pair"]
    level: float
    total: int
    prompt_start: str | None = None

    @property
    def median(self) -> float | None:
        """Median size over the pairs with an effect to explain; ``None`` if it is not reached.

        Pairs that do not reach the level count as larger than all others.
        """
        sizes = self.sizes[~self.sizes.isnan()]
        median = sizes.quantile(0.5, interpolation="midpoint").item() if len(sizes) else math.inf
        return median if math.isfinite(median) else None

    @property
    def not_reached(self) -> int:
        """Number of pairs that do not reach the level with any measured circuit."""
        return int(self.sizes.isinf().sum())

    @property
    def no_effect(self) -> int:
        """Number of pairs without an effect to explain: clean and patched metric are equal."""
        return int(self.sizes.isnan().sum())

    def to_pandas(self) -> pd.DataFrame:
        """One row per pair: its index, its size, and the outcome."""
        table = pd.DataFrame({"size": self.sizes, "outcome": "reached"}).rename_axis("pair")
        table.loc[self.sizes.isinf().numpy(), "outcome"] = "not reached"
        table.loc[self.sizes.isnan().numpy(), "outcome"] = "no effect"
        return table.reset_index()

    def __repr__(self) -> str:
        median = "none" if self.median is None else f"{self.median:,.1f}"
        return (
            f"CircuitSizes({len(self.sizes)} pairs, {self.level} of the effect of each: median "
            f"{median} of {self.total:,} circuit edges; {self.not_reached} not reached, "
            f"{self.no_effect} without an effect)"
        )


@checked
@in_evaluation_mode
def find_circuit(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    *,
    at: Share = 0.9,
    parts: Literal["circuit_edges", "heads"] = "circuit_edges",
    held_out: PromptPairs | None = None,
    patch: Patch = "corrupted",
    seconds: Positive | None = None,
    batch_size: AtLeastOne = 32,
    seed: Seed = 0,
    progress: bool = True,
) -> FoundCircuit:
    """Find a small circuit with a given explained effect on pairs that no search has seen.

    Compares the ranking by EAP-IG, for heads also that by exact effects, and backward elimination
    (`Elimination`), all on the same held-out pairs. Since the circuit is chosen on these pairs, its
    effect on others can be slightly smaller. Other arguments are those of
    `attribute_circuit_edges`.

    Args:
        pairs: prompt pairs to search on; one half of them, drawn at random, if none are given as
            `held_out`.
        at: explained effect that the circuit should reach, above 0 and at most 1.
        parts: what the circuit is made of.
        held_out: other prompt pairs, to evaluate circuits on.
        seconds: time that the call may take, by default as much as it needs. Within a short time,
            the elimination stops early, and fewer circuits are evaluated. The attribution, or the
            exact effects of heads, are always completed.
        seed: random seed of the division into halves.

    Raises:
        ValueError: there are fewer than two pairs to divide.
        NoEffectError: patching everything changes the metric of no pair.
    """
    if held_out is None:
        if len(pairs) < 2:
            raise ValueError(
                f"there are {len(pairs)} prompt pairs; at least two are needed, to search on some "
                "and evaluate on others. Give more, or others as held_out="
            )
        shuffled = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
        half = len(pairs) // 2
        pairs, held_out = pairs.select(shuffled[half:]), pairs.select(shuffled[:half])
    began = time.monotonic()
    limit = math.inf if seconds is None else seconds
    site = CircuitEdges() if parts == "circuit_edges" else Heads()
    runs, others = runs_of_search(model, site, pairs, held_out, patch, batch_size, metric)
    assert others is not None
    options: dict[str, Any] = {"patch": patch, "batch_size": batch_size, "progress": progress}
    found, scores = _rankings(model, pairs, metric, parts, options)
    ranked, run = time.monotonic(), partial(evaluate, model, held_out, metric, **options)
    judge = partial(_evaluated, run=run, at=at, patch=patch)
    judged = {name: judge(some, deadline=began + limit / 2) for name, some in found.items()}
    n_evaluated = sum(len(evaluation.sizes) for _, evaluation in judged.values())
    each = (time.monotonic() - ranked) / n_evaluated
    end = began + limit - 2 * each  # the circuit that is returned is run on both halves
    search = Elimination(runs, metric, [*found.values()][-1].scores, at)
    left = end - time.monotonic()
    search.run(left - min(EVALUATED * each, left / 3), progress)
    if search.dropped.any():
        sizes = _thinned(search.sizes(), search.effects)
        # As many as half of the time is enough for; then closer sizes.
        most = max(1.0, (end - time.monotonic()) / each / 2)
        sizes = sizes[:: max(1, math.ceil(len(sizes) / most))]
        found["elimination"] = _Ranking(search.ranking(), sizes, search.seconds)
        judged["elimination"] = judge(found["elimination"], deadline=end)
    evaluations = {method: evaluation for method, (_, evaluation) in judged.items()}
    best = {method: curve.sizes[reached(curve, at)] for method, curve in evaluations.items()}
    method = min(best, key=lambda name: best[name])
    circuit = judged[method][0][best[method]]
    return FoundCircuit(
        circuit=circuit,
        method=method,
        at=at,
        searched=evaluated(runs, metric, [circuit]),
        held_out=evaluated(others, metric, [circuit]),
        evaluations=evaluations,
        seconds={name: ranking.seconds for name, ranking in found.items()},
        scores=scores,
    )


@dataclass(frozen=True)
class _Ranking:
    """A method's scores, the sizes to cut them at, and the seconds that the scores took."""

    scores: Scores
    sizes: tuple[int, ...]
    seconds: float

    def cut(self, sizes: Iterable[int], patch: Patch) -> dict[int, tuple[int, Circuit]]:
        """Circuits without parts that have no effect, and where they were cut, by size."""
        found = {}
        for size in sizes:
            circuit = self.scores.top(size).connected(patch=patch)
            found[len(circuit)] = size, circuit
        return found


def _rankings(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    parts: Literal["circuit_edges", "heads"],
    options: dict[str, Any],
) -> tuple[dict[str, _Ranking], Scores]:
    """The rankings to compare elimination with, which starts from the last one; and its scores.

    Circuit edges are ranked by the mean over pairs of the absolute score: an edge that helps in
    some pairs and hurts in others averages out on these pairs, but not on others.
    """
    began = time.monotonic()
    if parts == "circuit_edges":
        scores = attribute_circuit_edges(model, pairs, metric, by_pair=True, **options)
        strength = replace(scores, values=scores.values.abs().mean(dim=0))
        sizes = log_sizes(max(1, int(strength.values.count_nonzero())))
        ranking = _Ranking(strength, sizes, time.monotonic() - began)
        return {"eap-ig": ranking}, replace(scores, values=scores.mean())
    scores = attribute_heads(model, pairs, metric, **options)
    sizes = log_sizes(scores.grid.n_parts, per_doubling=8, all_up_to=32)
    middle = time.monotonic()
    grid = adapt(model).graph.heads
    effects = patch_exactly(model, pairs, metric, grid.names(grid.places), **options)
    exact = replace(Scores.of(grid, effects, "exact"), prompt_start=pairs.start)
    rankings = {
        "eap-ig": _Ranking(scores, sizes, middle - began),
        "exact": _Ranking(exact, sizes, time.monotonic() - middle),
    }
    return rankings, exact


def _evaluated(
    ranking: _Ranking,
    run: Callable[[list[Circuit]], Evaluation],
    at: float,
    patch: Patch,
    deadline: float,
) -> tuple[dict[int, Circuit], Evaluation]:
    """A ranking's circuits, by size, and their evaluation: the largest first, a few at a time,
    until one is below `at`; then closely spaced above it. Stops before the deadline."""
    cuts, rows = dict[int, tuple[int, Circuit]](), dict[int, Tensor]()
    sizes = [ranking.scores.grid.n_parts, *sorted(ranking.sizes, reverse=True)]
    new, sizes = ranking.cut(sizes[:RATIOS], patch), sizes[RATIOS:]
    while True:
        began = time.monotonic()
        cuts |= new
        evaluation = run([circuit for _, circuit in new.values()])
        rows |= zip(evaluation.sizes, evaluation.values, strict=True)
        ordered = tuple(sorted(rows))
        values = torch.stack([rows[size] for size in ordered])
        evaluation = replace(evaluation, sizes=ordered, values=values)
        if first := reached(evaluation, at):
            low, high = (max(1, cuts[size][0]) for size in ordered[first - 1 : first + 1])
            if high - low <= CLOSE * high:
                break
            sizes = [round(low * (high / low) ** (k / RATIOS)) for k in range(1, RATIOS)]
        new = {}
        while sizes and not new:
            some, sizes = ranking.cut(sizes[:RATIOS], patch), sizes[RATIOS:]
            new = {size: cut for size, cut in some.items() if size not in cuts}
        now = time.monotonic()
        if not new or now + (now - began) > deadline:
            break
    return {size: circuit for size, (_, circuit) in cuts.items()}, evaluation


def _thinned(sizes: list[int], effects: list[float]) -> tuple[int, ...]:
    """Growing sizes of circuits, each much larger than the one before and none worse.

    A circuit that explains less than a smaller one, on the pairs of the search, is left out.
    """
    kept, best = [sizes[-1]], effects[-1]
    for size, effect in zip(reversed(sizes), reversed(effects), strict=True):
        if size * SHRINKS >= kept[-1] and effect >= best:
            kept.append(size)
            best = effect
    return tuple(kept)


def reached(evaluation: Evaluation, level: float) -> int:
    """Index of the smallest circuit that reaches a level, as all larger ones do.

    The last circuit, which is the whole model, always does.
    """
    effects = evaluation.effect.tolist()
    return max((i + 1 for i, effect in enumerate(effects[:-1]) if effect < level), default=0)


@checked
@in_evaluation_mode
def circuit_sizes_per_prompt(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    *,
    level: Share = 0.9,
    method: Method = "eap-ig",
    steps: AtLeastOne = 5,
    sizes: Sequence[int] | None = None,
    patch: Patch = "corrupted",
    batch_size: AtLeastOne = 32,
    progress: bool = True,
) -> CircuitSizes:
    """The number of circuit edges that each prompt pair needs, scored on that pair alone.

    With the patches "corrupted" and "zero", this equals `attribute_circuit_edges` and
    `evaluate_circuit_edges` on each pair alone. "mean" averages over all pairs, and "resample"
    draws from all pairs. Other arguments are those of `attribute_circuit_edges`.

    Args:
        level: explained effect, above 0 and at most 1.
        sizes: numbers of top-ranked edges to evaluate; `log_sizes` of all edges by default.
        batch_size: prompt pairs per attribution pass, and circuits per evaluation pass.
    """
    options = {"method": method, "steps": steps, "patch": patch, "progress": progress}
    scores = attribute_circuit_edges(
        model, pairs, metric, by_pair=True, batch_size=batch_size, **options
    )
    graph = scores.grid
    top_sizes = sorted(log_sizes(graph.n_parts) if sizes is None else sizes)
    needed = []
    runs = PairRuns(model, CircuitEdges(), pairs, patch, batch_size=1)
    with torch.no_grad(), tracked("circuits of single prompts", len(pairs), progress) as step:
        for values, (pair, run) in zip(scores.values, runs, strict=True):
            of_pair = Scores(graph, values, scores.method)
            connected = (of_pair.top(size).connected(patch=patch) for size in top_sizes)
            circuits = {len(circuit): circuit.mask for circuit in connected}
            masks = torch.stack([graph.exists & False, *circuits.values()])
            logits = torch.cat([run.logits(stack) for stack in masks.split(batch_size)])
            none, *found = [measure(metric, row, pair).cpu().double() for row in logits]
            clean = measure(metric, run.clean_logits, pair).cpu().double()
            try:
                effect = explained_effect(torch.stack(found), clean, none).tolist()
            except NoEffectError:
                needed.append(math.nan)
            else:
                curve = EffectCurve("one pair", tuple(circuits), effect, effect, effect)
                size = curve.size_at(level)
                needed.append(math.inf if size is None else size)
            step()
    needed_sizes = torch.tensor(needed, dtype=torch.float64)
    return CircuitSizes(needed_sizes, level, graph.n_parts, pairs.start)


Group = tuple[int | slice, ...]
"""Index of a group of parts."""


class Elimination:
    """A backward elimination, from the best parts by `scores`, of circuits that reach `level`.

    `mask` has the parts that are left, `dropped` the step at which each part was dropped, or 0,
    `effects` the explained effect after each step on the pairs of the search, at most 1, and
    `deviation` the mean deviation after the last step.
    """

    def __init__(self, runs: PairRuns, metric: Metric, scores: Scores, level: float) -> None:
        self.runs, self.metric, self.scores, self.grid = runs, metric, scores, scores.grid
        self._strength = scores.mean().abs()
        self._lowest = level - MARGIN
        sweeps = _sweeps(scores.grid)
        self._groups = [group for sweep in sweeps for group in sweep]
        self._sweeps = [0, *accumulate(map(len, sweeps[:-1]))]
        clean, none = list[Tensor](), list[Tensor]()
        for batch, run in runs:
            clean.append(measure(metric, run.clean_logits, batch))
            none.append(measure(metric, runs.everything_patched(run), batch))
        self._clean, self._none = (torch.cat(some).cpu().double() for some in (clean, none))
        self.mask, self.effects, self.deviation = self._connected(self.grid.exists), [1.0], 0.0
        self.dropped = (self.grid.exists & ~self.mask).long()
        self.seconds, self._price, self._floor, self._step = 0.0, 0.0, 0.0, STEP
        self._losses: list[tuple[float, int]] = []
        """For each group that this pass could drop: what it would lose, or 0 if it was dropped, and
        its number of parts."""

    def run(self, seconds: float = math.inf, progress: bool = True) -> None:
        """Search until circuits are below the level by `MARGIN`, or the time is over."""
        end = time.monotonic() + seconds
        self._start(end)
        began = now = time.monotonic()
        total, tried, position, done = len(self._groups), 0, 0, False
        while not done and now < end:
            stop = min(start for start in (*self._sweeps, total) if start > position)
            needed = (stop - position) * (now - began) / max(1, tried)
            if position and self._losses and needed >= FINE * (end - now):
                done, position = self._end_pass(), 0
                continue
            if position == 0:
                self._begin_pass()
            self.mask = self._connected(self.mask)
            for _, run in self.runs:
                run.start_from(self.mask)
            with tracked("eliminating", total, progress, done=position) as step:
                while position < stop and now < end:
                    self._try(self._groups[position])
                    position, tried, now = position + 1, tried + 1, time.monotonic()
                    self.seconds = now - began
                    size = int(self.mask.count_nonzero())
                    step(f"{size:,} {self.grid.noun}: {self.effects[-1]:.2f}")
            if position == total:
                done, position = self._end_pass(), 0

    def ranking(self) -> Scores:
        """Minus the step at which each part was dropped, as scores of the parts.

        Of parts dropped in one step, those with larger scores count as dropped later.
        """
        last = len(self.effects) + 1
        steps = torch.where(self.dropped == 0, last, self.dropped).double()
        order = self.scores.order()
        steps[tuple(order.T)] += torch.linspace(0.5, 0, len(order), dtype=steps.dtype)
        values = -steps.where(self.grid.exists, 0)
        return Scores(self.grid, values, "elimination", self.scores.prompt_start)

    def sizes(self) -> list[int]:
        """Number of parts after each step: where to cut the ranking."""
        steps = self.dropped[self.grid.exists]
        n_dropped = steps.bincount(minlength=len(self.effects) + 1)[1:].cumsum(0)
        return (self.grid.n_parts - n_dropped).tolist()

    # ---- one step --------------------------------------------------------------------------------

    def _start(self, end: float) -> None:
        """Keep the best parts by score, as many as gain most; of those tried before the end."""
        order, left = self.scores.order(), 1 - self._lowest
        n, found, most = float(self._strength.count_nonzero()), 1.0, 0.0
        while n >= 1 and found > 1 - 2 * left and time.monotonic() < end:
            mask = torch.zeros_like(self.mask)
            mask[tuple(order[: int(n)].T)] = True
            mask = self._connected(mask)
            ((found, deviation),) = self._outcomes(mask[None])
            size = max(1, int(mask.count_nonzero()))
            gain = left * math.log(len(order) / size) - max(0.0, 1 - found)
            if gain > most and found >= 1 - left / 2:
                self.mask, self.effects, self.deviation = mask, [found], deviation
                most = gain
            n /= RATIO
        self.dropped = (self.grid.exists & ~self.mask).long()

    def _begin_pass(self) -> None:
        """Set the price of a part and the explained effect that the pass does not go below."""
        left = max(0.0, self.effects[-1] - self._lowest)
        total, affordable = 0.0, 0.0  # the price at which the groups kept last lose what is left
        for price, lost in sorted((lost / n, lost) for lost, n in self._losses):
            total, affordable = total + lost, price
            if total > left:
                break
        share = left / max(1, int(self._connected(self.mask).count_nonzero()))
        self._price = max(2 * self._price, affordable, share)
        self._floor = self.effects[-1] - max(left / 2, self._step)
        self._losses = []

    def _end_pass(self) -> bool:
        """Whether this was the last pass; the next has larger steps if this could drop no group."""
        left = self.effects[-1] - self._lowest
        stuck = not self._losses
        done = left < 0 or (stuck and self._step > left)
        if stuck:
            self._step *= 2
        return done

    def _try(self, group: Group) -> None:
        """Drop as much of a group as gains most."""
        live = self._connected(self.mask)
        inside = torch.zeros_like(live)
        inside[group] = live[group]
        places = inside.nonzero()
        if not len(places):
            return
        order = places[self._strength[tuple(places.T)].argsort(descending=True, stable=True)]
        kept = sorted({int(share * len(order)) for share in SHARES})
        masks = self.mask.repeat(len(kept), *[1] * live.ndim)
        for mask, n in zip(masks, kept, strict=True):
            mask[tuple(order[n:].T)] = False
        outcomes, possible = self._outcomes(masks), list[tuple[float, int, int]]()
        for row, (effect, deviation) in enumerate(outcomes):
            if effect >= max(self._floor, self.effects[-1] - self._step):
                n = int((live & ~self._connected(masks[row])).count_nonzero())
                possible.append((max(0.0, deviation - self.deviation), n, row))
        if not possible:
            return
        gain, row = max((self._price * n - loss, row) for loss, n, row in possible)
        if gain <= 0:
            self._losses.append(min(possible, key=lambda one: one[0] / one[1])[:2])
            return
        self._losses.append((0.0, 1))
        self.mask = masks[row].clone()
        effect, self.deviation = outcomes[row]
        self.effects.append(effect)
        self.dropped[live & ~self._connected(self.mask)] = len(self.effects)

    def _outcomes(self, masks: Bool[Tensor, "circuit ..."]) -> list[tuple[float, float]]:
        """Explained effects and mean deviations of circuits on the pairs of the search.

        An effect above 1 counts as equally far below.
        """
        found = list[Float[Tensor, "circuit pair"]]()
        with torch.no_grad():
            for batch, run in self.runs:
                stacks = masks.split(settings_at_once(len(batch)))
                logits = [row for some in stacks for row in run.logits(some)]
                values = [measure(self.metric, row, batch) for row in logits]
                found.append(torch.stack(values).cpu().double())
        values = torch.cat(found, dim=1)
        effects = explained_effect(values, self._clean, self._none)
        deviations = (values - self._clean).abs().mean(dim=1)
        deviations /= (self._clean - self._none).mean().abs()
        return [*zip((1 - (effects - 1).abs()).tolist(), deviations.tolist(), strict=True)]

    def _connected(self, mask: Bool[Tensor, "*axes"]) -> Bool[Tensor, "*axes"]:
        return Circuit(self.grid, mask).connected(patch=self.runs.patch).mask


def _sweeps(grid: Grid) -> list[list[Group]]:
    """Groups of parts, each sweep from late to early: passes then start at the layer of a group."""
    if not isinstance(grid, CircuitGraph):
        return [[tuple(place) for place in grid.places.flip(0).tolist()]]
    every, last = slice(None), len(grid.destinations) - 1
    heads = [group for group in grid.groups if group.n_kv_heads]
    sweeps: list[list[Group]] = [
        [(slice(0, 1), every), *((group.rows, every) for group in grid.groups)],
        [*((every, group.columns) for group in grid.groups), (every, slice(last, None))],
        [(at, every) for group in heads for at in range(group.rows.start, group.rows.stop)],
        [(every, at) for group in heads for at in range(group.columns.start, group.columns.stop)],
    ]
    return [sweep[::-1] for sweep in sweeps]
