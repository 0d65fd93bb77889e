"""Ranks share prompt pairs, and what they add up is what one process finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_models import random_pairs, shaken
from several_ranks import on_ranks

from sparse_tl.circuits import (
    Circuit,
    Evaluation,
    Scores,
    attribute_attention_edges,
    attribute_circuit_edges,
    attribute_heads,
    evaluate,
)
from sparse_tl.circuits.evaluation import accuracy
from sparse_tl.data import TokenBatch
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.lens import Model, adapt
from sparse_tl.metrics import logit_difference
from sparse_tl.training import evaluate_held_out

Build = Callable[..., Model]
RANKS = 3
OPTIONS: dict[str, Any] = {"batch_size": 2, "progress": False}


def _shared(call: Callable[[Any], Any], pairs: PromptPairs) -> tuple[Any, list[Any], list[int]]:
    """What one process finds, what each rank finds, and the pairs whose metric each measured."""
    measured: list[int] = []

    def metric(logits: torch.Tensor, some: PromptPairs) -> torch.Tensor:
        measured.append(len(some))
        return logit_difference(logits, some)

    def job(rank: int) -> tuple[Any, int]:
        measured.clear()
        return call(metric), sum(measured)

    alone, (found, shares) = job(0), zip(*on_ranks(RANKS, job), strict=True)
    assert sum(shares) == alone[1] and max(shares) < alone[1]
    return alone[0], list(found), list(shares)


@pytest.mark.parametrize(
    ("attribute", "more"),
    [
        (attribute_circuit_edges, {"method": "eap-ig", "patch": "resample"}),
        (attribute_circuit_edges, {"by_pair": True, "method": "eap"}),
        (attribute_heads, {"patch": "mean"}),
        (attribute_attention_edges, {"patch": "corrupted"}),
    ],
)
def test_attribution(build_tiny: Build, attribute: Any, more: dict[str, Any]) -> None:
    model, pairs = shaken(build_tiny("float64")), random_pairs(9)
    if more.get("patch") in ("mean", "resample"):
        pairs.positions.fill_(4)
    alone, found, _ = _shared(lambda m: attribute(model, pairs, m, **OPTIONS, **more), pairs)
    for scores in found:
        assert isinstance(scores, Scores) and torch.equal(scores.values, found[0].values)
        torch.testing.assert_close(scores.values, alone.values, rtol=1e-10, atol=1e-13)
    assert alone.values.abs().max() > 1e-3


def test_evaluation(build_tiny: Build) -> None:
    model, pairs = shaken(build_tiny("float64")), random_pairs(9)
    graph = adapt(model).graph
    mask = torch.rand(graph.exists.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    for circuit in (Circuit(graph, graph.exists & mask), Circuit(graph.heads, mask[:2, :2])):
        alone, found, shares = _shared(
            lambda m, c=circuit: evaluate(model, pairs, m, [c, c], **OPTIONS), pairs
        )
        assert shares == [16, 12, 8], "clean, none and two circuits, of 4, 3 and 2 pairs"
        for evaluation in found:
            assert isinstance(evaluation, Evaluation)
            for name in ("values", "clean", "none"):
                of, expected = getattr(evaluation, name), getattr(alone, name)
                torch.testing.assert_close(of, expected, rtol=1e-12, atol=1e-13)
    assert on_ranks(RANKS, lambda rank: accuracy(model, pairs)) == [accuracy(model, pairs)] * 3


def test_ranks_with_different_prompts_are_refused(build_tiny: Build) -> None:
    """As many prompts, so that nothing else would tell: drawn with another seed."""
    model = shaken(build_tiny("float64"))

    def job(rank: int) -> list[str]:
        pairs, rows = random_pairs(6), TokenBatch.next_token(torch.full((6, 5), 3 + rank))
        pairs.clean[2, 0] = rank
        calls: list[Callable[[], Any]] = [
            lambda: attribute_circuit_edges(model, pairs, logit_difference, **OPTIONS),
            lambda: accuracy(model, pairs),
            lambda: evaluate_held_out(model, rows),
        ]
        said = []
        for call in calls:
            with pytest.raises(ValueError, match=r"rank 1 differs from rank 0 \(rows") as caught:
                call()
            said.append(str(caught.value))
        return said

    first, second = on_ranks(2, job)
    assert first == second


def test_fewer_pairs_than_ranks(build_tiny: Build) -> None:
    model, pairs = shaken(build_tiny("float64")), random_pairs(1)

    def job(rank: int = 0) -> torch.Tensor:
        return attribute_circuit_edges(model, pairs, logit_difference, **OPTIONS).values

    for found in on_ranks(2, job):
        assert torch.equal(found, job())
