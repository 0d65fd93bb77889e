"""Find small circuits: of a task, by the methods that are worth their time, and of each prompt.

1. Divide the pairs: one half is searched on; the other, *held out*, is never seen by a search.
2. Rank circuit edges by the mean over pairs of the absolute EAP-IG score, heads by that of the
   mean and by their exact effects, and all by backward elimination, which starts from the last of
   these rankings.
3. Every ranking is cut at growing sizes, and these circuits are evaluated on the held-out pairs;
   so are closer sizes between the last circuit below the level and the next one.
4. The smallest circuit that reaches the level there, like all larger ones of its ranking, is
   returned.

Such a circuit contains the edges that each of many prompts needs. `circuit_sizes_per_prompt` finds
how many edges a single pair needs: those that score best on that pair, evaluated on that pair. The
edges are scored in the same passes as for a mean over pairs, and the circuits of all sizes run as
one stack of gates.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.backend import HookedModel, adapt, in_evaluation_mode
from sparse_tl.calls.arguments import AtLeastOne, Positive, Seed, Share, checked
from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.effect import EffectCurve, Evaluation
from sparse_tl.circuits.evaluation import Faithfulness, FaithfulnessRuns, evaluate, log_sizes
from sparse_tl.circuits.methods.attribution import attribute_circuit_edges, attribute_heads
from sparse_tl.circuits.methods.elimination import Elimination
from sparse_tl.circuits.methods.exact import patch_exactly
from sparse_tl.circuits.methods.gradients import Method
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.circuits.scores import Scores
from sparse_tl.data import PromptPairs
from sparse_tl.gates import CircuitEdges, GatedRun, Heads, Patch
from sparse_tl.graph import CircuitGraph
from sparse_tl.metrics import Metric, NoEffectError, explained_effect, measure
from sparse_tl.progress import tracked
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd

SHRINKS = 0.93
"""Maximum ratio of the size of one evaluated circuit of a search to that of the next larger one."""
CLOSE = 0.01
"""Where a ranking reaches the level, it is cut at sizes that differ by at most this share."""
RATIOS = 4
"""Number of equal ratios into which each round divides the gap between two sizes."""


@dataclass(frozen=True, eq=False)
class FoundCircuit(Result):
    """The smallest circuit found that reaches an explained effect on held-out pairs.

    `figure` draws the curves; ``component_diagram(found.circuit, scores=found.scores)`` draws the
    circuit, which need not consist of the largest scores.

    Args:
        circuit: the circuit.
        method: the method that found it.
        at: explained effect that was asked for.
        searched: faithfulness of the circuit on the pairs of the search.
        held_out: its faithfulness on the held-out pairs.
        evaluations: every circuit that was run on the held-out pairs, of growing size, by method.
        seconds: time that each method took to rank the parts.
        scores: scores that the search started from: attribution, or exact effects for heads.
    """

    circuit: Circuit
    method: str
    at: float
    searched: Faithfulness
    held_out: Faithfulness
    evaluations: dict[str, Evaluation]
    seconds: dict[str, float]
    scores: Scores

    @property
    def interval(self) -> tuple[float, float]:
        """Bootstrap interval of the circuit's explained effect over held-out pairs."""
        row = self.to_pandas().iloc[0]
        return row["low"], row["high"]

    def to_pandas(self) -> pd.DataFrame:
        """One row per method, the smallest circuit first.

        Columns give the size of the method's smallest circuit that reaches `at`, its explained
        effect on held-out pairs with an interval, and the seconds that the method took.
        """
        import pandas as pd

        rows = []
        for method, evaluation in self.evaluations.items():
            found = evaluation.to_pandas().iloc[reached(evaluation, self.at)]
            columns = {name: found[name] for name in ("explained_effect", "low", "high")}
            size = {"method": method, "size": int(found["size"])}
            rows.append({**size, **columns, "seconds": self.seconds[method]})
        return pd.DataFrame(rows).sort_values("size", kind="stable", ignore_index=True)

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>" + self.circuit._repr_html_()

    def __repr__(self) -> str:
        first, *others = self.to_pandas().itertuples()
        next_best = f"; next best: {others[0].size:,} by {others[0].method}" if others else ""
        return (
            f"FoundCircuit({len(self.circuit):,} of {self.circuit.grid.n_parts:,} "
            f"{self.circuit.grid.noun}, by {self.method}, explain {first.explained_effect:.3f} "
            f"({first.low:.3f} to {first.high:.3f}) of the effect on {self.held_out.n_pairs:,} "
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
        import pandas as pd

        outcome = pd.Series("reached", index=range(len(self.sizes)))
        outcome[self.sizes.isinf().tolist()] = "not reached"
        outcome[self.sizes.isnan().tolist()] = "no effect"
        rows = {"pair": outcome.index, "size": self.sizes.tolist(), "outcome": outcome}
        return pd.DataFrame(rows)

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
    (`sparse_tl.circuits.methods.elimination`), all on the same held-out pairs. Since the
    circuit is chosen on these pairs, its effect on others can be slightly smaller. Other arguments
    are those of `attribute_circuit_edges`.

    Args:
        pairs: prompt pairs to search on; one half of them, drawn at random, if none are given as
            `held_out`.
        at: explained effect that the circuit should reach, above 0 and at most 1.
        parts: what the circuit is made of.
        held_out: other prompt pairs, to evaluate circuits on.
        seconds: time that the call may take: the elimination stops early enough for its circuits to
            be evaluated in what is left. By default it runs to its end.
        seed: random seed of the division into halves.

    Raises:
        ValueError: there are fewer than two pairs to divide, or an argument is out of range.
        NoEffectError: patching everything changes the metric of no pair.
    """
    if held_out is None:
        pairs, held_out = _halves(pairs, seed)
    site = CircuitEdges() if parts == "circuit_edges" else Heads()
    began = time.monotonic()
    runs = PairRuns(model, site, pairs, patch, batch_size, keep=True)
    runs.check_effect(metric)
    report = FaithfulnessRuns(runs, metric, held_out)
    options: dict[str, Any] = {"patch": patch, "batch_size": batch_size, "progress": progress}
    found, scores = _rankings(model, pairs, metric, parts, options)
    run, ranked = partial(evaluate, model, held_out, metric, **options), time.monotonic()
    judged = {method: _evaluated(ranking, run, at, patch) for method, ranking in found.items()}
    evaluating = time.monotonic() - ranked
    search = Elimination(runs, metric, [*found.values()][-1].scores, at)
    # The circuits of the elimination take about as long to evaluate as those of the rankings.
    spent = time.monotonic() - began + evaluating
    search.run(math.inf if seconds is None else seconds - spent, progress)
    sizes = _thinned(search.sizes(), search.effects)
    found["elimination"] = _Ranking(search.ranking(), sizes, search.seconds)
    judged["elimination"] = _evaluated(found["elimination"], run, at, patch)
    evaluations = {method: evaluation for method, (_, evaluation) in judged.items()}
    best = {method: curve.sizes[reached(curve, at)] for method, curve in evaluations.items()}
    method = min(best, key=lambda name: best[name])
    circuit = judged[method][0][best[method]]
    searched, others = report.of(circuit.mask)
    assert others is not None
    seconds_of = {name: ranking.seconds for name, ranking in found.items()}
    return FoundCircuit(circuit, method, at, searched, others, evaluations, seconds_of, scores)


def _halves(pairs: PromptPairs, seed: int) -> tuple[PromptPairs, PromptPairs]:
    """Pairs to search on and pairs to hold out, drawn at random."""
    if len(pairs) < 2:
        raise ValueError(
            f"there are {len(pairs)} prompt pairs; at least two are needed, to search on some and "
            "evaluate on others. Give more, or others as held_out="
        )
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
    half = len(pairs) // 2
    return pairs.select(order[half:]), pairs.select(order[:half])


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
            circuit = self.scores.top(size)
            if isinstance(self.scores.grid, CircuitGraph):
                circuit = circuit.connected(patch=patch)
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
    ranking: _Ranking, run: Callable[[list[Circuit]], Evaluation], at: float, patch: Patch
) -> tuple[dict[int, Circuit], Evaluation]:
    """A ranking's circuits, by size, and their evaluation; closely spaced where it reaches `at`."""
    cuts, rows = dict[int, tuple[int, Circuit]](), dict[int, Tensor]()
    new = ranking.cut((*ranking.sizes, ranking.scores.grid.n_parts), patch)
    while True:
        cuts |= new
        evaluation = run([circuit for _, circuit in new.values()])
        rows |= zip(evaluation.sizes, evaluation.values, strict=True)
        ordered = tuple(sorted(rows))
        values = torch.stack([rows[size] for size in ordered])
        evaluation = replace(evaluation, sizes=ordered, values=values)
        if not (first := reached(evaluation, at)):
            break
        low, high = (max(1, cuts[size][0]) for size in ordered[first - 1 : first + 1])
        if high - low <= CLOSE * high:
            break
        sizes = [round(low * (high / low) ** (k / RATIOS)) for k in range(1, RATIOS)]
        new = {size: cut for size, cut in ranking.cut(sizes, patch).items() if size not in cuts}
        if not new:
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

    Raises:
        ValueError: the level or a size is out of range, `sizes` is empty, or as in
            `attribute_circuit_edges`.
    """
    options = {"method": method, "steps": steps, "patch": patch, "progress": progress}
    scores = attribute_circuit_edges(
        model, pairs, metric, by_pair=True, batch_size=batch_size, **options
    )
    graph = scores.grid
    top_sizes = sorted(log_sizes(graph.n_parts) if sizes is None else sizes)
    if not top_sizes:
        raise ValueError("give at least one size")
    needed = []
    runs = PairRuns(model, CircuitEdges(), pairs, patch, batch_size=1)
    with torch.no_grad(), tracked("circuits of single prompts", len(pairs), progress) as step:
        for values, (pair, run) in zip(scores.values, runs, strict=True):
            of_pair = Scores(graph, values, scores.method)
            connected = (of_pair.top(size).connected(patch=patch) for size in top_sizes)
            circuits = {len(circuit): circuit.mask for circuit in connected}
            needed.append(_size(circuits, pair, run, metric, level, batch_size))
            step()
    needed_sizes = torch.tensor(needed, dtype=torch.float64)
    return CircuitSizes(needed_sizes, level, graph.n_parts, pairs.start)


def _size(
    circuits: Mapping[int, Bool[Tensor, "source destination"]],
    pair: PromptPairs,
    run: GatedRun,
    metric: Metric,
    level: float,
    rows: int,
) -> float:
    """The size from which circuits, keyed by size, reach the level; `rows` circuits per pass."""
    clean = measure(metric, run.clean_logits, pair).cpu().double()
    masks = torch.stack([torch.zeros_like(next(iter(circuits.values()))), *circuits.values()])
    logits = torch.cat([run.logits(stack) for stack in masks.split(rows)])
    none, *values = [measure(metric, row, pair).cpu().double() for row in logits]
    try:
        effect = explained_effect(torch.stack(values), clean, none).tolist()
    except NoEffectError:
        return math.nan
    size = EffectCurve("one pair", tuple(circuits), effect, effect, effect).size_at(level)
    return math.inf if size is None else size
