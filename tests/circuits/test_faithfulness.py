"""What a search reports is a run of the circuit that it returns, checked with the slow oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracle import run_patched
from planted import PLANTED, Planted
from random_models import random_pairs, shaken
from torch import Tensor

from sparse_tl.circuits import Circuit, Faithfulness, Scores, acdc, prune_circuit_edges
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.lens import Model, adapt
from sparse_tl.metrics import logit_difference

QUIET: dict[str, Any] = {"progress": False, "batch_size": 2}


def _by_hand(model: Model, pairs: PromptPairs, mask: Tensor, metric: Any) -> tuple[float, float]:
    """Divergence and explained effect, from logits of plain hooks."""
    graph = adapt(model).graph
    circuit, clean, nothing = (
        run_patched(model, graph, pairs, some)
        for some in (mask, graph.exists, torch.zeros_like(graph.exists))
    )

    def lost(logits: Tensor) -> Tensor:
        expected = clean.softmax(-1)
        return (expected * (clean.log_softmax(-1) - logits.log_softmax(-1))).sum(-1).mean()

    divergence = lost(circuit).item()
    if metric == "kl":
        return divergence, 1 - divergence / lost(nothing).item()
    done, whole, none = (metric(some, pairs).mean() for some in (circuit, clean, nothing))
    return divergence, ((done - none) / (whole - none)).item()


@pytest.mark.parametrize("metric", ["kl", logit_difference])
@pytest.mark.parametrize("search", ["pruning", "acdc"])
def test_the_circuit_that_is_returned_was_run(build_tiny: Any, search: str, metric: Any) -> None:
    """After a search too short to find anything, too, and on pairs that it has not seen."""
    model = shaken(build_tiny(dtype="float64"))
    graph, pairs = adapt(model).graph, random_pairs()
    seen, others = pairs.select(slice(0, 3)), pairs.select(slice(3, None))
    options = {"metric": metric, "held_out": others, **QUIET}
    if search == "pruning":
        found = prune_circuit_edges(model, seen, size=graph.n_edges // 3, steps=4, **options)
    else:
        start = Scores(graph, torch.rand(graph.exists.shape) * graph.exists, "random").top(40)
        found = acdc(model, seen, threshold=1e-2, start=start, **options)
    assert 0 < len(found.circuit) <= found.n_kept < graph.n_edges
    assert torch.equal(found.circuit.connected().mask, found.circuit.mask)
    assert found.held_out is not None
    for report, where in ((found.searched, seen), (found.held_out, others)):
        divergence, effect = _by_hand(model, where, found.circuit.mask, metric)
        assert report.divergence == pytest.approx(divergence, rel=1e-7)
        assert report.explained_effect == pytest.approx(effect, rel=1e-7, abs=1e-9)
        assert report.n_pairs == len(where)
        assert str(report) in repr(found)


def test_the_last_steps_of_pruning_run_the_circuit_that_is_returned(build_tiny: Any) -> None:
    """In the smallest circuit that does anything at all, as in the largest."""
    model, pairs = shaken(build_tiny(dtype="float64")), random_pairs()
    total = adapt(model).graph.n_edges
    for size in (total // 8, total // 2):
        found = prune_circuit_edges(model, pairs, size=size, steps=60, progress=False)
        history = found.history
        assert found.n_kept == size
        assert history["expected"].is_monotonic_decreasing
        assert history["expected"].iloc[-20:].tolist() == pytest.approx([size] * 20)
        last = history["divergence"].iloc[-3:].mean()
        assert found.searched.divergence == pytest.approx(last, rel=0.1, abs=1e-3)


def test_edges_on_no_path_are_dropped_and_said(build_tiny: Any) -> None:
    model, pairs = build_tiny(), random_pairs()
    graph = adapt(model).graph
    path = ["input->a0.h0<v>", "a0.h0->m1", "m1->logits"]
    lost = ["input->a0.h1<q>", "a1.h0->logits", "m0->a1.h1<k>"]
    wanted = Circuit.of(graph, path + lost)
    start = Scores(graph, wanted.mask.double(), "by hand")
    settings: dict[str, Any] = {"start": start, "steps": 1, "learning_rate": 1e-6, **QUIET}
    with pytest.warns(UserWarning, match="Of the 6 edges that were kept, only 3 have an effect"):
        found = prune_circuit_edges(model, pairs, size=6, **settings)
    assert {str(edge) for edge in found.circuit.edges} == set(path)
    assert "6 before those without effect were dropped" in repr(found)
    start = Scores(graph, Circuit.of(graph, path).mask.double(), "by hand")
    found = prune_circuit_edges(model, pairs, size=3, **{**settings, "start": start})
    assert found.n_kept == len(found.circuit) == 3 and not found.notes()


def test_planted_circuits_are_faithful() -> None:
    planted: Planted = next(iter(PLANTED.values()))()
    found = acdc(planted.model, planted.pairs, threshold=1e-4, metric="kl", **QUIET)
    assert found.searched.explained_effect == pytest.approx(1, abs=1e-6)
    assert found.searched.divergence == pytest.approx(found.value, abs=1e-12)
    assert found.held_out is None


def test_held_out_pairs_that_cannot_be_measured_are_refused_before_the_search(
    build_tiny: Any,
) -> None:
    model, pairs = build_tiny(), random_pairs()

    def no_number(logits: Tensor, some: PromptPairs) -> Tensor:
        return logits[:, 0] * (math.nan if len(some) == 1 else 1)

    options = {"metric": no_number, "held_out": pairs.select(slice(0, 1)), **QUIET}
    with pytest.raises(ValueError, match="expected a finite metric"):
        prune_circuit_edges(model, pairs.select(slice(0, 4)), size=3, steps=10**8, **options)


def test_an_effect_of_nothing_is_not_a_number(build_tiny: Any) -> None:
    """That no head matters is a result of ACDC, and has no explained effect."""
    model, pairs = build_tiny(), random_pairs()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_O.zero_()
    found = acdc(model, pairs, threshold=1e-4, start="heads", patch="zero", **QUIET)
    assert len(found.circuit) == 0 and found.searched.divergence == pytest.approx(0, abs=1e-6)
    assert math.isnan(found.searched.explained_effect)
    assert isinstance(found.searched, Faithfulness)
