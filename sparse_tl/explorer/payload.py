"""Data for the explorer's page, as JSON with visible whitespace; exact effects come in pieces.

Removing every head and every edge into a node takes hundreds of forward passes, so the figure is
shown first, and the page then requests effects until all are known. A piece is the heads of a
layer, a head's edges into a node, or some of the diagram's edges; other requests are answered
between pieces. Effects of the diagram's edges are computed while it shows them, strongest first,
for 3 seconds per model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.circuits.prompt.attention_graph import EdgeWeight
from sparse_tl.circuits.prompt.removal import AttentionEdge, RemovalEffects
from sparse_tl.circuits.prompt.trace import EFFECT_SECONDS
from sparse_tl.explorer.exploration import Exploration
from sparse_tl.plots.diagrams.circuit_diagram import quantity_data
from sparse_tl.plots.page.token_text import ELLIPSIS, visible_text

MAX_TEXT = 60
"""Maximum number of characters of a token or title."""
MAX_KEYS = 48
"""Maximum number of columns in a node's heat map."""

TargetEffects = list[tuple[float, float, str]]
"""For each target: changes of the metric and of the answer's probability, and the prediction."""


def panels_payload(exploration: Exploration) -> list[dict[str, Any]]:
    """For each panel: likely tokens at each predicted column, size of the model, and removals."""
    targets = range(len(exploration.targets))
    panels = []
    for title in exploration.titles:
        graph = exploration.graph(title)
        before_and_after = zip(*(x.tolist() for x in exploration.values(title)), strict=True)
        panels.append(
            {
                "name": _shown(title),
                "shape": [graph.n_layers, graph.n_heads],
                "removedHeads": exploration.removed_heads(title),
                "removedEdges": exploration.removed_attention_edges(title),
                "outputs": [_rows(exploration.outputs(title, target)) for target in targets],
                "quantity": quantity_data(graph),
                "values": [[_short(x) for x in pair] for pair in before_and_after],
            }
        )
    return panels


def node_payload(exploration: Exploration, title: str, level: int, column: int) -> dict[str, Any]:
    """What a node attends to, and its logit lens."""
    tokens = exploration.logit_lens(title, level, column)  # first, since it checks the node
    graph = exploration.graph(title)
    n_keys = column + 1 if graph.causal else exploration.n_read
    into = max(level - 1, 0), slice(None) if level else slice(0, 0), column, slice(n_keys)
    attention, removed = graph.attention[into], exploration.removed(title)[into]
    keys = _strongest_keys(attention, removed)
    return {
        "panel": exploration.titles.index(title),
        "level": level,
        "column": column,
        "text": _shown(graph.input_tokens[column]),
        "keys": [{"key": key, "text": _shown(graph.input_tokens[key])} for key in keys],
        "nKeys": n_keys,
        "attention": [[round(x, 4) for x in row] for row in attention[:, keys].tolist()],
        "removed": removed[:, keys].tolist(),
        "open": graph.gates[into][:, keys].tolist(),
        "tokens": _rows(tokens),
    }


def _strongest_keys(
    attention: Float[Tensor, "head key"], removed: Bool[Tensor, "head key"]
) -> list[int]:
    """The columns in the heat map: all, or those with the most attention."""
    n_keys = attention.shape[-1]
    if n_keys <= MAX_KEYS or not len(attention):
        return list(range(n_keys))
    weights = attention.amax(dim=0)
    weights[removed.any(dim=0)] = 2.0  # removed edges must remain clickable
    return sorted(weights.topk(MAX_KEYS).indices.tolist())


def _rows(tokens: pd.DataFrame) -> list[dict[Any, Any]]:
    """The rows of a table of tokens."""
    numbers = tokens.drop(columns="token").map(_short)
    return numbers.assign(text=tokens["token"], token=tokens["token"].map(_shown)).to_dict(
        "records"
    )


def _shown(text: str) -> str:
    """The text for display: every character visible, and clipped."""
    shown = visible_text(text[: MAX_TEXT + 1])
    return shown if len(text) <= MAX_TEXT else shown[:MAX_TEXT] + ELLIPSIS


def _short(number: float) -> float:
    """A number rounded to five significant digits."""
    return float(f"{number:.5g}")


class ExactEffects:
    """The effects that are known so far, and a queue of the others.

    Args:
        exploration: models in their current state; after a change, make a new object.
        weight: what the lines of the diagram show.
        node: the node of the open card, from `node_payload`; its edges come first.
    """

    def __init__(
        self, exploration: Exploration, weight: EdgeWeight, node: Mapping[str, Any] | None
    ) -> None:
        self._exploration, self.weight = exploration, weight
        titles = exploration.titles
        self._heads: list[dict[str, TargetEffects]] = [{} for _ in titles]
        layers = [(layer, t) for t in titles for layer in range(exploration.graph(t).n_layers)]
        layers.sort(key=lambda piece: -piece[0])  # the last layers are the fastest
        self._pending_heads = [partial(self._compute_heads, t, layer) for layer, t in layers]
        # Seconds left for the edges of each model's diagram.
        self._seconds = dict.fromkeys(titles, EFFECT_SECONDS)
        self.look_at(node)

    @property
    def more(self) -> bool:
        """Whether any effects are left to compute."""
        return bool(self._pending_heads or self._pending_edges or self._pending_lines)

    @property
    def _pending_lines(self) -> list[str]:
        """The models whose lines are left to compute, if the diagram shows effects."""
        shown = self.weight == "effect"
        return [title for title, left in self._seconds.items() if left > 0 and shown]

    @property
    def payload(self) -> dict[str, Any]:
        """The known effects by head, for each panel, and by edge, for the node."""
        return {"heads": [dict(heads) for heads in self._heads], "node": self._node}

    def look_at(self, node: Mapping[str, Any] | None) -> None:
        """Compute the effects of the edges of another node next."""
        self._node: dict[str, TargetEffects] | None = None
        self._pending_edges: list[Callable[[], None]] = []
        if node is None:
            return
        title = self._exploration.titles[node["panel"]]
        layer, column = node["level"] - 1, node["column"]
        gates = self._exploration.graph(title).gates
        self._node = {}
        if layer < 0:  # edges from the input token to other positions
            read = gates[..., column].clone()
            read[..., column] = False
            edges = [(at, head, query, column) for at, head, query in read.nonzero().tolist()]
            pieces = [[edges]]
        else:
            into = gates[layer, :, column]
            edges = [(layer, head, column, key) for head, key in into.nonzero().tolist()]
            keys = [key["key"] for key in node["keys"]]
            pieces = [[edges]] + [
                [[(layer, head, column, key)] for key in keys if into[head, key]]
                for head in range(len(into))
            ]
        if edges:
            self._pending_edges = [partial(self._compute_edges, title, g) for g in pieces if g]

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
        more = self._exploration.model(title).compute_edge_effects(min(1.0, left))
        self._seconds[title] = left - (time.monotonic() - start) if more else 0.0

    def _compute_heads(self, title: str, layer: int) -> None:
        effects = self._exploration.head_effects(title, [layer])
        known = self._heads[self._exploration.titles.index(title)]
        for head, by_target in enumerate(self._by_target(title, effects)):
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
        text_of, targets = self._exploration.model(title).output_text, self._exploration.targets
        arrays = effects.effects.T, effects.probabilities.T, effects.predictions.T
        return [
            [
                (_short(effect), _short(probability), _shown(text_of(token, read_at)))
                for (_, read_at), effect, probability, token in zip(targets, *part, strict=True)
            ]
            for part in zip(*(array.tolist() for array in arrays), strict=True)
        ]
