"""Learned edge pruning: train gates on all circuit edges jointly at a given expected size.

1. Every step samples hard-concrete gates and lowers ``KL(clean || circuit)``. One number is added
   to all logits so that the expected number of open gates is exactly the step's target, and the
   gradient is that at constant expected size.
2. The target goes from the initial size to the requested one, linearly in the log odds of the share
   of open gates.
3. Then noise and learning rate fall linearly towards 0, so that every gate becomes 0 or 1: the last
   steps run the circuit that is returned, or nearly so.
4. The edges that are most likely open are kept, those without effect are dropped, and the circuit
   is run.

The search can start from scores: logits then fall with the logarithm of an edge's rank, from
``initial_logit`` at the requested size to its negative at the last edge.

Reference: Bhaskar et al., arXiv 2406.16778; from attribution scores: Mondorf et al.,
arXiv 2510.06811. Both reach the target with a Lagrange multiplier instead.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, Logit, Positive, Seed, checked
from sparse_tl.circuits.attribution import attribute_circuit_edges
from sparse_tl.circuits.faithfulness import FaithfulnessRuns
from sparse_tl.circuits.outcomes import Pruning
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.circuits.scores import Scores
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import CircuitEdges, HardConcreteGate, Patch, expected_size
from sparse_tl.lens import HookedModel, adapt, in_evaluation_mode
from sparse_tl.metrics import Metric, divergence, log_probability
from sparse_tl.progress import tracked
from sparse_tl.scopes import autograd

REACHED_AT = 0.6
"""Share of the run after which the target is the requested size, and noise begins to fall."""
GATE = HardConcreteGate()


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
    """Train a gate on every circuit edge, with fewer and fewer open, down to the requested number.

    The result says how faithful the circuit is, from a run of it as returned. Warns if less than
    nine tenths of the edges that were kept have an effect, or if attribution's best edges preserve
    more; see `Pruning`.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs; the circuit must preserve the clean predictions.
        size: number of circuit edges to keep.
        start: scores to start from, ranked by absolute value; by default all gates start equal.
        steps: number of optimizer steps, one batch each.
        learning_rate: initial learning rate of Adam on the gate logits.
        initial_logit: initial logit of every gate, or of the scores' edge of rank `size`.
        metric: metric whose explained effect is reported; the search itself minimises "kl".
        patch: patch at closed edges, as in `PairRuns`.
        batch_size: prompt pairs per step.
        held_out: further prompt pairs to run the circuit on; the search does not use them.
        seed: random seed for gate noise and batch order.
        progress: whether to show a progress bar.

    Raises:
        ValueError: `size` or another setting is out of range, or the scores are of another model.
        NoEffectError: patching everything changes the predictions of no pair.
    """
    import pandas as pd

    graph = adapt(model).graph
    if size > graph.n_edges:
        raise ValueError(f"expected a size in 1..{graph.n_edges}; got {size}")
    if start is not None and start.site != graph:
        raise ValueError(f"expected scores of {graph!r} to start from; got {start!r}")
    runs = PairRuns(model, CircuitEdges(), pairs, patch, batch_size, keep=True)
    runs.check_effect("kl")
    report = FaithfulnessRuns(runs, metric, held_out)
    ranked, _ = report.of((start or _attributed(runs, pairs)).top(size).connected(patch=patch).mask)
    exists, device = graph.exists.to(runs.adapter.device), runs.adapter.device
    logits = torch.full(exists.shape, initial_logit, dtype=torch.float64)
    if start is not None:
        logits = _initial_logits(start, size, initial_logit)
    logits = logits.to(device, runs.adapter.gate_dtype)[exists]
    optimizer = torch.optim.Adam([logits], lr=learning_rate)
    generator = torch.Generator(device).manual_seed(seed)
    order = _order(len(runs), steps, seed)
    first_share = expected_size(GATE, logits).item() / graph.n_edges
    rows = []
    with tracked("pruning edges", steps, progress) as step:
        for done in range(steps):
            share = _expected_share(first_share, size / graph.n_edges, done / steps)
            expected = share * graph.n_edges
            noise = min(1.0, (1 - done / steps) / (1 - REACHED_AT))
            run = runs.run(order[done])
            shifted = _shifted(logits, expected, noise).requires_grad_()
            gates = torch.zeros(exists.shape, device=device, dtype=logits.dtype)
            gates = gates.masked_scatter(exists, GATE.sample(shifted / noise, generator))
            lost = divergence(run.logits(gates), run.clean_logits).mean()
            if not bool(lost.isfinite()):
                raise ValueError(
                    f"expected a finite divergence; at step {done + 1} it is {lost.item()}. "
                    "Logits or gates are NaN or infinite: a smaller learning rate may help."
                )
            (slope,) = torch.autograd.grad(lost, shifted)
            logits.grad = _at_constant_size(slope, shifted.detach() / noise)
            optimizer.param_groups[0]["lr"] = learning_rate * noise
            optimizer.step()
            rows.append(
                {
                    "step": done + 1,
                    "divergence": lost.item(),
                    "expected": expected,
                    "noise": noise,
                }
            )
            step()
    # As for all scores, negative means helpful. Ranked by logits because probabilities saturate.
    learned = torch.zeros(exists.shape, dtype=torch.float64)
    learned[graph.exists] = -logits.cpu().double()
    kept = Scores(graph, learned, "pruning").top(size, signed=True)
    learned[graph.exists] = -GATE.open_probability(_shifted(logits, size, 1.0)).cpu().double()
    circuit = kept.connected(patch=patch)
    searched, others = report.of(circuit.mask)
    found = Pruning(
        circuit=circuit,
        n_kept=len(kept),
        searched=searched,
        held_out=others,
        ranked=ranked,
        history=pd.DataFrame(rows),
        scores=Scores(graph, learned, "pruning", pairs.start),
    )
    for note in found.notes():
        warnings.warn(note, stacklevel=2)
    return found


def _attributed(runs: PairRuns, pairs: PromptPairs) -> Scores:
    """EAP-IG scores by the log probability of what the model predicts."""
    predicted = torch.cat([run.clean_logits.argmax(dim=-1) for _, run in runs])[:, None]
    return attribute_circuit_edges(
        runs.model,
        replace(pairs, answers=predicted.to(pairs.answers)),
        log_probability,
        patch=runs.patch,
        batch_size=runs.batch_size,
        progress=False,
    )


def _expected_share(first: float, last: float, progress: float) -> float:
    """The expected share of open gates after this share of the run."""
    start, end = (math.log(share / (1 - share)) for share in (_inside(first), _inside(last)))
    return 1 / (1 + math.exp(-start - (end - start) * min(1.0, progress / REACHED_AT)))


def _inside(share: float) -> float:
    return min(max(share, 1e-9), 1 - 1e-9)


@autograd(False)
def _shifted(
    logits: Float[Tensor, " gate"], expected: float, noise: float
) -> Float[Tensor, " gate"]:
    """Logits, shifted by one number to give the expected number of open gates under the noise."""
    values = logits.double() / noise
    reach = values.abs().max() + 40  # all gates are open, or shut, to the last digit
    low, high = -reach, reach
    for _ in range(60):
        shift = (low + high) / 2
        too_many = expected_size(GATE, values + shift) > expected
        low, high = torch.where(too_many, low, shift), torch.where(too_many, shift, high)
    return ((values + shift) * noise).to(logits)


def _at_constant_size(
    slope: Float[Tensor, " gate"], logits: Float[Tensor, " gate"]
) -> Float[Tensor, " gate"]:
    """The gradient by logits at constant expected size, from the gradient by shifted logits.

    With ``w = d size / d logit``, changing a logit by d changes the shift of all by
    ``-d w / sum w``.
    """
    opened = GATE.open_probability(logits)
    weight = opened * (1 - opened)
    return slope - slope.sum() * weight / weight.sum().clamp(min=torch.finfo(weight.dtype).tiny)


def _initial_logits(
    scores: Scores, size: int, initial_logit: float
) -> Float[Tensor, "source destination"]:
    """Logits that fall with the logarithm of the rank; 0 halfway between `size` and the last."""
    exists = scores.site.exists
    values = scores.mean()[exists].abs()
    ranks = torch.empty_like(values)
    ranks[values.argsort(descending=True)] = torch.arange(1, len(values) + 1).to(values)
    half = max(math.log(len(values) / size) / 2, 0.5)  # 0 where all edges are asked for
    logits = torch.zeros(exists.shape, dtype=torch.float64)
    logits[exists] = initial_logit * (1 + (math.log(size) - ranks.log()) / half)
    return logits


def _order(n_batches: int, steps: int, seed: int) -> list[int]:
    """The batch of each step: all batches in shuffled order, repeatedly."""
    generator = torch.Generator().manual_seed(seed)
    rounds = math.ceil(steps / n_batches)
    return [
        batch
        for _ in range(rounds)
        for batch in torch.randperm(n_batches, generator=generator).tolist()
    ]
