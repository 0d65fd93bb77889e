"""Evaluate circuits: the metric under circuits, and their explained effect by size.

The explained effect of a circuit C, also called its faithfulness, is

    (m(C) - m(none)) / (m(clean) - m(none)),

where each m is a mean over pairs, and *none* patches everything: with corrupted patches, it is the
corrupted run. Under a circuit of edges, all other circuit edges are patched. Under a circuit of
heads, the outputs of all other heads are patched (at ``hook_z``), and MLPs are recomputed.

What a search measures along the way is different: sampled gates, a single batch, or a circuit with
edges that have no effect. So a search reports the `Faithfulness` of a run of the circuit that it
returns, with everything in it kept and everything else patched (`FaithfulnessRuns`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from sparse_tl.backend import HookedModel, adapt, in_evaluation_mode
from sparse_tl.calls.arguments import AtLeastOne, checked
from sparse_tl.circuits.circuit import Circuit, check_grid
from sparse_tl.circuits.effect import Evaluation
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.circuits.scores import Scores
from sparse_tl.data import Positions, PromptPairs
from sparse_tl.gates import CircuitEdges, Heads, Patch
from sparse_tl.graph import CircuitGraph, HeadGrid, PositionedGraph
from sparse_tl.metrics import Metric, NoEffectError, divergence, explained_effect, measure
from sparse_tl.progress import tracked
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd


@checked
@in_evaluation_mode
def evaluate(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    circuits: Circuit | Sequence[Circuit],
    *,
    patch: Patch = "corrupted",
    batch_size: AtLeastOne = 32,
    progress: bool = True,
) -> Evaluation:
    """The metric under each circuit, with everything else patched; one forward pass per circuit.

    Other arguments are those of `attribute_circuit_edges`.

    Args:
        circuits: one circuit or several, of edges, of edges by position, or of heads. Their spans
            must be those of `pairs`.

    Raises:
        ValueError: no circuit is given, a circuit belongs to another model, the pairs lack its
            positions, the patch is unknown, or the metric is not one finite number per pair.
    """
    graph = adapt(model).graph
    listed = [circuits] if isinstance(circuits, Circuit) else list(circuits)
    if not listed or len({circuit.grid for circuit in listed}) > 1:
        raise ValueError(
            "give one circuit or more, all of edges (at the same positions) or all of heads"
        )
    grid = listed[0].grid
    check_grid(graph, grid, CircuitGraph, PositionedGraph, HeadGrid)
    positions = positions_of(grid, pairs) if isinstance(grid, PositionedGraph) else None
    site = Heads() if grid == graph.heads else CircuitEdges()
    runs = PairRuns(model, site, pairs, patch, batch_size, positions=positions)
    by_batch: list[tuple[Tensor, ...]] = []
    with torch.no_grad(), tracked("evaluating", len(listed) * len(runs), progress) as step:
        for batch, run in runs:
            clean = measure(metric, run.clean_logits, batch)
            values = [clean, measure(metric, runs.everything_patched(run), batch)]
            for circuit in listed:
                values.append(measure(metric, run.logits(circuit.mask), batch))
                step()
            by_batch.append(tuple(value.cpu().double() for value in values))
    clean, none, *values = map(torch.cat, zip(*by_batch, strict=True))
    sizes = tuple(map(len, listed))
    return Evaluation(sizes, grid.n_parts, torch.stack(values), clean, none, pairs.start)


def positions_of(grid: PositionedGraph, pairs: PromptPairs) -> Positions:
    """The kind of a circuit's positions, which must be those of the pairs: tokens or spans."""
    positions = "tokens" if grid.of_tokens else "spans"
    names = pairs.spans_of(positions).names
    if names != grid.positions:
        raise ValueError(
            f"the positions of the circuit are {grid.positions}, and those of the pairs {names}"
        )
    return positions


@checked
def evaluate_circuit_edges(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    scores: Scores,
    sizes: Sequence[int] | None = None,
    *,
    signed: bool = False,
    **options: Any,
) -> Evaluation:
    """The explained effect (faithfulness) of circuits of the best-scored edges, by size.

    Edges without effect (`Circuit.connected`) are dropped; sizes that differ by such edges alone
    are evaluated once.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs, ideally not the ones that were scored.
        metric: metric function with one value per pair.
        scores: scores that rank the edges.
        sizes: numbers of top-ranked edges to evaluate; `log_sizes` of all edges by default.
        signed: rank by how much an edge helps instead of by absolute score.
        **options: further arguments of `evaluate`.
    """
    sizes = log_sizes(scores.grid.n_parts) if sizes is None else sizes
    patch = options.get("patch", "corrupted")
    connected = (scores.top(size, signed=signed).connected(patch=patch) for size in sorted(sizes))
    circuits = {len(circuit): circuit for circuit in connected}
    return evaluate(model, pairs, metric, list(circuits.values()), **options)


@checked
def evaluate_heads(
    model: HookedModel,
    pairs: PromptPairs,
    metric: Metric,
    scores: Scores,
    sizes: Sequence[int] | None = None,
    **options: Any,
) -> Evaluation:
    """The explained effect (faithfulness) of circuits of the best-scored heads, by size.

    The arguments are those of `evaluate_circuit_edges`, without `signed`. By default, `sizes` are
    all sizes up to 32 heads, and eight per doubling beyond.

    Raises:
        ValueError: the scores are not of heads, or as in `evaluate`.
    """
    check_grid(adapt(model).graph, scores.grid, HeadGrid)
    if sizes is None:
        sizes = log_sizes(scores.grid.n_parts, per_doubling=8, all_up_to=32)
    return evaluate(model, pairs, metric, [scores.top(size) for size in sizes], **options)


def log_sizes(total: int, *, per_doubling: int = 2, all_up_to: int = 0) -> tuple[int, ...]:
    """0, `total`, and logarithmically spaced sizes between them.

    Args:
        total: the largest size.
        per_doubling: number of sizes per doubling.
        all_up_to: size up to which every size is included.
    """
    steps = math.ceil(math.log2(total) * per_doubling) if total > 1 else 0
    between = {round(2 ** (step / per_doubling)) for step in range(steps)}
    between.update(range(all_up_to + 1))
    return tuple(sorted({0, total} | {size for size in between if size < total}))


@dataclass(frozen=True)
class Faithfulness(Result):
    """How much of a model's predictions a circuit preserves, as means over prompt pairs.

    Args:
        divergence: ``KL(model || circuit)`` of the next-token distributions, in nats.
        explained_effect: explained effect on the metric of the search; for "kl",
            ``1 - KL(model || circuit) / KL(model || everything patched)``. NaN if patching
            everything does not change the metric.
        n_pairs: number of prompt pairs.
    """

    finite = False
    divergence: float
    explained_effect: float
    n_pairs: int

    def __str__(self) -> str:
        # A divergence below 1e-6 nats is rounding error. Adding 0 turns -0 into 0.
        nats, effect = round(self.divergence, 6) + 0, round(self.explained_effect, 3) + 0
        return f"{nats:.3g} nats, explained effect {effect:.3f}, on {self.n_pairs:,} pairs"


@dataclass(frozen=True, eq=False)
class SearchResult(Result):
    """The circuit that a search returns, its faithfulness, and the history of the search."""

    circuit: Circuit
    n_kept: int
    searched: Faithfulness
    held_out: Faithfulness | None
    history: pd.DataFrame

    def to_pandas(self) -> pd.DataFrame:
        """The search history."""
        return self.history

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>" + self.circuit._repr_html_()

    def _description(self) -> str:
        """The circuit and its faithfulness as text."""
        dropped = self.n_kept - len(self.circuit)
        kept = f", {self.n_kept:,} with those without effect" if dropped else ""
        held_out = f"; held out: {self.held_out}" if self.held_out else ""
        return f"{self.circuit!r}{kept}; {self.searched}{held_out}"


class FaithfulnessRuns:
    """Runs of circuits on the pairs of a search, and on held-out pairs if there are any.

    All pairs are first run with everything patched, so that pairs that cannot be measured raise an
    error before the search, not after it.
    """

    def __init__(
        self, runs: PairRuns, metric: Metric | Literal["kl"], held_out: PromptPairs | None
    ) -> None:
        self._metric, self._runs = metric, [runs]
        if held_out is not None:
            others = PairRuns(runs.model, runs.site, held_out, runs.patch, runs.batch_size)
            self._runs.append(others)
        self.of(torch.zeros(runs.site.shape(runs.adapter), dtype=torch.bool))

    def of(self, mask: Bool[Tensor, "*axes"]) -> tuple[Faithfulness, Faithfulness | None]:
        """The faithfulness of a circuit on the pairs of the search, and on the held-out ones."""
        searched, *others = (self._on(runs, mask) for runs in self._runs)
        return searched, others[0] if others else None

    @torch.no_grad()
    def _on(self, runs: PairRuns, mask: Bool[Tensor, "*axes"]) -> Faithfulness:
        measured = []
        for batch, run in runs:
            clean, circuit = run.clean_logits, run.logits(mask)
            logits = circuit, clean, runs.everything_patched(run)
            nats = divergence(circuit, clean)
            if isinstance(self._metric, str):
                values = [-divergence(each, clean) for each in logits]
            else:
                values = [measure(self._metric, each, batch) for each in logits]
            measured.append(torch.stack([nats, *values]).cpu().double())
        nats, *values = torch.cat(measured, dim=1)
        try:
            effect = explained_effect(*values).item()
        except NoEffectError:
            effect = math.nan
        return Faithfulness(nats.mean().item(), effect, len(nats))
