"""The neurons that the card of an MLP lists on a component diagram's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparse_tl.circuits import DrivingToken, NeuronEffects
from sparse_tl.circuits.paths import PathGraph
from sparse_tl.plots.page.token_text import running_text, visible_text

Neurons = NeuronEffects | Sequence[NeuronEffects]

_BEFORE, _TOKEN, _AFTER = 80, 40, 40
"""Maximum number of characters shown before, in and after a token."""


def neuron_lists(
    neurons: Mapping[str, Neurons] | Neurons | None, panels: Mapping[str, PathGraph]
) -> list[dict[str, Any]]:
    """The neurons of each panel, by the name of their MLP.

    Args:
        neurons: neurons by panel name, or for all panels.
        panels: circuits by panel name.

    Raises:
        ValueError: a named panel does not exist, or no panel has the MLP.
    """
    by_panel = neurons if isinstance(neurons, Mapping) else dict.fromkeys(panels, neurons)
    drawn = {str(node.component) for graph in panels.values() for node in graph.nodes}
    found = {name: dict[str, Any]() for name in panels}
    for name, given in by_panel.items():
        if name not in panels:
            raise ValueError(f"expected neurons for a panel, one of {list(panels)}; got {name!r}")
        for result in [given] if isinstance(given, NeuronEffects) else given or []:
            if result.mlp not in drawn:
                raise ValueError(
                    f"expected neurons of an MLP with edges in a panel; {result.mlp} has none"
                )
            found[name][result.mlp] = _listed(result)
    return [*found.values()]


def _listed(result: NeuronEffects) -> dict[str, Any]:
    rows: list[Any] = result.to_pandas().head(len(result.tokens)).to_dict("records")
    return {
        "count": len(result.score),
        "readers": [visible_text(name[:_TOKEN]) for name in result.readers],
        "rows": [
            {
                "name": row["neuron"],
                "effect": row["effect"],
                "means": [row["clean"], row["corrupted"]],
                "tokens": [_shown(token) for token in result.tokens[row["neuron"]]],
                "promotes": _texts(result.promotes[row["neuron"]]),
                "suppresses": _texts(result.suppresses[row["neuron"]]),
            }
            for row in rows
        ],
    }


def _shown(token: DrivingToken) -> dict[str, Any]:
    parts = token.before[-_BEFORE:], token.token[:_TOKEN], token.after[:_AFTER]
    return {"text": [*map(running_text, parts)], "values": [token.clean, token.corrupted]}


def _texts(tokens: Sequence[str]) -> list[str]:
    return [visible_text(token[:_TOKEN]) for token in tokens]
