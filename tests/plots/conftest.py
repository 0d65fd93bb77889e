"""Hand-made flows with known circuits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from component_examples import Scored

from sparse_tl.circuits import Circuit, Scores
from sparse_tl.circuits.prompt.attention import AttentionGraph
from sparse_tl.graph import CircuitGraph

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from random_circuit import random_scores

INPUT = tuple("36+28=?????")
OUTPUT = tuple("36+28=00064")
TARGETS = tuple((column, column) for column in range(6, 11))

CIRCUIT = {
    # (layer, head, query, key): weight
    (0, 1, 9, 0): 0.42,
    (0, 1, 9, 1): 0.55,
    (0, 2, 9, 3): 0.48,
    (0, 2, 9, 4): 0.61,
    (1, 3, 10, 9): 0.93,
}
"""The four digits meet in the column of the `6`, which passes the result to the last column."""


def _flow(edges: dict[tuple[int, int, int, int], float], **changes: Any) -> AttentionGraph:
    attention = torch.zeros(4, 4, 11, 11)
    for place, value in edges.items():
        attention[place] = value
    fields: dict[str, Any] = {
        "attention": attention,
        "gates": attention != 0,
        "input_tokens": INPUT,
        "output_tokens": OUTPUT,
        "targets": TARGETS,
    }
    return AttentionGraph(**(fields | changes))


def _random_flow(
    n_layers: int = 4,
    n_heads: int = 4,
    input_tokens: tuple[str, ...] = INPUT,
    output_tokens: tuple[str, ...] = OUTPUT,
    targets: tuple[tuple[int, int], ...] = TARGETS,
    sharpness: float = 1.8,
    seed: int = 0,
) -> AttentionGraph:
    generator = torch.Generator().manual_seed(seed)
    n = len(input_tokens)
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    scores = sharpness * torch.randn(n_layers, n_heads, n, n, generator=generator)
    attention = scores.masked_fill(~causal, -torch.inf).softmax(dim=-1)
    gradient = torch.randn(len(targets), n_layers, n_heads, n, n, generator=generator)
    return AttentionGraph(
        attention=attention,
        gates=causal.expand_as(attention),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        targets=targets,
        attribution=attention * gradient,
    )


@pytest.fixture(scope="session")
def make_flow() -> Callable[..., AttentionGraph]:
    """Makes the flow with the given attention edges and no others."""
    return _flow


@pytest.fixture(scope="session")
def make_random_flow() -> Callable[..., AttentionGraph]:
    """Makes a dense flow: every causal pair is open, with attribution."""
    return _random_flow


@pytest.fixture
def circuit() -> dict[tuple[int, int, int, int], float]:
    return dict(CIRCUIT)


@pytest.fixture(scope="session")
def sparse_flow() -> AttentionGraph:
    return _flow(CIRCUIT)


@pytest.fixture(scope="session")
def dense_flow() -> AttentionGraph:
    return _random_flow()


@pytest.fixture(scope="session")
def two_panels(
    dense_flow: AttentionGraph, sparse_flow: AttentionGraph
) -> dict[str, AttentionGraph]:
    return {"Base Model": dense_flow, "Sparse Model": sparse_flow}


def _scored_circuit(
    edges: dict[str, float], graph: CircuitGraph | None = None, scored: bool = True
) -> Scored:
    graph = graph or CircuitGraph(3, 2, 2)
    scores = torch.zeros(graph.exists.shape)
    mask = torch.zeros_like(graph.exists)
    for name, score in edges.items():
        index = graph.index(name)
        scores[index], mask[index] = score, True
    return Scored(Circuit(graph, mask), Scores(graph, scores, "eap") if scored else None)


def _random_circuit(
    n_layers: int = 4, n_heads: int = 4, n_edges: int = 60, seed: int = 0, **sizes: Any
) -> Scored:
    scores = random_scores(n_layers, n_heads, seed, **sizes)
    mask = torch.zeros_like(scores.grid.exists)
    best = scores.values.abs().flatten().argsort(descending=True)[:n_edges]
    mask.view(-1)[best] = True
    return Scored(Circuit(scores.grid, mask), scores)


@pytest.fixture(scope="session")
def make_circuit() -> Callable[..., Scored]:
    """Makes the circuit of the edges with these names and scores, of 3 layers and 2 heads."""
    return _scored_circuit


@pytest.fixture(scope="session")
def make_random_circuit() -> Callable[..., Scored]:
    """Makes a circuit of so many edges, with scores over several orders of magnitude."""
    return _random_circuit
