"""How many circuit edges a single prompt needs, as opposed to all prompts of a task together.

A circuit for many prompts contains the edges that each of them needs. Here every prompt pair has
circuits of its own, of the edges that score best on that pair, evaluated on that pair:

    e(C) = (m(C) - m(none)) / (m(clean) - m(none)).

The size of a pair is the size from which e is at or above a level, as in `EffectCurve.size_at`.

1. Score the edges for each pair, in the same passes as for a mean over pairs.
2. For each pair, run its circuits of all sizes as one stack of gates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.calls.arguments import AtLeastOne, Share, checked
from sparse_tl.calls.scopes import autograd
from sparse_tl.circuits.effect import EffectCurve
from sparse_tl.circuits.evaluation import log_sizes
from sparse_tl.circuits.methods.attribution import attribute_circuit_edges
from sparse_tl.circuits.methods.gradient_passes import Method
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.circuits.scores import Scores
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import CircuitEdges, GatedRun, Patch
from sparse_tl.lens import HookedModel, in_evaluation_mode
from sparse_tl.metrics import Metric, NoEffectError, explained_effect, measure
from sparse_tl.progress import tracked
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd


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
    draws from all pairs.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs; each pair has its own scores and circuits.
        metric: metric function with one value per pair.
        level: explained effect, above 0 and at most 1.
        method: attribution method, as in `attribute_circuit_edges`.
        steps: number of interpolation steps.
        sizes: numbers of top-ranked edges to evaluate; `log_sizes` of all edges by default.
        patch: patch of everything outside a circuit, as in `PatchedPairs`.
        batch_size: prompt pairs per attribution pass, and circuits per evaluation pass.
        progress: whether to show a progress bar.

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
        raise ValueError("expected at least one size; got none")
    needed = []
    runs = PairRuns(model, CircuitEdges(), pairs, patch, batch_size=1)
    with autograd(False), tracked("circuits of single prompts", len(pairs), progress) as step:
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
