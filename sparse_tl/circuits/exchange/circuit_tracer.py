"""Export of a circuit to the graph JSON that circuit-tracer's viewer and Neuronpedia read.

The format describes features of transcoders; here each node is a component. The input is an
"embedding", the logits are a "logit", and heads and MLPs are "cross layer transcoder" features,
whose ``clerp``, the text that the viewer shows, is the component's name. Because the viewer's
layers are numbers, the heads and the MLP of a layer share a row. Columns are positions.

Checked against circuit-tracer 0.5.0: `Model` accepts the export, and the viewer, in Chromium, draws
and names every node of circuits with and without positions, and lists the links of a clicked node
with their weights. It shows no example texts for components, and reads supernodes from its URL,
not from the file.

Reference: ``circuit_tracer/frontend`` of github.com/safety-research/circuit-tracer, schema
version 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_tl.calls.arguments import checked
from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.paths import PositionedNode, path_graph
from sparse_tl.circuits.scores import Scores
from sparse_tl.parts.graph import CircuitGraph
from sparse_tl.parts.positioned_graph import PositionedGraph
from sparse_tl.storage.files import read_json


@checked
def to_circuit_tracer(
    circuit: Circuit,
    scores: Scores | None = None,
    *,
    slug: str = "circuit",
    prompt_tokens: Sequence[str] | None = None,
    state: str | Path | Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A circuit as JSON for circuit-tracer's viewer.

    Write it with ``json.dump`` to ``{slug}.json`` in a folder, add its metadata there with
    ``circuit_tracer.frontend.utils.add_graph_metadata(graph["metadata"], folder)``, and open the
    folder with ``circuit_tracer.frontend.local_server.serve(folder)``.

    The weight of a link is minus its score, so that a positive weight helps, as in circuit-tracer;
    without scores it is 1. Weights of links between the same nodes (q, k and v) are summed. The
    keys and values that a head reads at a position are a separate node; the weight of its link to
    the head is the total ``|score|`` that it reads, without a sign. The influence of a node is
    cumulative, since the viewer prunes by it: the share of all influence held by nodes with at
    least as much. The logits have no probability; their text ends in ``(p=?)``. A circuit without
    positions is placed at the second token, because the viewer draws nothing if all nodes are at
    the first. ``<`` in labels becomes a quotation mark, since tooltips are read as HTML; token
    texts stay unchanged.

    Args:
        circuit: circuit of circuit edges, with or without positions.
        scores: scores of its edges.
        slug: name of the graph.
        prompt_tokens: text of each position; its name by default.
        state: saved state of a component diagram, for its pins, supernodes and labels.

    Raises:
        ValueError: the circuit is not of circuit edges, the scores are of other edges, or the
            number of tokens differs.
    """
    grid = circuit.grid
    if not isinstance(grid, (CircuitGraph, PositionedGraph)):
        raise ValueError(f"expected a circuit of circuit edges; got one of {grid.noun}")
    if scores is not None and scores.grid != grid:
        raise ValueError(f"expected scores of {grid!r}, as the circuit; got {scores!r}")
    graph = grid.graph if isinstance(grid, PositionedGraph) else grid
    positions = grid.positions if isinstance(grid, PositionedGraph) else ("all",)
    tokens = list(positions if prompt_tokens is None else prompt_tokens)
    if len(tokens) != len(positions):
        raise ValueError(
            f"expected one text for each of {len(positions)} positions; got {len(tokens)}"
        )
    content = read_json(state) if isinstance(state, str | Path) else state or {}
    paths = path_graph(circuit, scores)
    # The viewer draws nothing if all nodes are at the first token.
    start = int(not any(node.position for node in paths.nodes))
    coordinates = [_coordinates(node, graph, start) for node in paths.nodes]
    ids = ["{}_{}_{}".format(*coordinate) for coordinate in coordinates]
    id_of = {str(node): node_id for node, node_id in zip(paths.nodes, ids, strict=True)}
    influences = [0.0] * len(ids)
    for link, influence in zip(paths.links, paths.influence, strict=True):
        influences[link.source] += influence
        if link.reader in paths.ends[1]:
            influences[link.reader] += influence
    total = sum(influences) or 1.0
    # Rounding must not lift this above 1: the viewer drops nodes above its threshold.
    cumulative = [min(1.0, sum(b for b in influences if b >= a) / total) for a in influences]
    weights = dict[tuple[str, str], float]()
    for link in paths.links:
        key = ids[link.source], ids[link.reader]
        weight = link.weight
        if link.edge >= 0 and paths.scores is not None:
            weight = -paths.scores[link.edge]
        weights[key] = weights.get(key, 0.0) + weight
    labels = content.get("labels", {})
    nodes = [
        _node(node, coordinate, labels.get(str(node)) or _name(node), influence)
        for node, coordinate, influence in zip(paths.nodes, coordinates, cumulative, strict=True)
    ]
    groups = content.get("groups", {})
    return {
        "metadata": {
            "slug": slug,
            "scan": "sparse_tl",
            "transcoder_list": [],
            "prompt_tokens": [""] * start + tokens,
            "prompt": "".join(tokens),
            "node_threshold": 1.0,
            "schema_version": 1,
        },
        "qParams": {
            "pinnedIds": [id_of[pin] for pin in content.get("pins", ()) if pin in id_of],
            "supernodes": [
                [name, *(id_of[member] for member in members if member in id_of)]
                for name, members in groups.items()
            ],
            "linkType": "both",
            "clickedId": "",
            "sg_pos": "",
        },
        "nodes": nodes,
        "links": [
            {"source": source, "target": target, "weight": weight}
            for (source, target), weight in weights.items()
        ],
    }


def _coordinates(node: PositionedNode, graph: CircuitGraph, start: int) -> tuple[str, int, int]:
    """Layer, number within it (heads, then their keys and values, then the MLP), and position."""
    layers = {"input": "E", "logits": str(graph.n_layers + 1)}
    number = node.component.head + graph.n_heads * node.keys
    if node.kind == "mlp":
        number = 2 * graph.n_heads
    layer = layers.get(node.kind, str(node.component.layer))
    return layer, number, start + (node.position or 0)


def _paired(layer: int, number: int) -> int:
    """Layer and number as one number (Cantor's pairing); the viewer shows ``L3/7`` for a3.h7."""
    return (layer + number) * (layer + number + 1) // 2 + number


def _name(node: PositionedNode) -> str:
    """The name of a node, without tags: the viewer reads its tooltips as HTML."""
    return str(node).replace("<kv>", " keys and values")


def _node(
    node: PositionedNode, coordinates: tuple[str, int, int], text: str, influence: float
) -> dict[str, Any]:
    kinds = {"input": "embedding", "logits": "logit"}
    layer, number, position = coordinates
    text = text.replace("<", "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}")
    if node.kind == "logits":
        # The viewer expects a token in quotes and a probability; a metric may read several logits.
        text = 'Output "{}" (p=?)'.format(text.replace('"', "'"))
    return {
        "node_id": f"{layer}_{number}_{position}",
        "feature": number if node.kind in kinds else _paired(int(layer), number),
        "layer": layer,
        "ctx_idx": position,
        "feature_type": kinds.get(node.kind, "cross layer transcoder"),
        "token_prob": 0.0,
        "is_target_logit": node.kind == "logits",
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "jsNodeId": f"{'L' if node.kind == 'logits' else layer}_{number}-{position}",
        "clerp": text,
        "influence": influence,
        "activation": None,
    }
