"""Export of a circuit to the graph JSON that circuit-tracer's viewer and Neuronpedia read.

The format describes features of transcoders. Here a node is a component: the input is an
"embedding", the logits are a "logit", and heads and MLPs stand as "cross layer transcoder"; the
text that the viewer shows, ``clerp``, is the component's name. Heads and MLP of a layer share a
row of the viewer, because its layers are numbers; columns are positions.

Checked against circuit-tracer 0.5.0: `Model` accepts the export, and its viewer, in Chromium,
draws every node of circuits with and without positions, names them, and lists a clicked node's
links with their weights. It has no example texts for components; it takes supernodes from its
address, not from the file.

Reference: ``circuit_tracer/frontend`` of github.com/safety-research/circuit-tracer, schema
version 1.
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
    """The JSON of a circuit for circuit-tracer's viewer.

    Write it with ``json.dump`` to ``{slug}.json`` in a folder, add its metadata there with
    ``circuit_tracer.frontend.utils.add_graph_metadata(graph["metadata"], folder)``, and open the
    folder with ``circuit_tracer.frontend.local_server.serve(folder)``.

    A link's weight is minus its score, so that a positive weight helps, as in circuit-tracer;
    without scores it is 1. Links between the same nodes (q, k and v) are added up. A head's keys
    and values at another position are a node of their own, whose links to the head weigh what it
    reads. A node's influence is the cumulative one that the viewer prunes by: the share of the
    influence of all nodes that is in the nodes of at least its own. The logits have no probability,
    and their text ends in ``(p=?)``. Circuits without positions stand at a second token, since the
    viewer draws nothing at the first one alone. ``<`` in labels becomes a quotation mark, since the
    viewer reads its tooltips as HTML; texts of tokens stay as they are.

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
    content = read_json(state) if isinstance(state, str | Path) else state or {}
    wiring = wire(circuit, scores)
    # The viewer draws nothing where all nodes are at the first token.
    start = int(not any(spot.position for spot in wiring.spots))
    places = [_place(spot, graph, start) for spot in wiring.spots]
    ids = ["{}_{}_{}".format(*place) for place in places]
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
    # The viewer drops what is above its threshold of 1, by however little.
    cumulative = [min(1.0, sum(o for o in through if o >= own) / whole) for own in through]
    weights = dict[tuple[str, str], float]()
    for line in wiring.lines:
        key = ids[line.source], ids[line.reader]
        weight = line.weight
        if line.edge >= 0 and wiring.scores is not None:
            weight = -wiring.scores[line.edge]
        weights[key] = weights.get(key, 0.0) + weight
    labels = content.get("labels", {})
    nodes = [
        _node(spot, place, labels.get(str(spot)) or _name(spot), value)
        for spot, place, value in zip(wiring.spots, places, cumulative, strict=True)
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


def _place(spot: Spot, graph: CircuitGraph, start: int) -> tuple[str, int, int]:
    """Layer, number within it (heads, then their keys and values, then the MLP), and position."""
    ends = {"input": "E", "logits": str(graph.n_layers + 1)}
    number = 2 * graph.n_heads if spot.kind == "mlp" else spot.node.head + graph.n_heads * spot.keys
    return ends.get(spot.kind, str(spot.node.layer)), number, start + (spot.position or 0)


def _paired(layer: int, number: int) -> int:
    """Both in one number, by Cantor's pairing: the viewer shows ``L3/7`` for a3.h7."""
    return (layer + number) * (layer + number + 1) // 2 + number


def _name(spot: Spot) -> str:
    """The viewer reads the texts of its tooltips as HTML."""
    return str(spot).replace("<kv>", " keys and values")


def _node(spot: Spot, place: tuple[str, int, int], text: str, influence: float) -> dict[str, Any]:
    kinds = {"input": "embedding", "logits": "logit"}
    layer, number, position = place
    text = text.replace("<", "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}")
    if spot.kind == "logits":
        # The viewer reads a token in quotes and a probability; a metric may be of several logits.
        text = 'Output "{}" (p=?)'.format(text.replace('"', "'"))
    return {
        "node_id": f"{layer}_{number}_{position}",
        "feature": number if spot.kind in kinds else _paired(int(layer), number),
        "layer": layer,
        "ctx_idx": position,
        "feature_type": kinds.get(spot.kind, "cross layer transcoder"),
        "token_prob": 0.0,
        "is_target_logit": spot.kind == "logits",
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "jsNodeId": f"{'L' if spot.kind == 'logits' else layer}_{number}-{position}",
        "clerp": text,
        "influence": influence,
        "activation": None,
    }
