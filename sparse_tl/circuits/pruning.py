"""Learned edge pruning: train gates on all circuit edges jointly towards a target size.

    min_gates max_lambda  KL(clean || circuit) + lambda log((1 + E) / (1 + target))

with hard-concrete gates and E their expected number. The target decreases from all edges to the
requested size, linearly in the logarithm; lambda grows while E exceeds it. Finally, the edges whose
gates are most likely open are kept.

The search can start from scores: logits then fall with the logarithm of an edge's rank, from
``initial_logit`` at the requested size to its negative at the last edge.

Reference: Bhaskar et al., arXiv 2406.16778; from attribution scores: Mondorf et al.,
arXiv 2510.06811. Penalising the logarithm of the size, instead of the
share of edges, keeps the slope constant as the circuit shrinks.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, Logit, Positive, Seed, checked
from sparse_tl.circuits.outcomes import Pruning
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.circuits.scores import Scores
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import (
    CircuitEdges,
    GateMode,
    HardConcreteGate,
    LearnedGates,
    Patch,
    expected_size,
)
from sparse_tl.lens import HookedModel, adapt, in_evaluation_mode
from sparse_tl.metrics import divergence
from sparse_tl.progress import tracked
from sparse_tl.training import LossConstraint

REACHED_AT = 0.6
"""Share of the run after which the target is the requested size."""
FULL_VIOLATION = 0.1
"""Excess of the log size at which lambda moves at its full rate."""
BOUNDS = (0.005, 20_000.0)
"""Of lambda."""


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
    lambda_: Positive = 0.01,
    lambda_rate: Positive = 0.1,
    initial_logit: Logit = 3.0,
    patch: Patch = "corrupted",
    batch_size: AtLeastOne = 32,
    seed: Seed = 0,
    progress: bool = True,
) -> Pruning:
    """Train a gate on every circuit edge until the requested number is open.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs; the circuit must preserve the clean predictions.
        size: number of circuit edges to keep.
        start: scores to start from, ranked by absolute value; by default all gates are alike.
        steps: number of optimizer steps, one batch each.
        learning_rate: learning rate of Adam on the gate logits.
        lambda_: initial lambda, in nats.
        lambda_rate: change of log lambda per step while the size is off target.
        initial_logit: initial logit of every gate, or of the scores' edge of rank `size`.
        patch: patch at closed edges, as in `PairRuns`.
        batch_size: prompt pairs per step.
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
    distribution = HardConcreteGate()
    gates = LearnedGates(
        model, CircuitEdges(), distribution=distribution, initial_logit=initial_logit
    )
    if start is not None:
        gates.logits.data.copy_(_initial_logits(start, size, initial_logit))
    exists = graph.exists.to(gates.logits.device)
    optimizer = torch.optim.Adam([gates.logits], lr=learning_rate)
    constraint = LossConstraint(start=lambda_, integral=lambda_rate, bounds=BOUNDS)
    generator = torch.Generator(exists.device).manual_seed(seed)
    order = _order(len(runs), steps, seed)
    first_size = expected_size(distribution, gates.logits[exists]).item()
    rows = []
    with tracked("pruning edges", steps, progress) as step:
        for done in range(steps):
            run = runs.run(order[done])
            target = _target(first_size, size, done / steps)
            clean = run.clean_logits
            lost = divergence(run.logits(gates(GateMode.SAMPLED, generator)), clean).mean()
            if not bool(lost.isfinite()):
                raise ValueError(
                    f"expected a finite divergence; at step {done + 1} it is {lost.item()}. "
                    "Logits or gates are NaN or infinite: a smaller learning rate may help."
                )
            expected = expected_size(distribution, gates.logits[exists])
            excess = torch.log1p(expected) - math.log1p(target)
            optimizer.zero_grad()
            (lambda_now,) = constraint.lambda_.to(excess)
            (gates.logits.grad,) = torch.autograd.grad(
                lost + lambda_now * excess.clamp(min=0), gates.logits
            )
            optimizer.step()
            rows.append(
                {
                    "step": done + 1,
                    "divergence": lost.item(),
                    "expected": expected.item(),
                    "target": target,
                    "lambda": lambda_now.item(),
                }
            )
            constraint.update(excess[None] / FULL_VIOLATION)
            step()
    # As for all scores, negative means helpful. Ranked by logits because probabilities saturate.
    learned = gates.logits.detach().cpu().double().where(graph.exists, 0.0)
    kept = Scores(graph, -learned, "pruning").top(size, signed=True)
    open_now = -distribution.open_probability(learned).where(graph.exists, 0.0)
    scores = Scores(graph, open_now, "pruning", pairs.start)
    return Pruning(kept, scores, pd.DataFrame(rows))


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


def _target(first: float, size: int, progress: float) -> float:
    """The target size: from the first to the requested one, linear in the logarithm."""
    return first * (size / first) ** min(1.0, progress / REACHED_AT)


def _order(n_batches: int, steps: int, seed: int) -> list[int]:
    """The batch of each step: all batches in shuffled order, repeatedly."""
    generator = torch.Generator().manual_seed(seed)
    rounds = math.ceil(steps / n_batches)
    return [
        batch
        for _ in range(rounds)
        for batch in torch.randperm(n_batches, generator=generator).tolist()
    ]
