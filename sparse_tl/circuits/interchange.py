"""Exchange scores and circuits with other tools: the graph JSON of EAP-IG, also read by MIB."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.scores import Scores
from sparse_tl.graph import CircuitGraph


def to_eap_ig(scores: Scores, circuit: Circuit, d_model: int) -> dict[str, Any]:
    """The JSON of EAP-IG's ``Graph.to_json``, also read by the MIB benchmark.

    Args:
        scores: scores of every edge.
        circuit: edges that are kept.
        d_model: residual stream width of the model, required by EAP-IG's loader.

    Raises:
        ValueError: the model has grouped-query attention or no MLPs, which the format lacks.
    """
    graph = circuit.graph
    if graph.n_kv_heads != graph.n_heads or not graph.has_mlps:
        raise ValueError(f"expected heads with their own k and v, and MLPs; {graph!r} has not")
    if scores.site != graph:
        raise ValueError(f"expected scores of {graph!r}, as the circuit; got {scores!r}")
    inside = {str(node) for edge in circuit.edges for node in (edge.source, edge.destination.node)}
    values = zip(graph.edges, scores.mean()[graph.exists], circuit.mask[graph.exists], strict=True)
    return {
        "cfg": {
            "n_layers": graph.n_layers,
            "n_heads": graph.n_heads,
            "parallel_attn_mlp": graph.parallel,
            "d_model": d_model,
        },
        "nodes": {str(node): {"in_graph": str(node) in inside} for node in graph.nodes},
        "edges": {
            str(edge): {"score": score.item(), "in_graph": bool(kept)}
            for edge, score, kept in values
        },
    }


def from_eap_ig(content: Mapping[str, Any]) -> tuple[Scores, Circuit]:
    """Scores and circuit from the JSON of EAP-IG's ``Graph.to_json``.

    Raises:
        ValueError: a key is missing, or the graph lacks an edge.
    """
    missing = {"cfg", "edges"} - content.keys()
    if missing:
        raise ValueError(f"expected the JSON of an EAP-IG graph; it lacks {sorted(missing)}")
    cfg = content["cfg"]
    lacking = {"n_layers", "n_heads", "parallel_attn_mlp"} - cfg.keys()
    if lacking:
        raise ValueError(f"expected the sizes of an EAP-IG graph; cfg lacks {sorted(lacking)}")
    graph = CircuitGraph(
        cfg["n_layers"], cfg["n_heads"], cfg["n_heads"], parallel=cfg["parallel_attn_mlp"]
    )
    scores = torch.zeros(graph.exists.shape, dtype=torch.float64)
    mask = torch.zeros_like(graph.exists)
    for name, edge in content["edges"].items():
        index = graph.index(name)
        if not isinstance(edge, Mapping) or not {"score", "in_graph"} <= edge.keys():
            raise ValueError(f"expected a score and in_graph for every edge; {name} has {edge!r}")
        scores[index], mask[index] = edge["score"], edge["in_graph"]
    return Scores(graph, scores, "imported"), Circuit(graph, mask)
