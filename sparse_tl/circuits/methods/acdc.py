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
from itertools import islice, takewhile
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from sparse_tl.calls.arguments import AtLeastOne, Count, Positive, checked
from sparse_tl.calls.scopes import autograd
from sparse_tl.circuits.circuit import Circuit, check_grid, reaches_logits
from sparse_tl.circuits.faithfulness import FaithfulnessRuns
from sparse_tl.circuits.outcomes import Acdc, SearchState
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.circuits.search_identity import search_identity
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import CircuitEdges, Heads, Patch
from sparse_tl.lens import HookedModel, adapt, in_evaluation_mode
from sparse_tl.metrics import Metric, divergence, measure
from sparse_tl.parts.graph import CircuitGraph
from sparse_tl.parts.grids import HeadGrid
from sparse_tl.progress import tracked
from sparse_tl.resuming import resumed
from sparse_tl.storage.files import locked

SAVE_EVERY = 200
"""Number of tests between two checkpoints."""
ROWS = 256
"""Maximum number of tests times prompts in one forward pass."""


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
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> Acdc:
    """The circuit that is left after patching, from the output backwards, what hardly matters.

    Args:
        model: dense or sparse model; left unchanged.
        pairs: prompt pairs.
        threshold: smallest change of the metric for which a part is kept, in the metric's units;
            nats for "kl".
        size: maximum number of parts to keep; `threshold` (1e-4 by default) is then the initial
            threshold.
        metric: metric function with one value per pair, whose changes in either direction count;
            or "kl", the divergence from the whole model's predictions, where only increases do.
        start: all edges, all heads, or a circuit to start from, such as attribution's top edges.
        patch: patch at closed parts, as in `PatchedPairs`.
        batch_size: prompt pairs per forward pass.
        held_out: further prompt pairs to run the circuit on; the search does not use them.
        checkpoint: folder for checkpoints; an interrupted search is resumed from it.
        progress: whether to show a progress bar.

    Raises:
        ValueError: neither threshold nor size is given, one is out of range, the circuit belongs to
            another model, or the checkpoint belongs to another search or is in use.
        NoEffectError: patching everything changes the metric of no pair.
    """
    graph = adapt(model).graph
    initial = _initial_circuit(graph, start)
    if threshold is None and size is None:
        raise ValueError("expected a threshold above 0, or a size; got neither")
    if size is not None and size > len(initial):
        raise ValueError(
            f"expected a size in 0..{len(initial)}, the size of the initial circuit; got {size}"
        )
    site = CircuitEdges() if initial.grid == graph else Heads()
    runs = PairRuns(model, site, pairs, patch, batch_size, keep=True)
    runs.check_effect(metric)
    report = FaithfulnessRuns(runs, metric, held_out)
    search = _Search(initial, runs, metric, threshold or 1e-4)
    folder = None if checkpoint is None else Path(checkpoint)
    with locked(folder), autograd(False):
        if folder is not None:
            search.save_to(folder, f"{size} {threshold} {batch_size}", pairs)
        while True:
            search.run_pass(size, progress)
            if size is None or len(search.circuit) <= size:
                return search.outcome(report)
            search.state.threshold *= 2
            search.state.position = 0


class _Search:
    def __init__(
        self, initial: Circuit, runs: PairRuns, metric: Metric | Literal["kl"], threshold: float
    ) -> None:
        self.grid, self.metric = initial.grid, metric
        self.patch: Patch = runs.patch
        self.runs, self.n_layers = runs, runs.adapter.n_layers
        self.state = SearchState(initial.mask.cpu().clone(), threshold)
        # Parts in order of testing; those of a destination, or a layer of heads, are adjacent.
        exists = self.grid.exists
        edges = isinstance(self.grid, CircuitGraph)
        places = exists.T.nonzero().flip(0, 1) if edges else exists.nonzero().flip(0)
        self.parts: list[tuple[int, ...]] = [tuple(place) for place in places.tolist()]
        self._names, self._groups = self.grid.names(places), places[:, int(edges)].tolist()
        self._most = max(1, ROWS // max(len(batch) for batch in runs.batches))
        self._folder: Path | None = None

    @property
    def circuit(self) -> Circuit:
        circuit = Circuit(self.grid, self.state.mask)
        edges = isinstance(self.grid, CircuitGraph)
        return circuit.connected(patch=self.patch) if edges else circuit

    def run_pass(self, size: int | None, progress: bool) -> None:
        """Test every remaining part, or stop once the circuit has the requested size."""
        state = self.state
        if state.position == 0:
            state.begun = self.circuit.mask
            state.mask = state.begun.clone()
        for _, run in self.runs:
            run.start_from(state.begun)  # also when resuming: rounding depends on it
        if state.position == 0:
            state.value = self._measure(state.mask[None])[0]
        saved = state.tested
        title, total = f"ACDC at {state.threshold:.2g}", len(self.parts)
        with tracked(title, total, progress, done=state.position) as step:
            while state.position < len(self.parts):
                if size is not None and int(state.mask.sum()) <= size:
                    break
                for _ in range(self._test_next(size)):
                    step()
                if state.tested - saved >= SAVE_EVERY:
                    saved = state.tested
                    self._save()
        self._save()

    def _test_next(self, size: int | None) -> int:
        """Test the next parts of one destination; return how many were kept or patched."""
        state, grid, start = self.state, self.grid, self.state.position
        index = self.parts[start]
        if isinstance(grid, CircuitGraph) and not reaches_logits(grid, state.mask, index[1]):
            state.mask[index] = False
        if not state.mask[index]:
            state.position += 1
            return 1
        ahead = state.ahead if size is None else min(state.ahead, int(state.mask.sum()) - size)
        group = takewhile(
            lambda i: self._groups[i] == self._groups[start], range(start, len(self.parts))
        )
        tested = list(islice((i for i in group if state.mask[self.parts[i]]), ahead))
        masks = state.mask.repeat(len(tested), *[1] * state.mask.ndim)
        for row, i in enumerate(tested):
            # If the last part was kept, close each part alone; otherwise, all before it as well.
            masks[row if state.last_kept else slice(row, None)][..., *self.parts[i]] = False
        state.layers_run += len(tested) * (self.n_layers - grid.layer(index))
        assumed = state.last_kept
        for row, (i, value) in enumerate(zip(tested, self._measure(masks), strict=True)):
            self._settle(i, value)
            if state.last_kept != assumed:  # the remaining tests assumed another circuit
                state.ahead = max(1, row)
                return state.position - start
        state.ahead = min(2 * len(tested), self._most)
        return state.position - start

    def _settle(self, i: int, value: float) -> None:
        """Keep a part or patch it permanently, given the metric with it patched."""
        state, index = self.state, self.parts[i]
        change = value - state.value
        kept = (change if self.metric == "kl" else abs(change)) >= state.threshold
        state.mask[index] = kept
        if not kept:
            state.value = value
        state.tested += 1
        state.history.append((self._names[i], change, kept))
        state.position, state.last_kept = i + 1, kept

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
                f"expected a finite metric under every circuit; the means are {means}. Use a "
                "metric that stays finite, such as a difference of logits."
            )
        return means

    def outcome(self, report: FaithfulnessRuns) -> Acdc:
        import pandas as pd

        state, circuit = self.state, self.circuit
        searched, held_out = report.of(circuit.mask)
        return Acdc(
            circuit=circuit,
            n_kept=int(state.mask.sum()),
            searched=searched,
            held_out=held_out,
            history=pd.DataFrame(state.history, columns=["part", "moved", "kept"]),
            threshold=state.threshold,
            value=state.value,
            tested=state.tested,
            forward_equivalents=state.layers_run / self.n_layers,
            prompt_start=self.runs.batches[0].start,
        )

    @autograd(False)
    def save_to(self, folder: Path, settings: str, pairs: PromptPairs) -> None:
        """Write checkpoints to a folder, and resume from the one that it holds, if any.

        Raises:
            ValueError: the folder holds other files, or the checkpoint of another search.
        """
        state, self._folder = self.state, folder
        state.identity = search_identity(
            self.runs, pairs, self.grid, self.metric, state.mask, settings
        )
        state.measured = (*self._measure(state.mask[None]),)
        self.state = resumed(state, folder)

    def _save(self) -> None:
        if self._folder is not None:
            self.state.save(self._folder)


def _initial_circuit(
    graph: CircuitGraph, start: Circuit | Literal["circuit_edges", "heads"]
) -> Circuit:
    if isinstance(start, str):
        grid = graph.heads if start == "heads" else graph
        return Circuit(grid, grid.exists)
    check_grid(graph, start.grid, CircuitGraph, HeadGrid)
    return start
