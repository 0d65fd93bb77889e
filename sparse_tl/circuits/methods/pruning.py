"""Two published searches for circuits, ACDC and learned edge pruning.

*ACDC* goes through the parts from late to early, at each destination the latest source first, and
permanently patches those that change the metric by less than the threshold. Edges into nodes
without a kept outgoing edge are dropped untested. A forward pass tests several parts of one
destination, on the assumption that each test has the outcome of the one before, and tests whose
assumption was wrong are repeated: the result is that of testing one by one. With a target size, the
threshold doubles after each pass until at most that many parts are left.

Reference: Conmy et al., arXiv 2304.14997, algorithm 1.

*Learned edge pruning* trains a hard-concrete gate on every circuit edge, to lower
``KL(clean || circuit)`` at a given expected number of open gates. A number added to all logits sets
this expectation, and the gradient is taken with it held constant. It moves to the requested number
linearly in the log odds of the fraction of open gates; then noise and learning rate fall linearly
to 0, and gates become 0 or 1. If the search starts from scores, the initial logits fall with the
logarithm of an edge's rank, from ``initial_logit`` at the requested number of edges to its negative
at the last edge.

Reference: Bhaskar et al., arXiv 2406.16778; from attribution scores: Mondorf et al.,
arXiv 2510.06811. Both reach the target with a Lagrange multiplier instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import islice, takewhile
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, Count, Logit, Positive, Seed, checked
from sparse_tl.backend import HookedModel, adapt, in_evaluation_mode
from sparse_tl.circuits.circuit import Circuit, Scores, check_grid, check_size
from sparse_tl.circuits.evaluation import Evaluation, evaluated
from sparse_tl.circuits.pair_runs import PairRuns, settings_at_once, value_of
from sparse_tl.contexts import autograd
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import CircuitEdges, HardConcreteGate, Heads, Patch
from sparse_tl.graph import CircuitGraph, HeadGrid
from sparse_tl.metrics import Metric, NoEffectError, divergence
from sparse_tl.progress import tracked
from sparse_tl.results import OfPrompts

REACHED_AT = 0.6
"""Fraction of the run after which the target is the requested size and the noise begins to fall."""
GATE = HardConcreteGate()


@dataclass(frozen=True, eq=False)
class SearchResult(OfPrompts):
    """The circuit that a search returns, what it explains, and the history of the search.

    Args:
        circuit: parts that are kept, without edges that have no effect (that are on no path).
        n_kept: number of parts that the search kept, including edges without effect.
        searched: evaluation of the circuit on the pairs of the search. What a search measures along
            the way is different: sampled gates, or a circuit with edges that have no effect.
        history: one row per step of the search.
    """

    circuit: Circuit
    n_kept: int
    searched: Evaluation
    history: pd.DataFrame

    def to_pandas(self) -> pd.DataFrame:
        """The search history."""
        return self.history

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>" + self.circuit._repr_html_()

    def _description(self) -> str:
        """The circuit and what it explains, as text."""
        grid, found = self.circuit.grid, self.searched
        dropped = self.n_kept > len(self.circuit)
        kept = f" ({self.n_kept:,} with those without effect)" if dropped else ""
        # A divergence below 1e-6 nats is rounding error. Adding 0 turns -0 into 0.
        metric = round(found.values.mean().item(), 6) + 0
        try:
            effect = f"explained effect {round(found.effect.item(), 3) + 0:.3f}"
        except NoEffectError:
            effect = "no effect to explain"
        return (
            f"{len(self.circuit):,} of {grid.n_parts:,} {grid.noun}{kept}; metric {metric:.3g}, "
            f"{effect}, on {len(found.clean):,} pairs"
        )


# ---- ACDC ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Acdc(SearchResult):
    """Result of ACDC.

    Args:
        history: one row per test: the part, the change of the metric, whether the part was kept.
        threshold: threshold of the last pass.
    """

    threshold: float

    def __repr__(self) -> str:
        return (
            f"Acdc({self._description()}; threshold {self.threshold:.3g}; "
            f"{len(self.history):,} tests)"
        )


@checked
@in_evaluation_mode
def acdc(
    model: HookedModel,
    pairs: PromptPairs,
    *,
    threshold: Positive | None = None,
    size: Count | None = None,
    metric: Metric | Literal["kl"] = "kl",
    start: Circuit | Literal["circuit_edges", "heads"] = "circuit_edges",
    patch: Patch = "corrupted",
    batch_size: AtLeastOne = 32,
    progress: bool = True,
) -> Acdc:
    """The circuit that is left after patching, from the output backwards, what hardly matters.

    Other arguments are those of `attribute_circuit_edges`.

    Args:
        threshold: smallest change of the metric for which a part is kept, in the metric's units;
            nats for "kl".
        size: maximum number of parts to keep; `threshold` (1e-4 by default) is then the initial
            threshold.
        metric: metric function with one value per pair, whose changes in either direction count;
            or "kl", the divergence from the whole model's predictions, where only increases do.
        start: all edges, all heads, or a circuit to start from, such as attribution's top edges.

    Raises:
        ValueError: neither threshold nor size is given, or the circuit belongs to another model.
        NoEffectError: patching everything changes the metric of no pair.
    """
    graph = adapt(model).graph
    if isinstance(start, str):
        grid = graph.heads if start == "heads" else graph
        start = Circuit(grid, grid.exists)
    check_grid(graph, start.grid, CircuitGraph, HeadGrid)
    if threshold is None and size is None:
        raise ValueError("give a threshold above 0, or a size")
    site = CircuitEdges() if start.grid == graph else Heads()
    runs = PairRuns(model, site, pairs, patch, batch_size, keep=True)
    runs.check_effect(metric)
    search = _Search(start, runs, metric, threshold or 1e-4)
    with torch.no_grad():
        search.run_pass(size, progress)
        while size is not None and len(search.circuit) > size:
            search.threshold *= 2
            search.run_pass(size, progress)
    circuit = search.circuit
    return Acdc(
        circuit=circuit,
        n_kept=int(search.mask.sum()),
        searched=evaluated(runs, metric, [circuit]),
        history=pd.DataFrame(search.history, columns=["part", "moved", "kept"]),
        threshold=search.threshold,
        prompt_start=pairs.start,
    )


class _Search:
    """An ACDC search: the parts that are left, and what was tested.

    `ahead` is the maximum number of parts to test in the next forward pass, `last_kept` whether the
    part tested last was kept, `value` the metric under the mask.
    """

    def __init__(
        self, initial: Circuit, runs: PairRuns, metric: Metric | Literal["kl"], threshold: float
    ) -> None:
        self.grid, self.metric, self.threshold = initial.grid, metric, threshold
        self.runs = runs
        self.mask, self.value = initial.mask.cpu().clone(), math.nan
        self.ahead, self.last_kept = 1, False
        self.history: list[tuple[str, float, bool]] = []
        # Parts in order of testing; those of a destination, or a layer of heads, are adjacent.
        exists = self.grid.exists
        edges = isinstance(self.grid, CircuitGraph)
        places = exists.T.nonzero().flip(0, 1) if edges else exists.nonzero().flip(0)
        self.parts: list[tuple[int, ...]] = [tuple(place) for place in places.tolist()]
        self._names, self._groups = self.grid.names(places), places[:, int(edges)].tolist()
        self._most = settings_at_once(max(map(len, runs.batches)))

    @property
    def circuit(self) -> Circuit:
        return Circuit(self.grid, self.mask).connected(patch=self.runs.patch)

    def run_pass(self, size: int | None, progress: bool) -> None:
        """Test every remaining part, or stop once the circuit has the requested size."""
        self.mask = self.circuit.mask.clone()
        for _, run in self.runs:
            run.start_from(self.mask.clone())
        self.value = self._measure(self.mask[None])[0]
        position, total = 0, len(self.parts)
        with tracked(f"ACDC at {self.threshold:.2g}", total, progress) as step:
            while position < total and (size is None or int(self.mask.sum()) > size):
                done = self._test_next(position, size)
                for _ in range(done):
                    step()
                position += done

    def _test_next(self, start: int, size: int | None) -> int:
        """Test parts of one destination from `start` on; return how many were kept or patched."""
        grid, index = self.grid, self.parts[start]
        if isinstance(grid, CircuitGraph) and not grid.reaches_logits(self.mask, index[1]):
            self.mask[index] = False
        if not self.mask[index]:
            return 1
        ahead = self.ahead if size is None else min(self.ahead, int(self.mask.sum()) - size)
        group = takewhile(
            lambda i: self._groups[i] == self._groups[start], range(start, len(self.parts))
        )
        tested = list(islice((i for i in group if self.mask[self.parts[i]]), ahead))
        masks = self.mask.repeat(len(tested), *[1] * self.mask.ndim)
        for row, i in enumerate(tested):
            # If the last part was kept, close each part alone; otherwise, all before it as well.
            masks[row if self.last_kept else slice(row, None)][..., *self.parts[i]] = False
        assumed = self.last_kept
        for row, (i, value) in enumerate(zip(tested, self._measure(masks), strict=True)):
            change = value - self.value
            kept = (change if self.metric == "kl" else abs(change)) >= self.threshold
            self.mask[self.parts[i]] = self.last_kept = kept
            if not kept:
                self.value = value
            self.history.append((self._names[i], change, kept))
            if kept != assumed:  # the remaining tests assumed another circuit
                self.ahead = max(1, row)
                return i + 1 - start
        self.ahead = min(2 * len(tested), self._most)
        return tested[-1] + 1 - start

    def _measure(self, masks: Bool[Tensor, "test ..."]) -> list[float]:
        """The metric, or the divergence, under each mask, averaged over pairs."""
        totals, count = torch.zeros(len(masks), dtype=torch.float64), 0
        for batch, run in self.runs:
            for row, logits in enumerate(run.logits(masks)):
                values = value_of(self.metric, logits, batch, run)
                totals[row] += values.cpu().double().sum()
            count += len(batch)
        means = (totals / count).tolist()
        if not all(map(math.isfinite, means)):
            raise ValueError(
                f"the metric is not finite under some circuits; the means are {means}. Use a "
                "metric that stays finite, such as a difference of logits"
            )
        return means


# ---- learned edge pruning ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pruning(SearchResult):
    """Result of learned edge pruning: the edges whose gates are most likely open.

    Args:
        history: one row per step: divergence in nats under sampled gates, expected number of open
            gates, noise.
        scores: minus the probability that each edge's gate is open, at the initial noise.
    """

    scores: Scores

    def __repr__(self) -> str:
        return f"Pruning({self._description()}; {len(self.history):,} steps)"


@checked
@in_evaluation_mode
def prune_circuit_edges(
    model: HookedModel,
    pairs: PromptPairs,
    *,
    size: AtLeastOne,
    start: Scores | None = None,
    steps: AtLeastOne = 300,
    learning_rate: Positive = 0.3,
    initial_logit: Logit = 3.0,
    metric: Metric | Literal["kl"] = "kl",
    patch: Patch = "corrupted",
    batch_size: AtLeastOne = 32,
    seed: Seed = 0,
    progress: bool = True,
) -> Pruning:
    """The circuit found by training a gate on every circuit edge, with fewer and fewer gates open.

    As many edges with the best scores often preserve more of the predictions: compare with
    `evaluate`. Other arguments are those of `attribute_circuit_edges`.

    Args:
        pairs: prompt pairs, on whose clean prompts the circuit preserves the predictions.
        size: number of circuit edges to keep.
        start: initial scores, ranked by absolute value; by default, all gates start equal.
        steps: number of optimizer steps, one batch each.
        learning_rate: initial learning rate of Adam on the gate logits.
        initial_logit: initial logit of every gate, or, with scores, of the edge of rank `size`.
        metric: metric whose explained effect is reported; the search itself minimises "kl".
        batch_size: prompt pairs per step.
        seed: random seed for gate noise and batch order.

    Raises:
        ValueError: `size` is out of range, or the scores are of another model.
        NoEffectError: patching everything changes the metric of no pair.
    """
    graph = adapt(model).graph
    check_size(graph, size)
    if start is not None:
        check_grid(graph, start.grid, CircuitGraph)
    runs = PairRuns(model, CircuitEdges(), pairs, patch, batch_size, keep=True)
    runs.check_effect(metric)
    exists, device = graph.exists.to(runs.adapter.device), runs.adapter.device
    logits = torch.full((graph.n_edges,), initial_logit, dtype=torch.float64)
    if start is not None:
        logits = _initial_logits(start.mean()[graph.exists].abs(), size, initial_logit)
    logits = logits.to(device, runs.adapter.gate_dtype)
    optimizer = torch.optim.Adam([logits], lr=learning_rate)
    generator = torch.Generator(device).manual_seed(seed)
    order = _order(len(runs), steps, seed)
    first_share = GATE.open_probability(logits).sum().item() / graph.n_edges
    rows = []
    with autograd(True), tracked("pruning edges", steps, progress) as step:
        for done in range(steps):
            share = _expected_share(first_share, size / graph.n_edges, done / steps)
            expected = share * graph.n_edges
            noise = min(1.0, (1 - done / steps) / (1 - REACHED_AT))
            run = runs.run(order[done])
            shifted = _shifted(logits, expected, noise).requires_grad_()
            gates = torch.zeros(exists.shape, device=device, dtype=logits.dtype)
            gates = gates.masked_scatter(exists, GATE.sample(shifted / noise, generator))
            loss = divergence(run.logits(gates), run.clean_logits).mean()
            if not bool(loss.isfinite()):
                raise ValueError(
                    f"the divergence is {loss.item()} at step {done + 1}: logits or gates are NaN "
                    "or infinite; a smaller learning rate may help"
                )
            (gradient,) = torch.autograd.grad(loss, shifted)
            logits.grad = _at_constant_size(gradient, shifted.detach() / noise)
            optimizer.param_groups[0]["lr"] = learning_rate * noise
            optimizer.step()
            rows.append((done + 1, loss.item(), expected, noise))
            step()
    # As in all scores, negative means helpful. Rank by logits, since probabilities saturate.
    learned = torch.zeros(exists.shape, dtype=torch.float64)
    learned[graph.exists] = -logits.cpu().double()
    kept = Scores(graph, learned, "pruning").top(size, signed=True)
    learned[graph.exists] = -GATE.open_probability(_shifted(logits, size, 1.0)).cpu().double()
    circuit = kept.connected(patch=patch)
    return Pruning(
        circuit=circuit,
        n_kept=len(kept),
        searched=evaluated(runs, metric, [circuit]),
        history=pd.DataFrame(rows, columns=["step", "divergence", "expected", "noise"]),
        scores=Scores(graph, learned, "pruning", prompt_start=pairs.start),
        prompt_start=pairs.start,
    )


def _expected_share(first: float, last: float, progress: float) -> float:
    """The target fraction of open gates at a point of the run; `progress` is from 0 to 1."""
    shares = torch.tensor([first, last], dtype=torch.float64)
    start, end = shares.logit(eps=1e-9).tolist()
    return 1 / (1 + math.exp(-start - (end - start) * min(1.0, progress / REACHED_AT)))


@torch.no_grad()
def _shifted(
    logits: Float[Tensor, " gate"], expected: float, noise: float
) -> Float[Tensor, " gate"]:
    """Logits, shifted by a constant so that the expected number of open gates is `expected`."""
    values = logits.double() / noise
    reach = values.abs().max() + 40  # opens, or shuts, every gate in double precision
    low, high = -reach, reach
    for _ in range(60):
        shift = (low + high) / 2
        too_many = GATE.open_probability(values + shift).sum() > expected
        low, high = torch.where(too_many, low, shift), torch.where(too_many, shift, high)
    return ((values + shift) * noise).to(logits)


def _at_constant_size(
    gradient: Float[Tensor, " gate"], logits: Float[Tensor, " gate"]
) -> Float[Tensor, " gate"]:
    """The gradient for logits at constant expected size, given the gradient for shifted logits.

    With ``w = d size / d logit``, a change d of one logit changes the shift of all logits by
    ``-d w / sum w``.
    """
    probability = GATE.open_probability(logits)
    w = probability * (1 - probability)
    return gradient - gradient.sum() * w / w.sum().clamp(min=torch.finfo(w.dtype).tiny)


def _initial_logits(
    values: Float[Tensor, " gate"], size: int, initial_logit: float
) -> Float[Tensor, " gate"]:
    """Logits that fall with the logarithm of the rank; 0 halfway between `size` and the last."""
    ranks = torch.empty_like(values)
    ranks[values.argsort(descending=True)] = torch.arange(1, len(values) + 1).to(values)
    half = max(math.log(len(values) / size) / 2, 0.5)  # the logarithm is 0 if all edges are kept
    return initial_logit * (1 + (math.log(size) - ranks.log()) / half).double()


def _order(n_batches: int, steps: int, seed: int) -> list[int]:
    """The index of each step's batch: all batches in random order, over and over."""
    generator = torch.Generator().manual_seed(seed)
    rounds = range(math.ceil(steps / n_batches))
    return torch.cat([torch.randperm(n_batches, generator=generator) for _ in rounds]).tolist()
