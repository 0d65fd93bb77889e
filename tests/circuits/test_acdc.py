"""ACDC finds planted circuits, and decides as a search that never saves work."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracle import run_patched
from planted import PLANTED, Planted
from torch import Tensor

from sparse_tl.backend import Model, adapt
from sparse_tl.circuits import (
    Circuit,
    acdc,
    acdc as acdc_function,
    attribute_circuit_edges,
    pair_runs,
    prune_circuit_edges,
)
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.gates import GatedRun
from sparse_tl.graph import CircuitGraph
from sparse_tl.metrics import logit_difference

Build = Callable[..., Model]
acdc_module = __import__("sys").modules[acdc_function.__module__]


def _names(circuit: Circuit) -> frozenset[str]:
    assert isinstance(circuit, Circuit)
    return frozenset(str(edge) for edge in circuit.edges)


@pytest.fixture(params=list(PLANTED))
def planted(request: pytest.FixtureRequest) -> Planted:
    return PLANTED[request.param]()


def test_planted_circuits_are_found(planted: Planted) -> None:
    found = acdc(planted.model, planted.pairs, threshold=0.1, metric=planted.metric, progress=False)
    assert _names(found.circuit) == planted.edges
    by_divergence = acdc(planted.model, planted.pairs, threshold=1e-4, progress=False)
    assert _names(by_divergence.circuit) == planted.edges


def test_planted_circuits_are_found_by_size(planted: Planted) -> None:
    found = acdc(planted.model, planted.pairs, size=len(planted.edges), progress=False)
    assert _names(found.circuit) == planted.edges


def test_planted_circuits_are_found_among_the_best_edges(planted: Planted) -> None:
    scores = attribute_circuit_edges(planted.model, planted.pairs, planted.metric)
    start = scores.top(2 * len(planted.edges))
    found = acdc(planted.model, planted.pairs, threshold=1e-4, start=start, progress=False)
    assert _names(found.circuit) == planted.edges
    assert len(found.history) <= len(start)


@pytest.mark.long
def test_planted_circuits_are_learned(planted: Planted) -> None:
    found = prune_circuit_edges(
        planted.model, planted.pairs, size=len(planted.edges), steps=120, progress=False
    )
    assert _names(found.circuit) == planted.edges


@pytest.mark.slow
def test_pruning_can_start_from_scores(planted: Planted) -> None:
    """Without learning it finds the best-scored edges; with it, the circuit."""
    scores = attribute_circuit_edges(planted.model, planted.pairs, planted.metric)
    size = len(planted.edges)
    prune = partial(
        prune_circuit_edges, planted.model, planted.pairs, size=size, start=scores, progress=False
    )
    still = prune(steps=1, learning_rate=1e-6)
    assert _names(still.circuit) == _names(scores.top(size))
    assert size < still.history["expected"][0] < 0.6 * scores.grid.n_parts
    assert _names(prune(steps=120).circuit) == planted.edges


@pytest.mark.long
def test_states_of_few_batches_are_held(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    """More pairs take no more memory, and what is found is the same."""
    searches = {
        "acdc": partial(acdc, threshold=1e-4, start="heads"),
        "pruning": partial(prune_circuit_edges, size=len(planted.edges), steps=5),
    }
    options = {"batch_size": 2, "progress": False}
    pairs = planted.pairs.select(torch.arange(12) % len(planted.pairs))
    whole = [str(some(planted.model, pairs, **options).circuit) for some in searches.values()]
    monkeypatch.setattr(pair_runs, "STATES_AT_ONCE", 1)
    alive: set[int] = set()
    most = 0

    class Counted(GatedRun):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            nonlocal most
            super().__init__(*args, **kwargs)
            alive.add(id(self))
            weakref.finalize(self, alive.discard, id(self))
            most = max(most, len(alive))

    monkeypatch.setattr(pair_runs, "GatedRun", Counted)
    again = [str(some(planted.model, pairs, **options).circuit) for some in searches.values()]
    assert again == whole
    assert most <= 4 < len(pairs) / 2, "the first, the last, and the one that takes its place"


def _slow(model: Model, graph: CircuitGraph, pairs: PromptPairs, threshold: float) -> Tensor:
    """The algorithm of the paper with the slow oracle: one whole forward pass per edge."""

    def measured(mask: Tensor) -> float:
        return logit_difference(run_patched(model, graph, pairs, mask), pairs).mean().item()

    mask = graph.exists.clone()
    value = measured(mask)
    for column in reversed(range(len(graph.destinations))):
        for row in reversed(range(len(graph.sources))):
            if not mask[row, column]:
                continue
            mask[row, column] = False
            now = measured(mask)
            if abs(now - value) < threshold:
                value = now
            else:
                mask[row, column] = True
    return mask


@pytest.mark.long
def test_decisions_are_those_of_the_slow_search(model: Model, pairs: PromptPairs) -> None:
    graph, pairs = adapt(model).graph, pairs.select(slice(0, 2))
    slow = Circuit(graph, _slow(model, graph, pairs, 0.1)).connected()
    found = acdc(model, pairs, threshold=0.1, metric=logit_difference, batch_size=1, progress=False)
    assert isinstance(found.circuit, Circuit)
    assert torch.equal(found.circuit.mask, slow.mask)
    assert 0 < len(slow) < graph.n_edges
    value = logit_difference(run_patched(model, graph, pairs, slow.mask), pairs).mean().item()
    assert found.searched.values.mean().item() == pytest.approx(value, rel=1e-9)


def test_predictions_that_are_no_numbers(build_tiny: Build, pairs: PromptPairs) -> None:
    model = build_tiny()
    with torch.no_grad():
        model.unembed.b_U[0] = float("nan")
    with pytest.raises(ValueError, match="predicts NaN"):
        acdc(model, pairs, threshold=0.1, progress=False)
