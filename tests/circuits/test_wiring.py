"""Paths and influence of a circuit, against all paths, one by one."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch

from sparse_tl.circuits import Circuit, Scores
from sparse_tl.circuits.wiring import CROSSING, Wiring, connected, wire
from sparse_tl.graph import CircuitGraph
from sparse_tl.positioned_graph import PositionedGraph


def scored(site, n_edges, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = Scores(site, torch.randn(site.exists.shape, generator=generator) * site.exists, "eap")
    return scores.top(n_edges), scores


def all_paths(wiring: Wiring) -> list[list[int]]:
    """Every path from an input to the logits, as lines."""
    out = defaultdict(list)
    for i, line in enumerate(wiring.lines):
        out[line.source].append(i)
    found, open_ = [], [[i] for end in wiring.ends[0] for i in out[end]]
    while open_:
        path = open_.pop()
        end = wiring.lines[path[-1]].reader
        if end in wiring.ends[1]:
            found.append(path)
        open_ += [[*path, i] for i in out[end]]
    return found


SITES = {
    "plain": CircuitGraph(3, 2, 2),
    "grouped": CircuitGraph(2, 4, 2),
    "tokens": PositionedGraph(CircuitGraph(2, 2, 2), ("0", "1", "2")),
    "spans": PositionedGraph(CircuitGraph(2, 2, 2), ("S1", "END")),
}


@pytest.mark.parametrize("name", SITES)
def test_influence_is_the_sum_over_all_paths(name):
    site = SITES[name]
    wiring = wire(*scored(site, min(40, site.n_parts)))
    paths = all_paths(wiring)
    assert wiring.on_path == {i for path in paths for i in path}
    # A path's influence is the product of its shares; at the logits, of what each of them reads.
    into = defaultdict(float)
    for i in wiring.on_path:
        into[wiring.lines[i].reader] += wiring.lines[i].weight
    ends = sum(into[end] for end in wiring.ends[1])
    of_path = [
        math.prod(wiring.lines[i].weight / into[wiring.lines[i].reader] for i in path)
        * into[wiring.lines[path[-1]].reader]
        / ends
        for path in paths
    ]
    assert sum(of_path) == pytest.approx(1)
    expected = [0.0] * len(wiring.lines)
    for path, influence in zip(paths, of_path, strict=True):
        for i in path:
            expected[i] += influence
    assert wiring.influence == pytest.approx(expected)
    for i in wiring.on_path:
        through = [value for path, value in zip(paths, of_path, strict=True) if i in path]
        # `best` ranks by shares alone, without the weight of one of several logits.
        own = [math.prod(wiring.shares[j] for j in path) for path in paths if i in path]
        assert through and math.prod(wiring.shares[j] for j in wiring.path(i)) == pytest.approx(
            max(own)
        )


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("by", ["influence", "score"])
def test_edges_enter_path_by_path(name, by):
    wiring = wire(*scored(SITES[name], min(40, SITES[name].n_parts), seed=1))
    values = wiring.influence if by == "influence" else [line.weight for line in wiring.lines]
    order, sizes = wiring.order(values)
    assert sorted(order) == list(range(len(wiring.names))) and sizes[-1] == len(order)
    n_on_path = len({wiring.lines[i].edge for i in wiring.on_path} - {-1})
    for size in (size for size in sizes if size <= n_on_path):
        entered = set(order[:size])
        among = [i for i, line in enumerate(wiring.lines) if line.edge in entered or line.edge < 0]
        kept = {wiring.lines[i].edge for i in connected(wiring.lines, among, wiring.ends)} - {-1}
        assert kept == entered


def test_without_scores_all_inputs_count_alike():
    graph = CircuitGraph(2, 2, 2)
    names = ["input->m0", "m0->logits", "input->m1", "m1->logits", "m0->m1"]
    wiring = wire(Circuit.of(graph, names), None)
    found = {wiring.names[k.edge]: v for k, v in zip(wiring.lines, wiring.influence, strict=True)}
    assert found == {
        "input->m0": 0.75,
        "m0->logits": 0.5,
        "input->m1": 0.25,
        "m1->logits": 0.5,
        "m0->m1": 0.25,
    }


def test_a_head_crosses_to_positions_at_or_after_its_keys():
    graph = CircuitGraph(1, 2, 2)
    names = ["input->a0.h0<v>@1", "a0.h0->logits@0", "a0.h0->logits@1", "a0.h0->logits@2"]
    wiring = wire(Circuit.of(PositionedGraph(graph, ("0", "1", "2")), names), None)
    ends = {
        (str(wiring.spots[k.source]), str(wiring.spots[k.reader]))
        for k in wiring.lines
        if k.slot == CROSSING
    }
    assert ends == {("a0.h0<kv>@1", "a0.h0@1"), ("a0.h0<kv>@1", "a0.h0@2")}
    on_path = {
        wiring.names[wiring.lines[i].edge] for i in wiring.on_path if wiring.lines[i].edge >= 0
    }
    assert on_path == {"input->a0.h0<v>@1", "a0.h0->logits@1", "a0.h0->logits@2"}
    spans = wire(
        Circuit.of(PositionedGraph(graph, ("a", "b")), ["input->a0.h0<k>@b", "a0.h0->logits@a"]),
        None,
    )
    assert len(spans.on_path) == 3  # spans may stand in any order


# A group's edge has a line to each of its heads, so grouped queries are left out.
@pytest.mark.parametrize("name", ["plain", "tokens", "spans"])
def test_lines_on_a_path_are_those_of_the_connected_circuit(name):
    site = SITES[name]
    circuit, scores = scored(site, min(30, site.n_parts), seed=2)
    wiring = wire(circuit, scores)
    kept = set(wire(circuit.connected(), scores).names)
    assert {
        wiring.names[wiring.lines[i].edge] for i in wiring.on_path if wiring.lines[i].edge >= 0
    } == kept
