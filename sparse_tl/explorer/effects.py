"""Exact effects for the explorer's cards and lines, computed in pieces.

Removing every head and every edge into a node takes hundreds of forward passes, so the figure is
shown first, and the front end then requests effects until all are known. A piece is the heads of
one or two layers, a head's edges into a node, or some of the diagram's edges; other requests are
answered between pieces. Effects of the diagram's edges are computed while it shows them, strongest
first, for 3 seconds per model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product, zip_longest
from typing import Any

from sparse_tl.circuits.prompt.attention_graph import EdgeWeight
from sparse_tl.circuits.prompt.removal import AttentionEdge, RemovalEffects
from sparse_tl.circuits.prompt.trace import EFFECT_SECONDS
from sparse_tl.explorer.exploration import Exploration
from sparse_tl.explorer.payload import short, shown_text

TargetEffects = list[tuple[float, float, str]]
"""For each target: changes of the metric and of the answer's probability, and the prediction."""


class ExactEffects:
    """The effects that are known so far, and a queue of the others.

    Args:
        exploration: models in their current state; after a change, make a new object.
    """

    def __init__(self, exploration: Exploration) -> None:
        self._exploration = exploration
        self._heads: list[dict[str, TargetEffects]] = [{} for _ in exploration.titles]
        self._node: dict[str, TargetEffects] | None = None
        pieces = [_pieces(exploration.graph(title).n_layers) for title in exploration.titles]
        self._pending_heads = [
            partial(self._compute_heads, title, layers)
            for of_models in zip_longest(*pieces)
            for title, layers in zip(exploration.titles, of_models, strict=True)
            if layers is not None
        ]
        self._pending_edges: list[Callable[[], None]] = []
        # Seconds left for the edges of each model's diagram.
        self._seconds = dict.fromkeys(exploration.titles, EFFECT_SECONDS)
        self._draws = False

    @property
    def more(self) -> bool:
        """Whether any effects are left to compute."""
        return bool(self._pending_heads or self._pending_edges or self._pending_lines)

    @property
    def _pending_lines(self) -> list[str]:
        """The models whose lines are left to compute."""
        return [title for title, left in self._seconds.items() if left > 0 and self._draws]

    def draw(self, weight: EdgeWeight) -> None:
        """Compute the effects of the diagram's edges next, if it shows them."""
        self._draws = weight == "effect"

    @property
    def payload(self) -> dict[str, Any]:
        """The known effects by head, for each panel, and by edge, for the node."""
        return {"heads": [dict(heads) for heads in self._heads], "node": self._node}

    def look_at(self, node: Mapping[str, Any] | None) -> None:
        """Compute the effects of the edges of another node next.

        Args:
            node: the node, as from `payload.node_payload`, or None.
        """
        self._node, self._pending_edges = None, []
        if node is None:
            return
        exploration = self._exploration
        title = exploration.titles[node["panel"]]
        layer, column = node["level"] - 1, node["column"]
        gates = exploration.graph(title).gates
        self._node = {}
        keys = [key["key"] for key in node["keys"]]
        if layer < 0:  # edges from the input token to other positions
            read = gates[..., column].clone()
            read[..., column] = False
            edges = [(at, head, query, column) for at, head, query in read.nonzero().tolist()]
            by_head = []
        else:
            into = gates[layer, :, column]
            edges = [(layer, head, column, key) for head, key in into.nonzero().tolist()]
            by_head = [
                [[(layer, head, column, key)] for key in keys if into[head, key]]
                for head in range(len(into))
            ]
        pieces = [*([[edges]] if edges else []), *filter(None, by_head)]
        self._pending_edges = [partial(self._compute_edges, title, group) for group in pieces]

    def advance(self, seconds: float) -> bool:
        """Compute a piece, and more while there is time for another that takes as long.

        Returns:
            Whether effects of the diagram's edges were among them.
        """
        end, computed_lines = time.monotonic() + seconds, False
        while self.more:
            start = time.monotonic()
            if self._pending_edges:
                self._pending_edges.pop(0)()
            elif self._pending_lines:
                computed_lines = True
                self._compute_lines(self._pending_lines[0])
            else:
                self._pending_heads.pop(0)()
            now = time.monotonic()
            if now + (now - start) > end:
                break
        return computed_lines

    def _compute_lines(self, title: str) -> None:
        start, left = time.monotonic(), self._seconds[title]
        more = self._exploration.compute_edge_effects(title, min(1.0, left))
        self._seconds[title] = left - (time.monotonic() - start) if more else 0.0

    def _compute_heads(self, title: str, layers: Sequence[int]) -> None:
        effects = self._exploration.head_effects(title, layers)
        known = self._heads[self._exploration.titles.index(title)]
        heads = product(layers, range(self._exploration.graph(title).n_heads))
        for (layer, head), by_target in zip(heads, self._by_target(title, effects), strict=True):
            known[f"{layer},{head}"] = by_target

    def _compute_edges(self, title: str, groups: Sequence[Sequence[AttentionEdge]]) -> None:
        effects = self._exploration.attention_edge_effects(title, groups)
        self._node = dict(self._node or {})
        for group, by_target in zip(groups, self._by_target(title, effects), strict=True):
            self._node.setdefault("all", by_target)  # the first group has all edges of the node
            if len(group) == 1:  # also the first group, if the node has a single edge
                self._node[",".join(map(str, group[0]))] = by_target

    def _by_target(self, title: str, effects: RemovalEffects) -> list[TargetEffects]:
        """For each part, its effects on every target."""
        text_of = partial(self._exploration.output_text, title)
        arrays = effects.effects.T, effects.probabilities.T, effects.predictions.T
        return [
            [
                (short(effect), short(probability), shown_text(text_of(target, token)))
                for target, (effect, probability, token) in enumerate(zip(*part, strict=True))
            ]
            for part in zip(*(array.tolist() for array in arrays), strict=True)
        ]


def _pieces(n_layers: int) -> list[range]:
    """Groups of layers whose heads are removed in one pass; the last layers, the fastest, first.

    Two layers together take a fifth less time than one by one. The layers of the upper half
    come one by one, so that a reader who moves on soon does not wait long.
    """
    half = n_layers // 2
    upper = [range(layer, layer + 1) for layer in reversed(range(half, n_layers))]
    return upper + [range(max(0, stop - 2), stop) for stop in range(half, 0, -2)]
