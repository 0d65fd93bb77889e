"""Exact effects for the explorer's cards and lines, computed piece by piece.

Leaving out every head and every edge into a node takes as long as hundreds of prompts, so that the
figure comes first. The front end then asks for effects until all are known; a piece is a layer's
heads, the edges of a head, or some of the diagram's edges, and other requests are answered between
pieces. The diagram's edges are computed while it shows effects, strongest first, for 3 seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sparse_tl.circuits.attention_graph import EdgeWeight
from sparse_tl.circuits.removal import AttentionEdge, RemovalEffects
from sparse_tl.circuits.trace import EFFECT_SECONDS
from sparse_tl.explorer.exploration import Exploration
from sparse_tl.explorer.payload import short, shown_text

Told = list[tuple[float, float, str]]
"""For each target: change of the metric and of the answer's probability, and what is predicted."""


class ExactEffects:
    """The effects that are known so far, and those that are still to be computed.

    Args:
        exploration: models in their present state; another state needs a new object.
    """

    def __init__(self, exploration: Exploration) -> None:
        self._exploration = exploration
        self._heads: list[dict[str, Told]] = [{} for _ in exploration.titles]
        self._node: dict[str, Told] | None = None
        layers = {title: exploration.graph(title).n_layers for title in exploration.titles}
        # The last layers are the quickest.
        self._to_do = [
            partial(self._tell_heads, title, layer)
            for layer in reversed(range(max(layers.values())))
            for title in exploration.titles
            if layer < layers[title]
        ]
        self._node_to_do: list[Callable[[], None]] = []
        # Of each model, how long its diagram's edges may still take.
        self._seconds = dict.fromkeys(exploration.titles, EFFECT_SECONDS)
        self._draws = False

    @property
    def more(self) -> bool:
        """Whether some are still to be computed."""
        return bool(self._to_do or self._node_to_do or self._lines_to_do)

    @property
    def _lines_to_do(self) -> list[str]:
        """The models whose lines are next."""
        return [title for title, left in self._seconds.items() if left > 0 and self._draws]

    def draw(self, weight: EdgeWeight) -> None:
        """Compute the effects of the diagram's edges next, if it shows them."""
        self._draws = weight == "effect"

    @property
    def payload(self) -> dict[str, Any]:
        """The known effects by head, for each panel, and by edge, for the node."""
        return {"heads": [dict(heads) for heads in self._heads], "node": self._node}

    def look_at(self, node: Mapping[str, Any] | None) -> None:
        """Compute the effects of another node's edges next.

        Args:
            node: what `payload.node_payload` says of it; None for no node.
        """
        self._node, self._node_to_do = None, []
        if node is None:
            return
        exploration = self._exploration
        title = exploration.titles[node["panel"]]
        layer, column = node["level"] - 1, node["column"]
        gates = exploration.graph(title).gates
        self._node = {}
        keys = [key["key"] for key in node["keys"]]
        if layer < 0:  # all that others read from the input token
            read = gates[..., column].clone()
            read[..., column] = False
            every = [(at, head, query, column) for at, head, query in read.nonzero().tolist()]
            rows = []
        else:
            into = gates[layer, :, column]
            every = [(layer, head, column, key) for head, key in into.nonzero().tolist()]
            rows = [
                [[(layer, head, column, key)] for key in keys if into[head, key]]
                for head in range(len(into))
            ]
        groups = [*([[every]] if every else []), *filter(None, rows)]
        self._node_to_do = [partial(self._tell_edges, title, piece) for piece in groups]

    def advance(self, seconds: float) -> bool:
        """Compute at least one piece, and more while there is time for another of the same length.

        Returns:
            Whether effects of the diagram's edges were among them.
        """
        end, drawn = time.monotonic() + seconds, False
        while self.more:
            start = time.monotonic()
            if self._node_to_do:
                self._node_to_do.pop(0)()
            elif self._lines_to_do:
                drawn = True
                self._tell_lines(self._lines_to_do[0])
            else:
                self._to_do.pop(0)()
            now = time.monotonic()
            if now + (now - start) > end:
                break
        return drawn

    def _tell_lines(self, title: str) -> None:
        start, left = time.monotonic(), self._seconds[title]
        more = self._exploration.compute_edge_effects(title, min(1.0, left))
        self._seconds[title] = left - (time.monotonic() - start) if more else 0.0

    def _tell_heads(self, title: str, layer: int) -> None:
        found = self._exploration.head_effects(title, layer)
        known = self._heads[self._exploration.titles.index(title)]
        for head, told in enumerate(self._told(title, found)):
            known[f"{layer},{head}"] = told

    def _tell_edges(self, title: str, groups: Sequence[Sequence[AttentionEdge]]) -> None:
        found = self._exploration.attention_edge_effects(title, groups)
        self._node = dict(self._node or {})
        for group, told in zip(groups, self._told(title, found), strict=True):
            self._node.setdefault("all", told)  # the first group is all edges of the node
            # An edge that is alone among those into a node is the edge and all of them.
            if len(group) == 1:
                self._node[",".join(map(str, group[0]))] = told

    def _told(self, title: str, found: RemovalEffects) -> list[Told]:
        """The effects of each part."""
        text_of = partial(self._exploration.output_text, title)
        numbers = found.effects.T, found.probabilities.T, found.predictions.T
        return [
            [
                (short(effect), short(probability), shown_text(text_of(target, token)))
                for target, (effect, probability, token) in enumerate(zip(*of_targets, strict=True))
            ]
            for of_targets in zip(*(each.tolist() for each in numbers), strict=True)
        ]
