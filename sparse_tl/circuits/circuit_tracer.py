"""Export of a circuit to the graph JSON that circuit-tracer's viewer and Neuronpedia read.

The format describes features of transcoders. Here a node is a component: the input is an
"embedding", the logits are a "logit", and heads and MLPs stand as "cross layer transcoder"; the
text that the viewer shows, ``clerp``, is the component's name. Heads and MLP of a layer share a
row of the viewer, because its layers are numbers; columns are positions.

Reference: ``circuit_tracer/frontend/graph_models.py`` of github.com/safety-research/circuit-tracer,
schema version 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_tl.arguments import checked
from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.scores import Scores
from sparse_tl.circuits.wiring import Spot, wire
from sparse_tl.files import read_json
from sparse_tl.graph import CircuitGraph
from sparse_tl.positioned_graph import PositionedGraph


@checked
def to_circuit_tracer(
    circuit: Circuit,
    scores: Scores | None = None,
    *,
    slug: str = "circuit",
    prompt_tokens: Sequence[str] | None = None,
    state: str | Path | Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The JSON of a circuit for circuit-tracer's viewer; write it with ``json.dump``.

    A link's weight is minus its score, so that a positive weight helps, as in circuit-tracer;
    without scores it is 1. Links between the same nodes (q, k and v) are added up. A head's keys
    and values at another position are a node of their own, whose links to the head weigh what it
    reads. A node's influence is the cumulative one that the viewer prunes by: the share of the
    influence of all nodes that is in the nodes of at least its own.

    Args:
        circuit: circuit of circuit edges, with or without positions.
        scores: scores of its edges.
        slug: name of the graph.
        prompt_tokens: texts of the positions; their names by default.
        state: state that a component diagram has saved: its pins, supernodes and labels.

    Raises:
        ValueError: the circuit or the scores are of other parts, or the number of tokens differs.
    """
    site = circuit.site
    if not isinstance(site, (CircuitGraph, PositionedGraph)):
        raise ValueError(f"expected a circuit of circuit edges; got one of {site.noun}")
    if scores is not None and scores.site != site:
        raise ValueError(f"expected scores of {site!r}, as the circuit; got {scores!r}")
    graph = site.graph if isinstance(site, PositionedGraph) else site
    positions = site.positions if isinstance(site, PositionedGraph) else ("all",)
    tokens = list(positions if prompt_tokens is None else prompt_tokens)
    if len(tokens) != len(positions):
        raise ValueError(f"expected {len(positions)} texts of positions; got {len(tokens)}")
    content = (
        {} if state is None else state if isinstance(state, Mapping) else read_json(Path(state))
    )
    wiring = wire(circuit, scores)
    ids = [_id(spot, graph) for spot in wiring.spots]
    of_name = {str(spot): name for spot, name in zip(wiring.spots, ids, strict=True)}
    through = [0.0] * len(ids)
    for line, influence in zip(wiring.lines, wiring.influence, strict=True):
        through[line.source] += influence
    for end in wiring.ends[1]:
        through[end] = sum(
            influence
            for line, influence in zip(wiring.lines, wiring.influence, strict=True)
            if line.reader == end
        )
    whole = sum(through) or 1.0
    cumulative = [sum(other for other in through if other >= own) / whole for own in through]
    weights = dict[tuple[str, str], float]()
    for line in wiring.lines:
        key = ids[line.source], ids[line.reader]
        scored = line.edge >= 0 and wiring.scores is not None
        weight = -wiring.scores[line.edge] if scored and wiring.scores else line.weight
        weights[key] = weights.get(key, 0.0) + weight
    labels = content.get("labels", {})
    nodes = [
        _node(spot, name, graph, labels.get(str(spot)) or str(spot), value)
        for spot, name, value in zip(wiring.spots, ids, cumulative, strict=True)
    ]
    groups = content.get("groups", {})
    return {
        "metadata": {
            "slug": slug,
            "scan": "sparse_tl",
            "transcoder_list": [],
            "prompt_tokens": tokens,
            "prompt": "".join(tokens),
            "node_threshold": 1.0,
            "schema_version": 1,
        },
        "qParams": {
            "pinnedIds": [of_name[pin] for pin in content.get("pins", ()) if pin in of_name],
            "supernodes": [
                [name, *(of_name[member] for member in members if member in of_name)]
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


def _layer(spot: Spot, graph: CircuitGraph) -> str:
    if spot.kind == "input":
        return "E"
    return str(graph.n_layers + 1 if spot.kind == "logits" else spot.node.layer)


def _feature(spot: Spot, graph: CircuitGraph) -> int:
    """Heads by their number, after them their keys and values, after these the MLP."""
    if spot.kind in ("input", "logits"):
        return 0
    if spot.kind == "mlp":
        return 2 * graph.n_heads
    return spot.node.head + graph.n_heads * spot.keys


def _id(spot: Spot, graph: CircuitGraph) -> str:
    """The format's id: layer, feature and position."""
    return f"{_layer(spot, graph)}_{_feature(spot, graph)}_{spot.position or 0}"


def _node(
    spot: Spot, name: str, graph: CircuitGraph, text: str, influence: float
) -> dict[str, Any]:
    kinds = {"input": "embedding", "logits": "logit"}
    layer, feature, position = _layer(spot, graph), _feature(spot, graph), spot.position or 0
    return {
        "node_id": name,
        "feature": feature,
        "layer": layer,
        "ctx_idx": position,
        "feature_type": kinds.get(spot.kind, "cross layer transcoder"),
        "token_prob": 0.0,
        "is_target_logit": spot.kind == "logits",
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "jsNodeId": f"{'L' if spot.kind == 'logits' else layer}_{feature}-{position}",
        "clerp": text,
        "influence": influence,
        "activation": None,
    }
