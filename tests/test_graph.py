"""The graph has the nodes and edges that the field counts, and only those that causality allows."""

from __future__ import annotations

import json
from html import escape

import networkx as nx
import pytest
import torch

import sparse_tl.graph as graph_module
from sparse_tl.circuits import Circuit, Scores, from_eap_ig, to_eap_ig
from sparse_tl.graph import AttentionGrid, CircuitGraph, Destination, HeadGrid, Node

GPT2_SMALL = CircuitGraph(12, 12, 12)
TINY = CircuitGraph(2, 2, 2)
GRAPHS = [
    TINY,
    CircuitGraph(3, 2, 2, parallel=True),
    CircuitGraph(2, 4, 2),
    CircuitGraph(3, 3, 3, has_mlps=False),
]


def test_gpt2_small_has_the_published_size() -> None:
    assert (len(GPT2_SMALL.nodes), GPT2_SMALL.n_edges) == (158, 32_491)
    assert repr(GPT2_SMALL) == "CircuitGraph(12 layers x 12 heads: 158 nodes, 32,491 edges)"


@pytest.mark.parametrize(
    ("graph", "count"),
    [
        # Layer 0: 6 slots and the MLP read 1 (3) sources; layer 1: 4 (6); the logits 7.
        (TINY, 6 * 1 + 3 + 6 * 4 + 6 + 7),
        # Parallel: the MLP reads what its heads read.
        (CircuitGraph(2, 2, 2, parallel=True), 7 * 1 + 7 * 4 + 7),
        # Two key-value heads for four query heads: 4 + 2 + 2 slots.
        (CircuitGraph(2, 4, 2), 8 * 1 + 5 + 8 * 6 + 10 + 11),
        (CircuitGraph(2, 2, 2, has_mlps=False), 6 * 1 + 6 * 3 + 5),
    ],
)
def test_edges_counted_by_hand(graph: CircuitGraph, count: int) -> None:
    assert graph.n_edges == len(graph.edges) == count


@pytest.mark.parametrize("graph", GRAPHS)
def test_names_and_indices_round_trip(graph: CircuitGraph) -> None:
    for edge, (row, column) in zip(graph.edges, graph.exists.nonzero().tolist(), strict=True):
        assert graph.index(str(edge)) == graph.index(edge) == (row, column)


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_order_is_topological(graph: CircuitGraph) -> None:
    """An edge joins a source to a later layer, or to its own layer's MLP if that is sequential."""
    for edge in graph.edges:
        source, reader = edge.source, edge.destination.node
        if reader.kind == "logits" or source.kind == "input":
            continue
        same = source.layer == reader.layer
        assert source.layer < reader.layer or (
            same and source.kind == "head" and reader.kind == "mlp" and not graph.parallel
        )
    ends = [(e.source, reader) for e in graph.edges for reader in graph.readers_of(e.destination)]
    assert nx.is_directed_acyclic_graph(nx.DiGraph(ends))
    place = {node: index for index, node in enumerate(graph.nodes)}
    assert all(place[source] < place[reader] for source, reader in ends)


def test_a_head_reads_through_its_group() -> None:
    graph = CircuitGraph(2, 4, 2)
    fed_by = graph.feeds[:, graph.source_index("a1.h3")].nonzero()[:, 0].tolist()
    names = [str(graph.destinations[place]) for place in fed_by]
    assert names == ["a1.h3<q>", "a1.kv1<k>", "a1.kv1<v>"]
    fed = graph.feeds[fed_by].any(dim=0).nonzero()[:, 0].tolist()
    assert [str(graph.sources[row]) for row in fed] == ["a1.h2", "a1.h3"]
    readers = graph.readers_of(Destination(Node("kv_head", 0, 1), "k"))
    assert [str(node) for node in readers] == ["a0.h2", "a0.h3"]
    with pytest.raises(ValueError, match="a1.h2 reads a1.kv1<k>"):
        graph.index("m0->a1.h2<k>")


def _scores(graph: CircuitGraph = TINY) -> Scores:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(graph.exists.shape, generator=generator, dtype=torch.float64)
    return Scores(graph, values.where(graph.exists, 0.0), "test")


@pytest.mark.parametrize("size", [0, 1, 5, 46])
def test_the_best_edges_are_kept(size: int) -> None:
    scores = _scores()
    circuit = scores.top(size)
    assert len(circuit) == len(circuit.edges) == size
    names = scores.to_pandas()["edge"].tolist()
    assert {str(edge) for edge in circuit.edges} == set(names[:size])
    helpful = scores.top(size, signed=True)
    kept, dropped = (scores.values[m] for m in (helpful.mask, TINY.exists & ~helpful.mask))
    assert not len(kept) or not len(dropped) or kept.max() <= dropped.min()


def test_large_graphs_are_shown_without_an_object_per_edge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = CircuitGraph(12, 12, 12)
    monkeypatch.setattr(graph_module, "CircuitEdge", None)
    scores = _scores(graph)
    table = scores.to_pandas()
    assert len(table) == 32_491 and table["score"].abs().is_monotonic_decreasing
    best = table["edge"].tolist()
    assert scores.to_pandas(7)["edge"].tolist() == best[:7]
    assert f"{best[0]} {table['score'][0]:.3g}, {best[1]}" in repr(scores)
    assert f"<td>{escape(best[0])}</td>" in scores._repr_html_()
    assert set(scores.top(100).to_pandas()["edge"]) == set(best[:100])


def test_heads_and_attention_edges_are_ranked_like_circuit_edges() -> None:
    heads = Scores(HeadGrid(2, 2), torch.tensor([[0.5, -2.0], [1.0, 0.0]]), "by hand")
    assert heads["a0.h1"] == heads[(0, 1)] == -2
    assert heads.top(2).heads == ((0, 1), (1, 0))
    assert heads.top(1, signed=True).having("a1.h1").without("a0.h1").heads == ((1, 1),)
    assert heads.to_pandas()["head"].tolist() == ["a0.h1", "a1.h0", "a0.h0", "a1.h1"]
    grid = AttentionGrid(1, 2, 3)
    values = torch.zeros(2, 1, 2, 3, 3)
    values[:, 0, 1, 2, 0] = torch.tensor([1.0, 3.0])
    values[:, 0, 0, 1, 1] = torch.tensor([-4.0, 4.0])
    edges = Scores(grid, values, "by hand")
    assert grid.n_parts == 2 * (1 + 2 + 3)
    assert edges["a0.h1:0->2"] == 2 and edges["a0.h0:1->1"] == 0  # means over pairs
    best = edges.to_pandas(1).iloc[0].to_dict()
    assert best == {"edge": "a0.h1:0->2", "layer": 0, "head": 1, "query": 2, "key": 0, "score": 2}
    assert AttentionGrid(1, 2, 3, causal=False).n_parts == 18
    for wrong in ("a0.h1:2->0", "a0.h2:0->2", (0, 1, 0, 2)):
        with pytest.raises(ValueError, match="has no .* among its attention edges"):
            grid.index(wrong)
    with pytest.raises(ValueError, match="such as"):
        grid.index("a0.h1")
    for kept, other in ((heads.top(1), "edges"), (edges.top(1), "heads")):
        with pytest.raises(ValueError, match="consists of"):
            getattr(kept, other)


def test_scores_and_masks_of_another_graph() -> None:
    with pytest.raises(ValueError, match="have the shape"):
        Scores(GPT2_SMALL, _scores().values, "test")
    with pytest.raises(ValueError, match="edges that do not exist"):
        Circuit(TINY, torch.ones_like(TINY.exists))


def test_graphs_move_between_tools() -> None:
    """In the format of EAP-IG, with its keys; and back."""
    scores = _scores()
    circuit = scores.top(5)
    content = json.loads(json.dumps(to_eap_ig(scores, circuit, d_model=16)))
    sizes = {"n_layers": 2, "n_heads": 2, "parallel_attn_mlp": False, "d_model": 16}
    assert content["cfg"] == sizes
    assert set(content["nodes"]) == {str(node) for node in TINY.nodes}
    edge = content["edges"]["a0.h1->a1.h0<q>"]
    assert edge["score"] == scores["a0.h1->a1.h0<q>"]
    again, kept = from_eap_ig(content)
    assert torch.equal(again.values, scores.values)
    assert torch.equal(kept.mask, circuit.mask)
    grouped = _scores(CircuitGraph(2, 4, 2))
    with pytest.raises(ValueError, match="the scores are of"):
        to_eap_ig(grouped, circuit, d_model=16)
    content = to_eap_ig(grouped, grouped.top(5), d_model=16)
    assert len(content["edges"]) == CircuitGraph(2, 4, 4).n_edges
    again, kept = from_eap_ig(content, CircuitGraph(2, 4, 2))
    assert torch.allclose(again.values, grouped.values, rtol=1e-12, atol=0)
    assert torch.equal(kept.mask, grouped.top(5).mask)
    alone = _scores(CircuitGraph(2, 2, 2, has_mlps=False))
    with pytest.raises(ValueError, match="requires a model with MLPs"):
        to_eap_ig(alone, alone.top(5), d_model=16)
    with pytest.raises(KeyError, match="edges"):
        from_eap_ig({"cfg": {}})
