"""Data for the explorer's front end: an exploration as JSON, with visible whitespace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.explorer.exploration import Exploration
from sparse_tl.plots import CircuitDiagram
from sparse_tl.plots.diagrams.circuit_diagram import quantity_data
from sparse_tl.plots.page.token_text import ELLIPSIS, visible_text

MAX_TEXT = 60
"""Maximum number of characters of a token or title."""
MAX_KEYS = 48
"""Maximum number of columns in a node's heat map."""


def figure_payload(figure: CircuitDiagram) -> dict[str, str]:
    """A diagram, with its data as text, since ipywidgets visits every item of a list."""
    return {"svg": figure.svg, "json": figure.json}


def panels_payload(exploration: Exploration) -> list[dict[str, Any]]:
    """For each panel: likely tokens at each predicted column, size of the model, and removals."""
    targets = range(len(exploration.targets))
    panels = []
    for title in exploration.titles:
        graph = exploration.graph(title)
        before_and_after = (values.tolist() for values in exploration.values(title))
        panels.append(
            {
                "name": shown_text(title),
                "shape": [graph.n_layers, graph.n_heads],
                "removedHeads": exploration.removed_heads(title),
                "removedEdges": exploration.removed_attention_edges(title),
                "outputs": [_rows(exploration.output_rows(title, target)) for target in targets],
                "quantity": quantity_data(graph),
                "values": [
                    [short(x) for x in pair] for pair in zip(*before_and_after, strict=True)
                ],
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
        "text": shown_text(graph.input_tokens[column]),
        "keys": [{"key": key, "text": shown_text(graph.input_tokens[key])} for key in keys],
        "nKeys": n_keys,
        "attention": [[round(x, 4) for x in row] for row in attention[:, keys].tolist()],
        "removed": removed[:, keys].tolist(),
        "open": graph.gates[into][:, keys].tolist(),
        "tokens": _rows(tokens.to_dict("records")),
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


def _rows(tokens: Sequence[Mapping[Any, Any]]) -> list[dict[str, Any]]:
    """The rows of a table of tokens, for JSON."""
    return [
        {
            "text": row["token"],
            **{
                str(name): shown_text(value) if isinstance(value, str) else short(value)
                for name, value in row.items()
            },
        }
        for row in tokens
    ]


def shown_text(text: str) -> str:
    """The text for display: every character visible, and clipped."""
    shown = visible_text(text[: MAX_TEXT + 1])
    return shown if len(text) <= MAX_TEXT else shown[:MAX_TEXT] + ELLIPSIS


def short(number: float) -> float:
    """A number rounded to five significant digits."""
    return float(f"{number:.5g}")
