"""The data of a component diagram's script, and the state that its page saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from sparse_tl.calls.arguments import AtLeastOne, checked
from sparse_tl.circuits.paths import PathGraph, in_order
from sparse_tl.plots.page.token_text import visible_text
from sparse_tl.storage.files import read_json

STATE_FORMAT = "sparse_tl component diagram 1"

LinkColour = Literal["slot", "sign"]
Ranking = Literal["influence", "score"]


@checked
@dataclass(frozen=True)
class View:
    """The reader's choices of what to show.

    Args:
        edges: number of circuit edges; the path of the last one is completed.
        by: ranking of edges.
        slots: whether q, k and v of a head are drawn separately.
        off_path: whether edges on no path from input to logits are drawn.
        colour: what the colour of a link encodes.
        difference: whether two circuits are drawn as one, coloured by which has a link.
        groups: members of every supernode, by name.
        pins: nodes that are always shown, with the most influential path through them.
        labels: texts that replace names of nodes.
        notes: notes on nodes.
    """

    edges: AtLeastOne = 100
    by: Ranking = "influence"
    slots: bool = False
    off_path: bool = False
    colour: LinkColour = "slot"
    difference: bool = False
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pins: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


def read_view(state: str | Path | Mapping[str, Any] | None, view: View) -> View:
    """The view in a state saved by a page.

    Args:
        state: path of the file, its content, or None.
        view: view with the defaults of fields that the state lacks.

    Raises:
        ValueError: it is not such a state, or a field has the wrong type.
    """
    if state is None:
        return view
    content = state if isinstance(state, Mapping) else read_json(Path(state))
    if not isinstance(content, Mapping) or content.get("format") != STATE_FORMAT:
        raise ValueError(
            f"expected a state saved by a component diagram, with format {STATE_FORMAT!r}; "
            f"got {str(content)[:80]}"
        )
    given = {key: value for key, value in content.items() if key != "format"}
    try:
        return replace(view, **given)
    except (TypeError, ValueError) as error:
        names = ", ".join(field.name for field in fields(View))
        raise ValueError(
            f"expected fields {names} in the state of a diagram; {str(error)[:200]}"
        ) from error


def nodes_and_links(graphs: Mapping[str, PathGraph]) -> tuple[list[Any], list[dict[str, Any]]]:
    """The nodes of all circuits, and the links of each circuit between these, by index."""
    nodes = in_order({node for graph in graphs.values() for node in graph.nodes})
    index = {node: i for i, node in enumerate(nodes)}
    rows = [
        [
            visible_text(str(node)),
            node.kind,
            node.step,
            node.position,
            None if node.kind in ("input", "logits") else node.component.layer,
        ]
        for node in nodes
    ]
    panels = []
    for name, graph in graphs.items():
        at = [index[node] for node in graph.nodes]
        into, out = graph.best
        weights = [link.weight for link in graph.links]
        panels.append(
            {
                "name": visible_text(name[:200]),
                "names": graph.names,
                "scores": graph.scores and [float(f"{score:.6g}") for score in graph.scores],
                "lines": [
                    [at[link.source], at[link.reader], link.slot or "", link.edge]
                    + ([] if link.edge >= 0 else [float(f"{link.weight:.6g}")])
                    for link in graph.links
                ],
                "influence": [float(f"{value:.4g}") for value in graph.influence],
                "order": {
                    "influence": graph.order(graph.influence),
                    "score": graph.order(weights),
                },
                "into": {at[node]: link for node, link in into.items()},
                "out": {at[node]: link for node, link in out.items()},
            }
        )
    return rows, panels
