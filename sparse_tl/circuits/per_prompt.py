"""How many circuit edges a single prompt needs, compared with all prompts of a task together.

A circuit that serves many prompts contains the edges of each of them. Here every prompt pair gets
its own scores and circuits: the best-scored edges for that pair, evaluated on that pair,

    e(C) = (m(C) - m(none)) / (m(clean) - m(none)).

The pair's size is where e reaches a level and stays there, as in `EffectCurve.size_at`.

1. Score the edges per pair, in the same passes that a mean over pairs takes.
2. For each pair, run its circuits of growing size as one stack of gates in one forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, Share, checked
from sparse_tl.circuits.attribution import attribute_circuit_edges
from sparse_tl.circuits.effect import EffectCurve
from sparse_tl.circuits.evaluation import log_sizes
from sparse_tl.circuits.gradient_passes import Method
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.circuits.scores import Scores
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import CircuitEdges, GatedRun, Patch
from sparse_tl.lens import HookedModel, in_evaluation_mode
from sparse_tl.metrics import Metric, NoEffectError, explained_effect, measure
from sparse_tl.progress import tracked
from sparse_tl.results import Result
from sparse_tl.scopes import autograd

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class CircuitSizes(Result):
    """How many circuit edges each prompt pair needs on its own.

    Args:
        sizes: size for each pair, in general fractional; infinite if the level is not reached, NaN
            if the corruption does not change the pair's metric.
        level: explained effect that is to be reached.
        total: number of circuit edges in the model.
        prompt_start: text that every prompt started with, such as BOS; ``None`` if not known.
    """

    sizes: Float[Tensor, " pair"]
    level: float
    total: int
    prompt_start: str | None = None

    @property
    def median(self) -> float | None:
        """Median size over the pairs with an effect to explain; ``None`` if there is none, or if
        half of them miss the level: such pairs count as larger than all others."""
        found = self.sizes[~self.sizes.isnan()]
        middle = found.quantile(0.5, interpolation="midpoint").item() if len(found) else math.inf
        return middle if math.isfinite(middle) else None

    @property
    def not_reached(self) -> int:
        """Number of pairs that reach the level with no measured circuit."""
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
        middle = "none" if self.median is None else f"{self.median:,.1f}"
        return (
            f"CircuitSizes({len(self.sizes)} pairs, {self.level} of the effect of each: median "
            f"{middle} of {self.total:,} circuit edges; {self.not_reached} not reached, "
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
    """How many circuit edges each prompt pair needs, scored on that pair alone.

    Equal to `attribute_circuit_edges` and `evaluate_circuit_edges` on each pair alone for the
    patches "corrupted" and "zero"; patches "mean" and "resample" average or draw over all pairs.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs; each pair has its own scores and circuits.
        metric: metric function with one value per pair.
        level: explained effect, above 0 and at most 1.
        method: attribution method, as in `attribute_circuit_edges`.
        steps: number of interpolation steps.
        sizes: numbers of top-ranked edges to evaluate; `log_sizes` of all edges by default.
        patch: patch at everything outside a circuit, as in `PairRuns`.
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
    graph = scores.site
    asked = sorted(log_sizes(graph.n_parts) if sizes is None else sizes)
    if not asked:
        raise ValueError("expected at least one size; got none")
    found = []
    runs = PairRuns(model, CircuitEdges(), pairs, patch, batch_size=1)
    with autograd(False), tracked("circuits of single prompts", len(pairs), progress) as step:
        for values, (pair, run) in zip(scores.values, runs, strict=True):
            own = Scores(graph, values, scores.method)
            joined = (own.top(size).connected(patch=patch) for size in asked)
            circuits = {len(circuit): circuit.mask for circuit in joined}
            found.append(_size(circuits, pair, run, metric, level, batch_size))
            step()
    needed = torch.tensor(found, dtype=torch.float64)
    return CircuitSizes(needed, level, graph.n_parts, pairs.start)


def _size(
    circuits: Mapping[int, Bool[Tensor, "source destination"]],
    pair: PromptPairs,
    run: GatedRun,
    metric: Metric,
    level: float,
    rows: int,
) -> float:
    """The size at which circuits, keyed by it, reach the level; `rows` of them in one pass."""
    clean = measure(metric, run.clean_logits, pair).cpu().double()
    masks = torch.stack([torch.zeros_like(next(iter(circuits.values()))), *circuits.values()])
    logits = torch.cat([run.logits(some) for some in masks.split(rows)])
    none, *values = [measure(metric, row, pair).cpu().double() for row in logits]
    try:
        effect = explained_effect(torch.stack(values), clean, none).tolist()
    except NoEffectError:
        return math.nan
    size = EffectCurve("one pair", tuple(circuits), effect, effect, effect).size_at(level)
    return math.inf if size is None else size
