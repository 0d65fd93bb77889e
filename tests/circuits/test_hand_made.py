"""Scores and circuits against arithmetic on paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hand_made import (
    HAND_MADE,
    Known,
    attending_model,
    curved_model,
    paths_model,
    rescaled_model,
    threshold_model,
)
from oracle import mask_of, run_patched_each

from sparse_tl.circuits import attribute_circuit_edges


@pytest.fixture(params=list(HAND_MADE))
def known(request: pytest.FixtureRequest) -> Known:
    return HAND_MADE[request.param]()


def _scores(known: Known, method: str) -> dict[str, float]:
    found = attribute_circuit_edges(known.model, known.pairs, known.metric, method=method, steps=5)
    return {str(edge): found[edge] for edge in known.graph.edges}


def _with_silence(known: Known, scores: dict[str, float]) -> dict[str, float]:
    return {str(edge): scores.get(str(edge), 0.0) for edge in known.graph.edges}


def test_metrics_are_as_on_paper(known: Known) -> None:
    for tokens, expected in (
        (known.pairs.clean, known.clean),
        (known.pairs.corrupted, known.corrupted),
    ):
        with torch.no_grad():
            found = known.metric(known.pairs.read(known.model(tokens)), known.pairs).mean()
        assert found.item() == pytest.approx(expected, rel=1e-12)


def test_scores_are_as_on_paper(known: Known) -> None:
    found = _scores(known, "eap")
    assert found == pytest.approx(_with_silence(known, known.scores), rel=1e-12, abs=0)


@pytest.mark.parametrize("name", ["paths", "threshold"])
def test_integrated_scores_are_as_on_paper(name: str) -> None:
    known = HAND_MADE[name]()
    found = _scores(known, "eap-ig")
    assert found == pytest.approx(_with_silence(known, known.integrated), rel=1e-12, abs=0)


@pytest.mark.parametrize("build", [curved_model, rescaled_model])
def test_relevance_is_as_on_paper(build: Callable[[], tuple[Known, dict[str, float]]]) -> None:
    known, expected = build()
    exact, off = {"rel": 1e-9, "abs": 0}, {"rel": 2e-5, "abs": 1e-4}  # by the norm's epsilon
    tolerance: dict[str, Any] = exact if known.name == "curved" else off
    assert _scores(known, "relp") == pytest.approx(_with_silence(known, expected), **tolerance)
    assert _scores(known, "eap") == pytest.approx(_with_silence(known, known.scores), **tolerance)


def test_every_circuit_does_what_it_does_on_paper(known: Known) -> None:
    """Silent edges are kept in every other circuit, and patched in the rest: no difference."""
    graph = known.graph
    silent = {str(edge) for edge in graph.edges} - known.scores.keys()
    masks = [
        mask_of(graph, kept | silent if number % 2 else kept)
        for number, kept in enumerate(known.effects)
    ]
    found = run_patched_each(known.model, graph, known.pairs, torch.stack(masks))
    for (kept, expected), logits in zip(known.effects.items(), found, strict=True):
        metric = known.metric(logits, known.pairs).mean().item()
        effect = (metric - known.corrupted) / (known.clean - known.corrupted)
        assert effect == pytest.approx(expected, rel=1e-12, abs=1e-12), sorted(kept)


def test_patching_on_paper() -> None:
    """What the effects of the circuits say about single edges, next to the first-order scores."""
    linear = paths_model()
    assert linear.patched == pytest.approx(linear.scores, rel=1e-12)
    threshold = threshold_model()
    assert threshold.scores["a0.h0->m0"] == -16
    assert threshold.patched["a0.h0->m0"] == pytest.approx(-12)
    attending = attending_model()
    assert attending.patched["input->a0.h0<q>"] == pytest.approx(-2)
    assert attending.patched["input->a0.h0<k>"] == pytest.approx(-4)
