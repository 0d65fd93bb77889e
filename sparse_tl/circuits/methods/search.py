"""Find a small circuit that explains an effect, by the methods that are worth their time.

1. Divide the pairs: one half is searched on; the other, *held out*, is never seen by a search.
2. Rank circuit edges by the mean over pairs of the absolute EAP-IG score, heads by that of the
   mean and by their exact effects, and all by backward elimination, which starts from the last of
   these rankings.
3. Every ranking is cut at growing sizes, and these circuits are evaluated on the held-out pairs;
   so are closer sizes between the last circuit below the level and the next one.
4. The smallest circuit that reaches the level there, like all larger ones of its ranking, is
   returned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sparse_tl.calls.arguments import AtLeastOne, Positive, Seed, Share, checked
from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.effect import Evaluation
from sparse_tl.circuits.evaluation import evaluate, log_sizes
from sparse_tl.circuits.faithfulness import FaithfulnessRuns
from sparse_tl.circuits.found_circuit import FoundCircuit, reached
from sparse_tl.circuits.methods.attribution import attribute_circuit_edges, attribute_heads
from sparse_tl.circuits.methods.elimination import Elimination
from sparse_tl.circuits.methods.exact import patch_exactly
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.circuits.scores import Scores
from sparse_tl.data import PromptPairs
from sparse_tl.gates import CircuitEdges, Heads, Patch
from sparse_tl.lens import HookedModel, adapt, in_evaluation_mode
from sparse_tl.metrics import Metric
from sparse_tl.parts.graph import CircuitGraph
from sparse_tl.storage.files import locked

SHRINKS = 0.93
"""Maximum ratio of the size of one evaluated circuit of a search to that of the next larger one."""
CLOSE = 0.01
"""Where a ranking reaches the level, it is cut at sizes that differ by at most this share."""
RATIOS = 4
"""Number of equal ratios into which each round divides the gap between two sizes."""


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
    checkpoint: str | Path | None = None,
    seed: Seed = 0,
    progress: bool = True,
) -> FoundCircuit:
    """Find a small circuit with a given explained effect on pairs that no search has seen.

    Compares the ranking by EAP-IG, for heads also that by exact effects, and backward elimination
    (`sparse_tl.circuits.methods.elimination`), all on the same held-out pairs. Since the
    circuit is chosen on these pairs, its effect on others can be slightly smaller.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs to search on; one half of them, drawn at random, if none are given as
            `held_out`.
        metric: metric function with one value per pair.
        at: explained effect that the circuit should reach, above 0 and at most 1.
        parts: what the circuit is made of.
        held_out: other prompt pairs, to evaluate circuits on.
        patch: patch at everything outside a circuit, as in `PatchedPairs`.
        seconds: time that the call may take: the elimination stops early enough for its circuits to
            be evaluated in what is left. By default it runs to its end.
        batch_size: prompt pairs per forward pass.
        checkpoint: folder for checkpoints; an elimination interrupted there is resumed.
        seed: random seed of the division into halves.
        progress: whether to show a progress bar.

    Raises:
        ValueError: there are fewer than two pairs to divide, an argument is out of range, or the
            checkpoint is of another search, or in use.
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
    folder = None if checkpoint is None else Path(checkpoint)
    with locked(folder):
        search = Elimination(runs, metric, [*found.values()][-1].scores, at)
        if folder is not None:
            search.save_to(folder, pairs, f"{at} {batch_size}")
        # The circuits of the elimination take about as long to evaluate as those of the rankings.
        spent = time.monotonic() - began + evaluating
        search.run(math.inf if seconds is None else seconds - spent, progress)
    sizes = _thinned(search.sizes(), search.state.effects)
    found["elimination"] = _Ranking(search.ranking(), sizes, search.state.seconds)
    judged["elimination"] = _evaluated(found["elimination"], run, at, patch)
    evaluations = {method: evaluation for method, (_, evaluation) in judged.items()}
    best = {method: curve.sizes[reached(curve, at)] for method, curve in evaluations.items()}
    method = min(best, key=lambda name: best[name])
    circuit = judged[method][0][best[method]]
    searched, others = report.of(circuit.mask)
    assert others is not None
    return FoundCircuit(
        circuit,
        method,
        at,
        searched,
        others,
        evaluations,
        {name: ranking.seconds for name, ranking in found.items()},
        scores,
    )


def _halves(pairs: PromptPairs, seed: int) -> tuple[PromptPairs, PromptPairs]:
    """Pairs to search on and pairs to hold out, drawn at random."""
    if len(pairs) < 2:
        raise ValueError(
            f"expected at least two prompt pairs, to search on some and evaluate on others; got "
            f"{len(pairs)}; give more, or others as held_out="
        )
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
    half = len(pairs) // 2
    return pairs.select(order[half:]), pairs.select(order[:half])


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
