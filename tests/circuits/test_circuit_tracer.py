"""The export to circuit-tracer's viewer: its schema, and what its front end looks up."""

from __future__ import annotations

import json
import re

import pytest
import torch

from sparse_tl import to_circuit_tracer
from sparse_tl.circuits import Scores
from sparse_tl.graph import CircuitGraph, PositionedGraph

# The fields of `Model` in circuit_tracer/frontend/graph_models.py, with their types.
METADATA = {"slug": str, "scan": str, "transcoder_list": list, "prompt_tokens": list}
METADATA |= {"prompt": str, "node_threshold": float, "schema_version": int}
QPARAMS = {"pinnedIds": list, "supernodes": list, "linkType": str, "clickedId": str, "sg_pos": str}
NODE = {"node_id": str, "feature": int, "layer": str, "ctx_idx": int, "feature_type": str}
NODE |= {"token_prob": float, "is_target_logit": bool, "run_idx": int, "reverse_ctx_idx": int}
NODE |= {"jsNodeId": str, "clerp": str, "influence": float, "activation": type(None)}
LINK = {"source": str, "target": str, "weight": float}


def check(given, kinds):
    assert {name: type(value) for name, value in given.items()} == kinds


def shown_place(node):
    """Layer and number that the viewer shows of a component, from its two numbers in one."""
    if node["feature_type"] != "cross layer transcoder":
        return None
    pairs = ((x, y) for x in range(20) for y in range(20))
    (pair,) = (p for p in pairs if sum(p) * (sum(p) + 1) // 2 + p[1] == node["feature"])
    return pair


def place_of(name):
    """The same from a component's name, of a model with 2 heads."""
    found = re.match(r"(?:a(\d+)\.h(\d+)|m(\d+))(?:( keys and values)|$|@)", name)
    if not found:
        return None
    layer, head, mlp, keys = found.groups()
    return (int(mlp), 4) if mlp else (int(layer), int(head) + 2 * bool(keys))


@pytest.mark.parametrize("positions", [None, ("0", "<img src=x onerror=alert(1)>", "2")])
def test_it_has_the_schema_and_whole_links(positions):
    graph = CircuitGraph(3, 2, 2)
    site = graph if positions is None else PositionedGraph(graph, positions)
    values = torch.randn(site.exists.shape, generator=torch.Generator().manual_seed(0))
    scores = Scores(site, values * site.exists, "eap")
    circuit = scores.top(40)
    tokens = None if positions is None else ["</script>", "b", "c"]
    found = json.loads(json.dumps(to_circuit_tracer(circuit, scores, prompt_tokens=tokens)))
    assert list(found) == ["metadata", "qParams", "nodes", "links"]
    check(found["metadata"], METADATA)
    check(found["qParams"], QPARAMS)
    ids = [node["node_id"] for node in found["nodes"]]
    assert len(set(ids)) == len(ids) == len({node["jsNodeId"] for node in found["nodes"]})
    for node in found["nodes"]:
        check(node, NODE)
        assert node["ctx_idx"] < len(found["metadata"]["prompt_tokens"])
        assert node["layer"] == "E" or node["layer"].isdigit()
        assert 0 <= node["influence"] <= found["metadata"]["node_threshold"]  # else not drawn
        # The viewer writes it into its tooltips as HTML.
        assert "<" not in node["clerp"]
        assert shown_place(node) == place_of(node["clerp"])
    # It draws nothing where all nodes are at the first token, or at more than 2/3 of the tokens.
    places = {node["ctx_idx"] for node in found["nodes"]}
    assert max(places) > 0 and 2 / 3 * len(found["metadata"]["prompt_tokens"]) >= 1
    for node in found["nodes"]:
        if node["feature_type"] == "logit":
            # It reads the token and the probability like this, and stops where it cannot.
            assert node["clerp"].split('"')[1].startswith("logits")
            assert node["clerp"].split("(p=")[1].split(")")[0] == "?"
    for link in found["links"]:
        check(link, LINK)
        assert {link["source"], link["target"]} <= set(ids)
    if positions is None:
        total = -sum(scores[str(edge)] for edge in circuit.edges)
        assert sum(link["weight"] for link in found["links"]) == pytest.approx(total, rel=1e-5)
