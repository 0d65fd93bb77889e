"""Circuits changed by hand."""

from __future__ import annotations

import pytest
import torch

from sparse_tl import Circuit, CircuitGraph
from sparse_tl.graph import CircuitEdge

GRAPH = CircuitGraph(2, 2, 2)
EMPTY = Circuit(GRAPH, torch.zeros_like(GRAPH.exists))


def test_edges_come_and_go_by_name() -> None:
    circuit = EMPTY.having("a0.h1->a1.h0<q>", CircuitEdge.parse("input->m0"))
    assert {str(edge) for edge in circuit.edges} == {"a0.h1->a1.h0<q>", "input->m0"}
    assert [str(edge) for edge in circuit.without("input->m0").edges] == ["a0.h1->a1.h0<q>"]
    assert len(EMPTY) == 0 and len(circuit) == 2  # nothing is changed in place
    assert torch.equal(circuit.having("input->m0").mask, circuit.mask)


def test_a_circuit_is_made_of_its_parts() -> None:
    of_edges = Circuit.of(GRAPH, ["a0.h1->a1.h0<q>", "input->m0"])
    assert torch.equal(of_edges.mask, EMPTY.having("a0.h1->a1.h0<q>", "input->m0").mask)
    assert Circuit.of(GRAPH.heads, [(1, 0), "a0.h1"]).heads == ((0, 1), (1, 0))
    with pytest.raises(ValueError, match=r"2 layers x 2 heads.*it has no \(9, 9\)"):
        Circuit.of(GRAPH.heads, [(9, 9)])


def test_edges_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="it lacks input->m0"):
        EMPTY.without("input->m0")
    with pytest.raises(ValueError, match="too late"):
        EMPTY.having("a1.h1->a0.h0<q>")
