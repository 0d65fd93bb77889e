"""What the front end of the explorer is sent: an exploration as JSON, every text made visible."""

from __future__ import annotations

from typing import Any

from sparse_tl.explorer.session import Exploration, NodeReading, TokenScore
from sparse_tl.plots.token_text import visible_text

MAX_KEYS = 48
"""Columns of the heat map of a node at most."""

Node = tuple[str, int, int]
"""Panel, level and column."""


def panels_payload(exploration: Exploration) -> list[dict[str, Any]]:
    """For each panel the likely tokens of each predicted column, its heads, and what is removed."""
    return [_panel_payload(exploration, title) for title in exploration.titles]


def _panel_payload(exploration: Exploration, title: str) -> dict[str, Any]:
    shape = exploration.shape(title)
    effects = exploration.head_effects(title)
    by_head = (len(exploration.targets), shape.n_layers, shape.n_heads)
    return {
        "name": visible_text(title),
        "shape": [shape.n_layers, shape.n_heads],
        "headEffects": _rounded(effects.logits.reshape(by_head).tolist()),
        "removedHeads": exploration.removed_heads(title),
        "removedEdges": exploration.removed_edges(title),
        "outputs": [
            [
                {
                    "text": visible_text(change.text),
                    "before": _score(change.before),
                    "after": _score(change.after),
                }
                for change in exploration.outputs(title, target)
            ]
            for target in range(len(exploration.targets))
        ],
    }


def node_payload(exploration: Exploration, node: Node) -> dict[str, Any]:
    """What one node attends to and would predict."""
    title, level, column = node
    reading = exploration.node(title, level, column)
    keys = _strongest_keys(reading)
    flow = exploration.flow(title)
    return {
        "panel": exploration.titles.index(title),
        "level": level,
        "column": column,
        "text": visible_text(flow.input_tokens[column]),
        "keys": [{"key": key, "text": visible_text(flow.input_tokens[key])} for key in keys],
        "nKeys": column + 1,
        "attention": [[round(x, 4) for x in row] for row in reading.attention[:, keys].tolist()],
        "removed": reading.removed[:, keys].tolist(),
        "tokens": [
            {"text": visible_text(token.text), "after": _score(token)} for token in reading.tokens
        ],
    }


def _strongest_keys(reading: NodeReading) -> list[int]:
    """The columns that the heat map shows: all of them, or those with the most attention."""
    n_keys = reading.attention.shape[-1]
    if n_keys <= MAX_KEYS or not len(reading.attention):
        return list(range(n_keys))
    weights = reading.attention.amax(dim=0)
    weights[reading.removed.any(dim=0)] = 2.0  # what is removed must stay in reach
    return sorted(weights.topk(MAX_KEYS).indices.tolist())


def _score(token: TokenScore) -> list[float]:
    return [_short(token.logit), _short(token.probability)]


def _rounded(numbers: list[Any]) -> list[Any]:
    return [_rounded(n) if isinstance(n, list) else _short(n) for n in numbers]


def _short(number: float) -> float:
    return float(f"{number:.5g}")
