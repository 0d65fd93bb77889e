"""Learned edge pruning: train a gate on every circuit edge, at a given expected number of edges.

1. Each step samples hard-concrete gates and lowers ``KL(clean || circuit)``. A number added to all
   logits makes the expected number of open gates equal to the target of the step; the gradient is
   taken at this constant expected number.
2. The target moves from the initial to the requested number of edges, linearly in the log odds of
   the share of open gates.
3. Then noise and learning rate fall linearly towards 0, so that every gate becomes 0 or 1 and the
   last steps run almost exactly the circuit that is returned.
4. The edges that are most likely open are kept, edges without effect are dropped, and the circuit
   is run.

The search can start from scores. The initial logits then fall with the logarithm of an edge's rank,
from ``initial_logit`` at the requested number of edges to its negative at the last edge.

Reference: Bhaskar et al., arXiv 2406.16778; from attribution scores: Mondorf et al.,
arXiv 2510.06811. Both reach the target with a Lagrange multiplier instead.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.backend import HookedModel, adapt, in_evaluation_mode
from sparse_tl.calls.arguments import AtLeastOne, Logit, Positive, Seed, checked
from sparse_tl.calls.autograd import autograd
from sparse_tl.circuits.circuit import Scores, check_grid
from sparse_tl.circuits.evaluation import Faithfulness, FaithfulnessRuns, SearchResult
from sparse_tl.circuits.methods.attribution import attribute_circuit_edges
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.data.pairs import NO_TOKEN, PromptPairs
from sparse_tl.gates import CircuitEdges, HardConcreteGate, Patch
from sparse_tl.graph import CircuitGraph
from sparse_tl.metrics import Metric, divergence, log_probability
from sparse_tl.progress import tracked

REACHED_AT = 0.6
"""Share of the run after which the target is the requested size and the noise begins to fall."""
GATE = HardConcreteGate()
ON_PATHS = 0.9
"""Minimum share of the kept edges that must have an effect, below which pruning warns."""


@dataclass(frozen=True, eq=False)
class Pruning(SearchResult):
    """Result of learned edge pruning: the edges whose gates are most likely open.

    Args:
        history: one row per step: divergence in nats under sampled gates, expected number of open
            gates, noise.
        ranked: faithfulness, on the pairs of the search, of the `n_kept` best edges by the initial
            scores, or by EAP-IG if none were given.
        scores: minus the probability that each edge's gate is open, at the initial noise.
    """

    ranked: Faithfulness
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
    held_out: PromptPairs | None = None,
    seed: Seed = 0,
    progress: bool = True,
) -> Pruning:
    """The circuit found by training a gate on every circuit edge, with fewer and fewer gates open.

    The faithfulness in the result is that of the returned circuit, measured by running it. Warns if
    less than nine tenths of the kept edges have an effect, or if the best edges by attribution
    preserve more of the predictions. Other arguments are those of `attribute_circuit_edges`.

    Args:
        pairs: prompt pairs, on whose clean prompts the circuit preserves the predictions.
        size: number of circuit edges to keep.
        start: initial scores, ranked by absolute value; by default, all gates start equal.
        steps: number of optimizer steps, one batch each.
        learning_rate: initial learning rate of Adam on the gate logits.
        initial_logit: initial logit of every gate, or, with scores, of the edge of rank `size`.
        metric: metric whose explained effect is reported; the search itself minimises "kl".
        batch_size: prompt pairs per step.
        held_out: further prompt pairs to run the circuit on; the search does not use them.
        seed: random seed for gate noise and batch order.

    Raises:
        ValueError: `size` is out of range, or the scores are of another model.
        NoEffectError: patching everything changes the predictions of no pair.
    """
    import pandas as pd

    graph = adapt(model).graph
    if size > graph.n_edges:
        raise ValueError(f"the size must be in 1..{graph.n_edges}; it is {size}")
    if start is not None:
        check_grid(graph, start.grid, CircuitGraph)
    runs = PairRuns(model, CircuitEdges(), pairs, patch, batch_size, keep=True)
    runs.check_effect("kl")
    report = FaithfulnessRuns(runs, metric, held_out)
    best = (start or _eap_ig_scores(runs, pairs)).top(size).connected(patch=patch)
    ranked, _ = report.of(best.mask)
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
    searched, on_held_out = report.of(circuit.mask)
    if len(circuit) < ON_PATHS * len(kept):
        warnings.warn(
            f"{len(circuit):,} of the {len(kept):,} edges that were kept have an effect; the "
            "others are on no path and were dropped. Try more steps or another size.",
            stacklevel=2,
        )
    if ranked.divergence < searched.divergence - 1e-6:
        warnings.warn(
            f"The circuit diverges by {searched.divergence:.3g} nats; the {len(kept):,} best edges "
            f"by attribution diverge by {round(ranked.divergence, 6) + 0:.3g}. Use those edges, "
            "start=scores, more steps, or find_circuit.",
            stacklevel=2,
        )
    return Pruning(
        circuit=circuit,
        n_kept=len(kept),
        searched=searched,
        held_out=on_held_out,
        ranked=ranked,
        history=pd.DataFrame(rows, columns=["step", "divergence", "expected", "noise"]),
        scores=Scores(graph, learned, "pruning", pairs.start),
    )


def _eap_ig_scores(runs: PairRuns, pairs: PromptPairs) -> Scores:
    """EAP-IG scores for the log-probability of the model's predictions."""
    predicted = torch.cat([run.clean_logits.argmax(dim=-1) for _, run in runs])[:, None]
    answers = predicted.to(pairs.answers)
    return attribute_circuit_edges(
        runs.model,
        replace(pairs, answers=answers, wrong=torch.full_like(answers, NO_TOKEN)),
        log_probability,
        patch=runs.patch,
        batch_size=runs.batch_size,
        progress=False,
    )


def _expected_share(first: float, last: float, progress: float) -> float:
    """The target share of open gates at a point of the run; `progress` is from 0 to 1."""
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
