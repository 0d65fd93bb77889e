"""Attention graphs: what they hold, and how they are saved and shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparse_tl.circuits.prompt.attention_graph import AttentionGraph


def graph_fields(n_layers: int = 2, n_heads: int = 3, n_columns: int = 4) -> dict[str, Any]:
    attention = torch.rand(n_layers, n_heads, n_columns, n_columns).tril()
    return {
        "attention": attention,
        "gates": attention > 0,
        "input_tokens": ("a",) * n_columns,
        "output_tokens": ("b",) * n_columns,
        "targets": ((1, 0), (3, 2)),
    }


def test_sizes_of_a_graph():
    graph = AttentionGraph(**graph_fields())
    assert (graph.n_layers, graph.n_heads, graph.n_columns) == (2, 3, 4)


def test_edge_weights():
    fields = graph_fields()
    attribution, effect = torch.randn(2, 2, 2, 3, 4, 4)
    graph = AttentionGraph(**fields, attribution=attribution, effect=effect)
    assert graph.edge_weights() is graph.attention
    assert torch.equal(graph.edge_weights("first-order"), attribution[1])
    assert torch.equal(graph.edge_weights("effect", 0), effect[0])
    for kind, option in (("effect", "max_effects"), ("first-order", "attribution=True")):
        with pytest.raises(ValueError, match=f"{kind}.*{option}"):
            AttentionGraph(**fields).edge_weights(kind)


def test_a_graph_is_saved_tabulated_and_told(tmp_path):
    attention = torch.zeros(1, 2, 3, 3)
    attention[0, 1, 2, 0], attention[0, 0, 1, 1] = 0.25, 0.5
    graph = AttentionGraph(
        attention, attention > 0, ("a", "b", "?"), ("a", "b", "c"), ((2, 2),),
        effect=-4 * attention[None],
    )  # fmt: skip
    restored = AttentionGraph.load(graph.save(tmp_path / "graph"))
    assert torch.equal(restored.gates, graph.gates) and restored.targets == ((2, 2),)
    assert restored.attribution is None and torch.equal(restored.effect, graph.effect)
    assert graph.to_pandas().to_numpy().tolist() == [[0, 0, 1, 1, 0.5, -2], [0, 1, 2, 0, 0.25, -1]]
    said = "AttentionGraph('a b ?': 2 of 12 attention edges open"
    assert repr(graph) == f"{said}; effects on answer_logit, in logits)"  # as of old graphs
    assert "effect" in graph._repr_html_()
    assert repr(replace(graph, effect=None)) == f"{said})"
    own = replace(graph, metric="my_rank", answers=("c",), wrong=("d",))
    assert repr(own) == f"{said}; effects on my_rank)"
    restored = AttentionGraph.load(own.save(tmp_path / "own"))
    assert (restored.metric, restored.answers, restored.wrong) == ("my_rank", ("c",), ("d",))
