"""Random scores of circuit edges like those of real circuits, for benchmarks and tests."""

from __future__ import annotations

from typing import Any

import torch

from sparse_tl import CircuitGraph, Scores


def random_scores(n_layers: int, n_heads: int, seed: int = 0, **sizes: Any) -> Scores:
    """Scores over several orders of magnitude, from half of the sources, and often from the input
    and into the logits."""
    generator = torch.Generator().manual_seed(seed)
    graph = CircuitGraph(n_layers, n_heads, **({"n_kv_heads": n_heads} | sizes))
    values = torch.randn(graph.exists.shape, generator=generator) ** 3
    busy = torch.rand(len(graph.sources), 1, generator=generator) < 0.5
    busy[0] = True
    values = values * graph.exists * busy
    values[0] *= 3
    values[:, -1] *= 5
    return Scores(graph, values, "random")
