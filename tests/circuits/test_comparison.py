"""ROC and overlap against numbers that one can count."""

from __future__ import annotations

import pytest
import torch

from sparse_tl.circuits import (
    Circuit,
    Scores,
    overlap,
    roc,
)
from sparse_tl.graph import CircuitGraph

GRAPH = CircuitGraph(1, 1, 1, has_mlps=False)  # input -> q, k, v, logits; head -> logits


def _scores(values: list[float]) -> Scores:
    scores = torch.zeros(GRAPH.exists.shape, dtype=torch.float64)
    scores[GRAPH.exists] = torch.tensor(values, dtype=torch.float64)
    return Scores(GRAPH, scores, "by hand")


def _circuit(kept: list[int]) -> Circuit:
    mask = torch.zeros_like(GRAPH.exists)
    values = torch.zeros(5, dtype=torch.bool)
    values[kept] = True
    mask[GRAPH.exists] = values
    return Circuit(GRAPH, mask)


def test_a_curve_that_can_be_counted() -> None:
    """Known edges score 3 and 1, the others 2, 1 and 0: of 6 pairs 4 are right and one is a tie."""
    found = roc(_scores([3.0, -2.0, 1.0, 1.0, 0.0]), _circuit([0, 2]))
    assert found.auc == pytest.approx(4.5 / 6)
    assert found.true_positive_rate.tolist() == [0, 0.5, 0.5, 1, 1]
    assert found.false_positive_rate.tolist() == pytest.approx([0, 0, 1 / 3, 2 / 3, 1])
    assert found.to_pandas()["true_positive_rate"].tolist() == [0, 0.5, 0.5, 1, 1]
    assert roc(_scores([1.0] * 5), _circuit([0])).auc == pytest.approx(0.5)
    assert roc(_scores([0.0, 5, -5, 5, 5]), _circuit([0])).auc == 0


def test_an_overlap_that_can_be_counted() -> None:
    found = overlap(_circuit([0, 1, 2]), _circuit([1, 2, 3, 4]))
    assert (found.iou, found.precision, found.recall) == (2 / 5, 2 / 3, 2 / 4)
    assert "<td>0.6667</td>" in found._repr_html_()
