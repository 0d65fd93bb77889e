"""Reachability on the grid of levels and columns, by a graph library."""

from __future__ import annotations

import pytest
from jaxtyping import Bool
from torch import Tensor


def reached_by_networkx(
    edges: Bool[Tensor, "layer query key"], column: int, level: int
) -> set[tuple[int, int]]:
    networkx = pytest.importorskip("networkx", reason="networkx is not installed")
    n_layers, n_columns, _ = edges.shape
    graph = networkx.DiGraph()
    graph.add_nodes_from((i, c) for i in range(n_layers + 1) for c in range(n_columns))
    graph.add_edges_from(((i, c), (i + 1, c)) for i in range(n_layers) for c in range(n_columns))
    for layer, query, key in edges.nonzero().tolist():
        graph.add_edge((layer, key), (layer + 1, query))
    return set(networkx.ancestors(graph, (level, column))) | {(level, column)}
