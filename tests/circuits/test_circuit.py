"""Circuits changed by hand."""

from __future__ import annotations

from itertools import product

import networkx as nx
import pytest
import torch

from sparse_tl import Circuit, CircuitGraph
from sparse_tl.graph import PositionedGraph

GRAPH = CircuitGraph(2, 2, 2)
EMPTY = Circuit(GRAPH, torch.zeros_like(GRAPH.exists))


def test_edges_come_and_go_by_name() -> None:
    (edge,) = EMPTY.having("input->m0").edges
    circuit = EMPTY.having("a0.h1->a1.h0<q>", edge)
    assert {str(edge) for edge in circuit.edges} == {"a0.h1->a1.h0<q>", "input->m0"}
    assert [str(edge) for edge in circuit.without("input->m0").edges] == ["a0.h1->a1.h0<q>"]
    assert len(EMPTY) == 0 and len(circuit) == 2  # nothing is changed in place
    assert torch.equal(circuit.having("input->m0").mask, circuit.mask)


def test_a_circuit_is_made_of_its_parts() -> None:
    of_edges = Circuit.of(GRAPH, ["a0.h1->a1.h0<q>", "input->m0"])
    assert torch.equal(of_edges.mask, EMPTY.having("a0.h1->a1.h0<q>", "input->m0").mask)
    assert Circuit.of(GRAPH.heads, [(1, 0), "a0.h1"]).heads == ((0, 1), (1, 0))
    with pytest.raises(ValueError, match=r"2 layers x 2 heads.*has no \(9, 9\)"):
        Circuit.of(GRAPH.heads, [(9, 9)])


def test_edges_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="does not contain input->m0"):
        EMPTY.without("input->m0")
    with pytest.raises(ValueError, match="too late"):
        EMPTY.having("a1.h1->a0.h0<q>")


@pytest.mark.parametrize(
    "graph",
    [
        CircuitGraph(3, 2, 2),
        CircuitGraph(3, 4, 2),
        CircuitGraph(3, 2, 2, parallel=True),
        CircuitGraph(3, 2, 2, has_mlps=False),
        CircuitGraph(3, 4, 2, coupled=True),
    ],
    ids=["plain", "grouped", "parallel", "attention only", "coupled"],
)
@pytest.mark.parametrize("share", [0.05, 0.15, 0.4])
@pytest.mark.parametrize("positions", [("0",), ("0", "1", "2"), ("S", "END")])
def test_connected_edges_lie_on_paths_of_the_network(
    graph: CircuitGraph, share: float, positions: tuple[str, ...]
) -> None:
    """As searches in a network of every node's reads say, whatever its kind and position."""
    site, n = PositionedGraph(graph, positions), len(positions)
    generator = torch.Generator().manual_seed(0)
    kept = site.exists & (torch.rand(site.exists.shape, generator=generator) < share)
    edges = [(at, edge) for at in range(n) for edge in graph.edges_of(kept[at])]
    network = nx.DiGraph()
    for at in range(n):
        network.add_edge("the input", f"input@{at}")
        network.add_edge(f"read logits@{at}", "the logits")
    for at, edge in edges:
        network.add_edge(f"{edge.source}@{at}", f"read {edge.destination}@{at}")
    for destination in graph.destinations[:-1]:
        for node in graph.readers_of(destination):
            layer = [s for s in graph.sources if (s.kind, s.layer) == (node.kind, node.layer)]
            for moved in layer if graph.coupled and node.kind == "head" else [node]:
                for at, to in product(range(n), range(n)):
                    later = to > at or "END" in positions
                    if to == at or (destination.slot in ("k", "v") and later):
                        network.add_edge(f"read {destination}@{at}", f"{moved}@{to}")
    from_input, to_logits = (
        nx.descendants(network, "the input"),
        nx.ancestors(network, "the logits"),
    )
    circuit = Circuit(graph, kept[0]) if n == 1 else Circuit(site, kept)
    for patch in ("corrupted", "zero"):
        expected = [
            (at, edge)
            for at, edge in edges
            if f"read {edge.destination}@{at}" in to_logits
            and (f"{edge.source}@{at}" in from_input or patch == "zero")
        ]
        joined = circuit.connected(patch=patch).mask.view(kept.shape)
        assert [(at, edge) for at in range(n) for edge in graph.edges_of(joined[at])] == expected
    if n > 1:
        return
    for column, destination in enumerate(graph.destinations):
        moved = list(network.successors(f"read {destination}@0"))
        reads = any(node == "the logits" or network.out_degree(node) for node in moved)
        assert graph.reaches_logits(kept[0], column) == reads
