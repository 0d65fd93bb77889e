"""Paths and influence of a circuit, against all paths, one by one."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch

from sparse_tl.circuits import Circuit, Scores
from sparse_tl.circuits.paths import CROSSING, PathGraph, connected, path_graph
from sparse_tl.graph import CircuitGraph, PositionedGraph


def scored(grid, n_edges, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = Scores(grid, torch.randn(grid.exists.shape, generator=generator) * grid.exists, "eap")
    return scores.top(n_edges), scores


def all_paths(graph: PathGraph) -> list[list[int]]:
    """Every path from an input to the logits, as links."""
    out = defaultdict(list)
    for i, link in enumerate(graph.links):
        out[link.source].append(i)
    found, open_ = [], [[i] for end in graph.ends[0] for i in out[end]]
    while open_:
        path = open_.pop()
        end = graph.links[path[-1]].reader
        if end in graph.ends[1]:
            found.append(path)
        open_ += [[*path, i] for i in out[end]]
    return found


GRIDS = {
    "plain": CircuitGraph(3, 2, 2),
    "grouped": CircuitGraph(2, 4, 2),
    "tokens": PositionedGraph(CircuitGraph(2, 2, 2), ("0", "1", "2")),
    "spans": PositionedGraph(CircuitGraph(2, 2, 2), ("S1", "END")),
}


@pytest.mark.parametrize("name", GRIDS)
def test_influence_is_the_sum_over_all_paths(name):
    grid = GRIDS[name]
    graph = path_graph(*scored(grid, min(40, grid.n_parts)))
    paths = all_paths(graph)
    assert graph.on_path == {i for path in paths for i in path}
    # A path's influence is the product of its shares; at the logits, of what each of them reads.
    into = defaultdict(float)
    for i in graph.on_path:
        into[graph.links[i].reader] += graph.links[i].weight
    ends = sum(into[end] for end in graph.ends[1])
    of_path = [
        math.prod(graph.links[i].weight / into[graph.links[i].reader] for i in path)
        * into[graph.links[path[-1]].reader]
        / ends
        for path in paths
    ]
    assert sum(of_path) == pytest.approx(1)
    expected = [0.0] * len(graph.links)
    for path, influence in zip(paths, of_path, strict=True):
        for i in path:
            expected[i] += influence
    assert graph.influence == pytest.approx(expected)
    for i in graph.on_path:
        through = [value for path, value in zip(paths, of_path, strict=True) if i in path]
        # `best` ranks by shares alone, without the weight of one of several logits.
        own = [math.prod(graph.shares[j] for j in path) for path in paths if i in path]
        assert through and math.prod(graph.shares[j] for j in graph.path(i)) == pytest.approx(
            max(own)
        )


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("by", ["influence", "score"])
def test_edges_enter_path_by_path(name, by):
    graph = path_graph(*scored(GRIDS[name], min(40, GRIDS[name].n_parts), seed=1))
    values = graph.influence if by == "influence" else [link.weight for link in graph.links]
    order, sizes = graph.order(values)
    assert sorted(order) == list(range(len(graph.names))) and sizes[-1] == len(order)
    n_on_path = len({graph.links[i].edge for i in graph.on_path} - {-1})
    for size in (size for size in sizes if size <= n_on_path):
        entered = set(order[:size])
        among = [i for i, link in enumerate(graph.links) if link.edge in entered or link.edge < 0]
        kept = {graph.links[i].edge for i in connected(graph.links, among, graph.ends)} - {-1}
        assert kept == entered


def test_without_scores_all_inputs_count_alike():
    graph = CircuitGraph(2, 2, 2)
    names = ["input->m0", "m0->logits", "input->m1", "m1->logits", "m0->m1"]
    graph = path_graph(Circuit.of(graph, names), None)
    found = {graph.names[k.edge]: v for k, v in zip(graph.links, graph.influence, strict=True)}
    assert found == {
        "input->m0": 0.75,
        "m0->logits": 0.5,
        "input->m1": 0.25,
        "m1->logits": 0.5,
        "m0->m1": 0.25,
    }


def test_a_head_crosses_to_positions_at_or_after_its_keys():
    edges = CircuitGraph(1, 2, 2)
    names = ["input->a0.h0<v>@1", "a0.h0->logits@0", "a0.h0->logits@1", "a0.h0->logits@2"]
    graph = path_graph(Circuit.of(PositionedGraph(edges, ("0", "1", "2")), names), None)
    ends = {
        (str(graph.nodes[k.source]), str(graph.nodes[k.reader]))
        for k in graph.links
        if k.slot == CROSSING
    }
    assert ends == {("a0.h0<kv>@1", "a0.h0@1"), ("a0.h0<kv>@1", "a0.h0@2")}
    on_path = {graph.names[graph.links[i].edge] for i in graph.on_path if graph.links[i].edge >= 0}
    assert on_path == {"input->a0.h0<v>@1", "a0.h0->logits@1", "a0.h0->logits@2"}
    spans = path_graph(
        Circuit.of(PositionedGraph(edges, ("a", "b")), ["input->a0.h0<k>@b", "a0.h0->logits@a"]),
        None,
    )
    assert len(spans.on_path) == 3  # spans may stand in any order


# A group's edge has a link to each of its heads, so grouped queries are left out.
@pytest.mark.parametrize("name", ["plain", "tokens", "spans"])
def test_lines_on_a_path_are_those_of_the_connected_circuit(name):
    grid = GRIDS[name]
    circuit, scores = scored(grid, min(30, grid.n_parts), seed=2)
    graph = path_graph(circuit, scores)
    kept = set(path_graph(circuit.connected(), scores).names)
    assert {
        graph.names[graph.links[i].edge] for i in graph.on_path if graph.links[i].edge >= 0
    } == kept
