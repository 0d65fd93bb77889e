"""Exact effects of a graph's open attention edges, strongest first, within a given time.

1. Order the edges by their first-order estimates, relative to the largest estimate of each target.
2. Remove one edge at a time, in batches whose size follows from the speed of the last batch.
3. Set effects that were not computed to NaN.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch

from sparse_tl.circuits.prompt.attention_graph import AttentionGraph
from sparse_tl.circuits.prompt.removal import AttentionEdge, LeaveOneOut

_FIRST_BATCH = 8


class EdgeEffects:
    """A graph whose exact effects are computed step by step.

    Args:
        graph: attention graph; with estimates, unless all effects will be computed.
        leave_one_out: runs of its prompt without one edge at a time.
    """

    def __init__(self, graph: AttentionGraph, leave_one_out: LeaveOneOut) -> None:
        self._graph, self._leave_one_out = graph, leave_one_out
        self._to_do = _strongest_first(graph)
        self._effect = torch.zeros(len(graph.targets), *graph.gates.shape, dtype=torch.float64)
        self._effect[:, graph.gates] = torch.nan  # closed edges have no effect

    @property
    def more(self) -> bool:
        """Whether effects remain to be computed."""
        return bool(self._to_do)

    @property
    def graph(self) -> AttentionGraph:
        """The graph with the effects computed so far."""
        return replace(self._graph, effect=self._effect.clone())

    def advance(self, seconds: float | None) -> None:
        """Compute the effects of the next edges.

        Args:
            seconds: approximate time; at least one batch is run. ``None`` computes all effects.
        """
        end = math.inf if seconds is None else time.monotonic() + seconds
        size = len(self._to_do) if seconds is None else _FIRST_BATCH
        while self._to_do:
            start = time.monotonic()
            batch, self._to_do = self._to_do[:size], self._to_do[size:]
            removed = self._leave_one_out.effects(groups=[[edge] for edge in batch])
            self._effect[:, *torch.tensor(batch).T] = removed.effects
            now = time.monotonic()
            if now >= end:
                return
            fitting = size * (end - now) / max(now - start, 1e-9)
            size = int(max(1, min(2 * size, fitting)))


def _strongest_first(graph: AttentionGraph) -> list[AttentionEdge]:
    edges = graph.gates.nonzero()
    if graph.attribution is not None:
        sizes = graph.attribution.abs()
        largest = sizes.flatten(start_dim=1).amax(dim=1).clamp(min=1e-30)
        strength = (sizes / largest[:, None, None, None, None]).amax(dim=0)[graph.gates]
        edges = edges[strength.argsort(descending=True, stable=True)]
    return [(layer, head, query, key) for layer, head, query, key in edges.tolist()]
