"""Attribution graphs as diagrams: columns are tokens, rows are layers, links are flows.

The figure is a component diagram (`sparse_tl.plots.diagrams.component_diagram`), whose page it
shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.circuits import AttributionGraph
from sparse_tl.circuits.paths import Link, PathGraph, PositionedNode
from sparse_tl.graph import Node
from sparse_tl.plots.diagrams.component_diagram import (
    MOST_EDGES,
    ComponentDiagram,
    View,
    diagram_of,
    panel_of,
    read_view,
    row_of,
    shown_texts,
)
from sparse_tl.plots.page.rendering import by_title
from sparse_tl.plots.page.token_text import running_text, visible_text

_KINDS: dict[str, Any] = {"embedding": "input", "attention edge": "head", "target": "logits"}
"""The shape of each kind of node; that of all others is an MLP's."""
_WORDS = {
    "edges": "links",
    "value": "flow",
    "helps": "raises the target",
    "hurts": "lowers the target",
}


@checked
def attribution_diagram(
    panels: Mapping[str, AttributionGraph] | AttributionGraph,
    *,
    max_nodes: AtLeastOne = 40,
    state: str | Path | Mapping[str, Any] | None = None,
    transition: str | None = "Sparsity-Regularised Finetuning",
    title: str | None = None,
) -> ComponentDiagram:
    """Draw how a prompt's tokens, attention edges and neurons make a logit.

    Links are chosen by their influence on the target, as those of `component_diagram`, each with
    its whole path, until they connect `max_nodes` nodes. The page holds the 2,000 links with the
    largest absolute flow, and the strongest link into and out of each node. Labels and groups that
    graphs have from `AttributionGraph.with_labels` are shown.

    Args:
        panels: graphs of one prompt by panel name, in order, such as of a dense and a sparse model;
            or one graph.
        max_nodes: number of nodes shown initially, and in static files.
        state: state saved by the page, as a path or its content.
        transition: text along the arrow from each panel to the next; ``None`` for no arrow.
        title: title above the panels; by default, the target.

    Raises:
        ValueError: the graphs are not of one prompt, or the state cannot be read.
    """
    panels = by_title(panels, "Attribution graph")
    if len({tuple(graph.tokens) for graph in panels.values()}) != 1:
        raise ValueError("the panels of an attribution diagram are graphs of one prompt")
    first = next(iter(panels.values()))
    rows, labels = _nodes(panels)
    index = {row[0]: number for number, row in enumerate(rows)}
    groups = dict[str, list[str]]()
    for graph in panels.values():
        for name, nodes in graph.groups.items():
            groups[name] = [*dict.fromkeys([*groups.get(name, []), *nodes])]
    view = View(max_nodes, "influence", False, False, "sign", False, groups, (), labels)
    if state is not None:
        view = read_view(state, view)
    title = title or f"{first.target} after {first.prompt[-80:]}"
    data = {
        "nodes": rows,
        "panels": [_panel(name, graph, index) for name, graph in panels.items()],
        "unit": "logits",
        "words": _WORDS,
    }
    return diagram_of(data, view, first.tokens, panels, title, transition)


def _nodes(panels: Mapping[str, AttributionGraph]) -> tuple[list[Any], dict[str, str]]:
    """The nodes of all graphs in the order of the model, and what the figure calls them."""
    rows, labels = dict[str, Any](), dict[str, str]()
    for graph in panels.values():
        tokens = [visible_text(token[:20]) for token in graph.tokens]
        for node in graph.nodes.to_dict("records"):
            name, kind = node["name"], node["kind"]
            rows[name] = [name, *row_of(_drawn(node))[1:]]
            token = tokens[node["source"]]
            own = {
                "embedding": token,
                "attention edge": f"{name.split('@')[0]} \N{LEFTWARDS ARROW} {token}",
                "target": visible_text(graph.target[:40]),
            }
            if label := node.get("label") or own.get(kind):
                labels[name] = visible_text(label[:60])
    return sorted(rows.values(), key=lambda row: (row[2], row[3], row[0])), labels


def _drawn(node: Mapping[Any, Any]) -> PositionedNode:
    """A node as the page shows it."""
    return PositionedNode(Node(_KINDS.get(node["kind"], "mlp"), node["layer"]), node["position"])


def _panel(name: str, graph: AttributionGraph, index: Mapping[str, int]) -> dict[str, Any]:
    """The links of one graph between these nodes, with their influence and paths."""
    names, links = list(graph.nodes["name"]), [*_shown(graph.links).itertuples(index=False)]
    paths = PathGraph(
        tuple(map(_drawn, graph.nodes.to_dict("records"))),
        tuple(
            Link(source, target, "", edge, abs(flow))
            for edge, (source, target, flow) in enumerate(links)
        ),
        tuple(
            f"{names[source]} \N{RIGHTWARDS ARROW} {names[target]}" for source, target, _ in links
        ),
        tuple(flow for *_, flow in links),
    )
    return {
        **panel_of(name, paths, [index[node] for node in names]),
        "countsNodes": True,
        "kept": len(graph.links),
        "sign": 1,
        "facts": {row["name"]: _facts(graph, row) for row in graph.nodes.to_dict("records")},
    }


def _shown(links: pd.DataFrame) -> pd.DataFrame:
    """The strongest links, and the strongest into and out of each node."""
    by_flow = links.sort_values("flow", key=abs, ascending=False, kind="stable")
    kept = [by_flow[:MOST_EDGES], *(by_flow.drop_duplicates(end) for end in ("source", "target"))]
    return links[links.index.isin(pd.concat(kept).index)]


def _facts(graph: AttributionGraph, node: Mapping[Any, Any]) -> dict[str, Any]:
    """What the card of a node says."""
    kind = node["kind"]
    values = [("kind", kind), ("flow to the target", f"{node['flow']:+.3g} logits")]
    if kind == "attention edge":
        read, at = (visible_text(graph.tokens[node[end]]) for end in ("source", "position"))
        values += [("reads", read), ("writes at", at), ("attention", f"{node['activation']:.3g}")]
    elif kind in ("neuron", "feature"):
        values.append(("activation", f"{node['activation']:.3g}"))
    values.append(("influence", f"{100 * node['influence']:.2g} %"))
    if kind != "embedding":
        values.append(("from biases", f"{node['constant']:+.2g}"))
        values.append(("from what is left out", f"{node['left_out']:+.2g}"))
    return {
        "values": values,
        "lists": [(word, shown_texts(node[word])) for word in ("promotes", "suppresses")],
        "examples": [
            [*map(running_text, example[:3]), f"{example[3]:.3g}"]
            for example in node.get("examples") or []
        ],
    }
