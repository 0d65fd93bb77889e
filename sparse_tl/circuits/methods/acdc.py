"""ACDC: from the output backwards, permanently patch every edge that hardly changes the metric.

1. Test parts in a fixed order, from late to early: edges into the logits, then layer by layer, and
   at each destination the latest source first.
2. Patch the part. If the metric changes by less than the threshold, keep it patched.
3. Drop edges into nodes without a kept outgoing edge, untested.

A test runs only the layers from the tested part on, since earlier layers do not change. Further
parts of the same destination are tested in the same pass, on the assumption that each test has the
outcome of the one before. Tests whose assumption turns out wrong are repeated, so the result equals
that of sequential testing.

With a target size, the threshold doubles after each pass until at most that many parts are left.
Edges that lose their effect on the way are dropped as well, so the result can be smaller.

Reference: Conmy et al., arXiv 2304.14997, algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from sparse_tl.backend import HookedModel, adapt, in_evaluation_mode
from sparse_tl.calls.arguments import AtLeastOne, Count, Positive, checked
from sparse_tl.circuits.circuit import Circuit, check_grid, reaches_logits
from sparse_tl.circuits.evaluation import FaithfulnessRuns, SearchResult
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import CircuitEdges, Heads, Patch
from sparse_tl.graph import CircuitGraph, HeadGrid
from sparse_tl.metrics import Metric, divergence, measure
from sparse_tl.progress import tracked

ROWS = 256
"""Maximum number of tests times prompts in one forward pass."""


@dataclass(frozen=True, eq=False)
class Acdc(SearchResult):
    """Result of ACDC.

    Args:
        history: one row per test: the part, the change of the metric, whether the part was kept.
        threshold: threshold of the last pass.
        value: metric under the circuit, or divergence in nats.
        tested: number of parts that were tested.
        forward_equivalents: cost of the tests in forward passes: layers run, divided by the layers
            of the model. The unembedding of one position is not counted.
        prompt_start: text that every prompt started with, such as BOS; ``None`` if not known.
    """

    threshold: float
    value: float
    tested: int
    forward_equivalents: float
    prompt_start: str | None = None

    def __repr__(self) -> str:
        return (
            f"Acdc({self._description()}; threshold {self.threshold:.3g}; {self.tested:,} tests at "
            f"the cost of {self.forward_equivalents:,.1f} forward passes)"
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
    held_out: PromptPairs | None = None,
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
        held_out: further prompt pairs to run the circuit on; the search does not use them.

    Raises:
        ValueError: neither threshold nor size is given, one is out of range, or the circuit belongs
            to another model.
        NoEffectError: patching everything changes the metric of no pair.
    """
    import pandas as pd

    graph = adapt(model).graph
    if isinstance(start, str):
        grid = graph.heads if start == "heads" else graph
        start = Circuit(grid, grid.exists)
    check_grid(graph, start.grid, CircuitGraph, HeadGrid)
    if threshold is None and size is None:
        raise ValueError("give a threshold above 0, or a size")
    if size is not None and size > len(start):
        raise ValueError(
            f"the size must be in 0..{len(start)}, the size of the initial circuit; it is {size}"
        )
    site = CircuitEdges() if start.grid == graph else Heads()
    runs = PairRuns(model, site, pairs, patch, batch_size, keep=True)
    runs.check_effect(metric)
    report = FaithfulnessRuns(runs, metric, held_out)
    search = _Search(start, runs, metric, threshold or 1e-4)
    with torch.no_grad():
        search.run_pass(size, progress)
        while size is not None and len(search.circuit) > size:
            search.threshold *= 2
            search.run_pass(size, progress)
    circuit = search.circuit
    searched, on_held_out = report.of(circuit.mask)
    return Acdc(
        circuit=circuit,
        n_kept=int(search.mask.sum()),
        searched=searched,
        held_out=on_held_out,
        history=pd.DataFrame(search.history, columns=["part", "moved", "kept"]),
        threshold=search.threshold,
        value=search.value,
        tested=len(search.history),
        forward_equivalents=search.layers_run / search.n_layers,
        prompt_start=pairs.start,
    )


class _Search:
    """An ACDC search: the parts that are left, and what was tested.

    `ahead` is the maximum number of parts to test in the next forward pass, `last_kept` whether the
    part tested last was kept, `value` the metric under the mask, `layers_run` the number of layers
    that tests ran.
    """

    def __init__(
        self, initial: Circuit, runs: PairRuns, metric: Metric | Literal["kl"], threshold: float
    ) -> None:
        self.grid, self.metric, self.threshold = initial.grid, metric, threshold
        self.runs, self.n_layers = runs, runs.adapter.n_layers
        self.mask, self.value = initial.mask.cpu().clone(), math.nan
        self.ahead, self.last_kept, self.layers_run = 1, False, 0
        self.history: list[tuple[str, float, bool]] = []
        # Parts in order of testing; those of a destination, or a layer of heads, are adjacent.
        exists = self.grid.exists
        edges = isinstance(self.grid, CircuitGraph)
        places = exists.T.nonzero().flip(0, 1) if edges else exists.nonzero().flip(0)
        self.parts: list[tuple[int, ...]] = [tuple(place) for place in places.tolist()]
        self._names, self._groups = self.grid.names(places), places[:, int(edges)].tolist()
        self._most = max(1, ROWS // max(len(batch) for batch in runs.batches))

    @property
    def circuit(self) -> Circuit:
        circuit = Circuit(self.grid, self.mask)
        edges = isinstance(self.grid, CircuitGraph)
        return circuit.connected(patch=self.runs.patch) if edges else circuit

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
        if isinstance(grid, CircuitGraph) and not reaches_logits(grid, self.mask, index[1]):
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
        self.layers_run += len(tested) * (self.n_layers - grid.layer(index))
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
            clean = run.clean_logits
            for row, logits in enumerate(run.logits(masks)):
                if isinstance(self.metric, str):
                    values = divergence(logits, clean)
                else:
                    values = measure(self.metric, logits, batch)
                totals[row] += values.cpu().double().sum()
            count += len(batch)
        means = (totals / count).tolist()
        if not all(map(math.isfinite, means)):
            raise ValueError(
                f"the metric is not finite under some circuits; the means are {means}. Use a "
                "metric that stays finite, such as a difference of logits"
            )
        return means
