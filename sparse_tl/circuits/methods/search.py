"""Find small circuits, of a task and of each prompt.

`find_circuit` makes circuits on one half of the pairs: of the best circuit edges by the mean over
pairs of the absolute EAP-IG score, and by forward selection, which starts from few of these
(`selection`); of the best heads by EAP-IG, and by their exact effects. Of a ranking, circuits of
falling sizes are run on the other half, and the smallest is returned that reaches the level, as all
larger ones do. `circuit_sizes_per_prompt` cuts the ranking of each single pair, on that pair.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from html import escape
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, Positive, Seed, Share, checked
from sparse_tl.backend import HookedModel, adapt, check_pairs, in_evaluation_mode
from sparse_tl.circuits.circuit import Circuit, Scores, check_size
from sparse_tl.circuits.curves import EffectCurve, median_size
from sparse_tl.circuits.evaluation import Evaluation, evaluated, log_sizes
from sparse_tl.circuits.methods.attribution import Method, attribute_circuit_edges, attribute_heads
from sparse_tl.circuits.methods.patching import patch_exactly
from sparse_tl.circuits.methods.selection import SearchedPairs
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.data import PromptPairs
from sparse_tl.gates import CircuitEdges, Heads, Patch
from sparse_tl.graph import CircuitGraph
from sparse_tl.metrics import Metric, NoEffectError, explained_effect, measure
from sparse_tl.progress import tracked
from sparse_tl.results import OfPrompts, Result

CLOSE = 0.01
"""A ranking whose circuit may become the smallest is cut, where it reaches the level, at sizes that
differ by at most this fraction."""
FIRST = 0.72
"""Explained effect of the circuit that the first forward selection adds to, as a fraction of the
level."""
MARGIN = 0.05
"""The least that a level counts as lacking to 1, in how far a selected circuit may exceed 1."""
STEP = 16
"""Number of circuits whose evaluation takes about as long as a step of forward selection."""
RATIOS = 4
"""Number of equal ratios into which the gap between two sizes is divided."""


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
        evaluations: circuits that were run on the held-out pairs, of growing size, by method, down
            to the first below the level; of forward selections the one that reached it.
        seconds: time that each method took; of rankings, without evaluation.
        scores: scores of the parts: attribution, or exact effects for heads.
        stopped: whether the time limit ended the search before it was done.
    """

    circuit: Circuit
    method: str
    at: float
    searched: Evaluation
    held_out: Evaluation
    evaluations: dict[str, Evaluation]
    seconds: dict[str, float]
    scores: Scores
    stopped: bool = False

    def to_pandas(self) -> pd.DataFrame:
        """One row per method, the smallest circuit first.

        Columns give the size of the method's smallest circuit that reaches `at`, its explained
        effect on held-out pairs with an interval, its `Evaluation.deviation` there, and the seconds
        that the method took. A ranking that cannot have the smallest was cut at one size a
        doubling.
        """
        rows = []
        for method, evaluation in self.evaluations.items():
            first = reached(evaluation, self.at)
            row = evaluation.to_pandas().drop(columns="metric").iloc[first : first + 1]
            rows.append(row.assign(method=method, seconds=self.seconds[method]))
        table = pd.concat(rows).sort_values("size", kind="stable", ignore_index=True)
        return table[["method", "size", "explained_effect", "low", "high", "deviation", "seconds"]]

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
            f"held-out pairs, {self.at:g} asked for{next_best}"
            f"{'; the time limit ended the search' if self.stopped else ''})"
        )


@dataclass(frozen=True, eq=False)
class CircuitSizes(OfPrompts):
    """How many circuit edges each prompt pair needs on its own.

    Args:
        sizes: size for each pair, usually fractional; infinite if the level is not reached, NaN if
            the patch does not change the metric of the pair.
        level: explained effect to reach.
        total: number of circuit edges in the model.
    """

    finite = False
    sizes: Float[Tensor, " pair"]
    level: float
    total: int

    @property
    def median(self) -> float | None:
        """Median size over the pairs with an effect to explain; ``None`` if it is not reached.

        Pairs that do not reach the level count as larger than all others.
        """
        return median_size(self.sizes[~self.sizes.isnan()].tolist() or [None])

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
            f"{median} of {self.total:,} circuit edges; {int(self.sizes.isinf().sum())} not "
            f"reached, {int(self.sizes.isnan().sum())} without an effect)"
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
    """Find a small circuit with a given explained effect on held-out pairs.

    Compares the ranking by EAP-IG with forward selection, or, for heads, with the ranking by exact
    effects. All circuits are run on the same held-out pairs. Since one is chosen there, its effect
    on others can be smaller. Other arguments are those of `attribute_circuit_edges`.

    Args:
        pairs: prompt pairs to search on; one half of them, drawn at random, if none are given as
            `held_out`.
        at: explained effect that the circuit should reach, above 0 and at most 1.
        parts: what the circuit is made of.
        held_out: other prompt pairs, to evaluate circuits on.
        seconds: time that the call may take, by default as much as it needs. Within a short time,
            the search stops early, and fewer circuits are evaluated. The attribution, or the exact
            effects of heads, are always completed.
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
        check_pairs(adapt(model), pairs)  # messages number them as they were given
        shuffled = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
        half = len(pairs) // 2
        pairs, held_out = pairs.select(shuffled[half:]), pairs.select(shuffled[:half])
    began, clock = time.monotonic(), _Clock()
    limit = math.inf if seconds is None else seconds
    site = CircuitEdges() if parts == "circuit_edges" else Heads()
    runs, others = (
        PairRuns(model, site, some, patch, batch_size, keep=True) for some in (pairs, held_out)
    )
    runs.check_effect(metric, "searched ")
    others.check_effect(metric, "held-out ")
    options: dict[str, Any] = {"patch": patch, "batch_size": batch_size, "progress": progress}
    judge = partial(_Judged, partial(evaluated, others, metric), at, patch)
    judged, scores = _rankings(model, pairs, metric, parts, options, judge)
    started = time.monotonic()
    for one in judged.values():
        one.shrink(clock, began + limit / 2, progress)
    each = (time.monotonic() - started) / sum(len(one.circuits) for one in judged.values())
    of_search = each * len(pairs) / len(held_out)
    end = began + limit - each - of_search  # the circuit that is returned is run on both halves
    if parts == "circuit_edges":
        started, searched = time.monotonic(), SearchedPairs(runs, metric)
        last = end - STEP * of_search
        if selected := _selected(searched, judged["eap-ig"], judge, clock, last, end, progress):
            judged["selection"] = selected
            selected.seconds = time.monotonic() - started
    for one in sorted(judged.values(), key=lambda one: len(one.best)):
        one.refine(clock, end, min(len(other.best) for other in judged.values()))
    method = min(judged, key=lambda name: len(judged[name].best))
    circuit = judged[method].best
    return FoundCircuit(
        circuit=circuit,
        method=method,
        at=at,
        searched=evaluated(runs, metric, [circuit]),
        held_out=evaluated(others, metric, [circuit]),
        evaluations={name: one.evaluation for name, one in judged.items()},
        seconds={name: one.seconds for name, one in judged.items()},
        scores=scores,
        stopped=clock.stopped,
    )


class _Clock:
    """Says whether it is late, and whether it ever was."""

    stopped = False

    def late(self, deadline: float, took: float = 0.0) -> bool:
        """Whether a step that takes as long as the one before would end after a deadline."""
        late = time.monotonic() + took > deadline
        self.stopped |= late
        return late


def _rankings(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    parts: Literal["circuit_edges", "heads"],
    options: dict[str, Any],
    judge: Callable[..., _Judged],
) -> tuple[dict[str, _Judged], Scores]:
    """The rankings by method, and scores with signs.

    The mean score of an edge that helps in some pairs and hurts in others averages out on these
    pairs, but not on others. So edges are ranked by absolute scores.
    """
    began = time.monotonic()
    if parts == "circuit_edges":
        scores = attribute_circuit_edges(model, pairs, metric, by_pair=True, **options)
        strength = replace(scores, values=scores.values.abs().mean(dim=0))
        sizes = log_sizes(max(1, int(strength.values.count_nonzero())), per_doubling=1)
        ranking = judge(strength, sizes, time.monotonic() - began)
        return {"eap-ig": ranking}, replace(scores, values=scores.mean())
    scores = attribute_heads(model, pairs, metric, **options)
    sizes = log_sizes(scores.grid.n_parts, all_up_to=32)
    middle = time.monotonic()
    grid = adapt(model).graph.heads
    effects = patch_exactly(model, pairs, metric, grid.names(grid.places), **options)
    exact = replace(Scores.of(grid, effects, "exact"), prompt_start=pairs.start)
    rankings = {
        "eap-ig": judge(scores, sizes, middle - began),
        "exact": judge(exact, sizes, time.monotonic() - middle),
    }
    return rankings, exact


class _Judged:
    """Circuits that were run on held-out pairs, by size; of a ranking, if it has scores.

    A ranking is first cut at `sizes`, and `cuts` are those at which it was. Circuits have no parts
    without effect. `seconds` are those that the scores, or the selection, took.
    """

    def __init__(
        self,
        run: Callable[[list[Circuit]], Evaluation],
        at: float,
        patch: Patch,
        scores: Scores | None = None,
        sizes: Sequence[int] = (),
        seconds: float = 0.0,
    ) -> None:
        self._run, self.at, self._patch = run, at, patch
        self.scores, self._sizes, self.seconds = scores, sizes, seconds
        self.circuits, self.cuts = dict[int, Circuit](), dict[int, int]()
        self._rows = dict[int, Tensor]()

    def add(self, circuits: Iterable[Circuit]) -> None:
        """Run circuits, unless one of the same size was."""
        new = {len(one): one for one in circuits if len(one) not in self.circuits}
        if not new:
            return
        evaluation = self._run([*new.values()])
        self.circuits |= new
        self._rows |= zip(evaluation.sizes, evaluation.values, strict=True)
        ordered = tuple(sorted(self._rows))
        values = torch.stack([self._rows[size] for size in ordered])
        self.evaluation = replace(evaluation, sizes=ordered, values=values)

    @property
    def best(self) -> Circuit:
        """The smallest that reaches the level, as all larger ones do."""
        return self.circuits[self.evaluation.sizes[reached(self.evaluation, self.at)]]

    def shrink(self, clock: _Clock, deadline: float, progress: bool) -> None:
        """Run circuits at the sizes of the ranking, the largest first, until one falls short."""
        assert self.scores is not None
        now, took = time.monotonic(), 0.0
        sizes = sorted({self.scores.grid.n_parts, *self._sizes}, reverse=True)
        with tracked(f"evaluating {self.scores.method}", len(sizes), progress) as step:
            for size in sizes:
                if self._rows and (reached(self.evaluation, self.at) or clock.late(deadline, took)):
                    break
                self._cut([size])
                step(f"{size:,}: {self.evaluation.effect[0]:.2f}")
                took, now = time.monotonic() - now, time.monotonic()

    def refine(self, clock: _Clock, deadline: float, smallest: int) -> None:
        """Run circuits of a ranking at closer sizes, between the last that reaches the level and
        the first that does not, while the one to be found may be smaller than the `smallest`."""
        now, took = time.monotonic(), 0.0
        while self.scores and (first := reached(self.evaluation, self.at)):
            ends = self.evaluation.sizes[first - 1 : first + 1]
            low, high = (max(1, self.cuts[size]) for size in ends)
            before = len(self.circuits)
            wide = ends[0] < smallest and high - low > CLOSE * high
            if wide and not clock.late(deadline, took):
                self._cut(round(low * (high / low) ** (k / RATIOS)) for k in range(1, RATIOS))
            if len(self.circuits) == before:
                break
            took, now = time.monotonic() - now, time.monotonic()

    def _cut(self, sizes: Iterable[int]) -> None:
        assert self.scores is not None
        found = list[Circuit]()
        for size in sizes:
            found.append(self.scores.top(size).connected(patch=self._patch))
            self.cuts.setdefault(len(found[-1]), size)
        self.add(found)


def _selected(
    pairs: SearchedPairs,
    ranking: _Judged,
    judge: Callable[[], _Judged],
    clock: _Clock,
    last: float,
    end: float,
    progress: bool,
) -> _Judged | None:
    """The first forward selection that reaches the level with fewer edges than the ranking's best.

    Each starts from more of the best edges than the one before. Circuits are run on held-out pairs
    if their effect on the pairs of the search is at least the level, and exceeds 1 by at most twice
    what the level lacks, or `MARGIN`: since they were selected there, they explain less on others.
    `last` is the latest time at which a step may begin.
    """
    scores, at, most = ranking.scores, ranking.at, len(ranking.best)
    assert scores is not None

    def start_of(size: int) -> Circuit:
        return scores.top(size).connected(patch=pairs.runs.patch)

    @cache
    def effect_of(size: int) -> float:
        return pairs.effects([start_of(size)])[0]

    if clock.late(last):
        return None
    sizes, limit = log_sizes(most)[:-1], 1 + 2 * max(1 - at, MARGIN)
    sizes = sizes[bisect_left(sizes, FIRST * at, key=effect_of) :]
    began = now = time.monotonic()
    size_before = 0
    for cut in sizes:
        start = start_of(cut)
        if len(start) == size_before:
            continue
        if clock.late(last, now - began):
            break
        began, size_before = now, len(start)
        with tracked(f"adding to the best {len(start):,}", 1, progress) as done:
            judged = judge()
            judged.add([Circuit(scores.grid, scores.grid.exists)])
            for circuit, effect in pairs.larger(
                start, effect_of(cut), limit, partial(clock.late, last)
            ):
                if len(judged.best) >= most and at <= effect <= limit and not clock.late(end):
                    judged.add([circuit])
            size = len(judged.best)
            done(f"{size:,}" if size < most else "falls short")
        if size < most:
            return judged
        now = time.monotonic()
    return None


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
    graph = adapt(model).graph
    top_sizes = sorted(log_sizes(graph.n_parts) if sizes is None else sizes)
    for size in top_sizes:
        check_size(graph, size)
    options = {"method": method, "steps": steps, "patch": patch, "progress": progress}
    scores = attribute_circuit_edges(
        model, pairs, metric, by_pair=True, batch_size=batch_size, **options
    )
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
    return CircuitSizes(needed_sizes, level, graph.n_parts, prompt_start=pairs.start)
