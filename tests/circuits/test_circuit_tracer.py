"""The export to circuit-tracer's viewer: its schema, and what its front end looks up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from architectures import plain_transformer

from sparse_tl import attribution_graph, to_circuit_tracer
from sparse_tl.backend import boot

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
    pairs = ((x, y) for x in range(60) for y in range(60))
    (pair,) = (p for p in pairs if sum(p) * (sum(p) + 1) // 2 + p[1] == node["feature"])
    return pair


def test_it_has_the_schema_and_whole_links():
    model = boot(plain_transformer("llama", "float64"))
    graph = attribution_graph(model, torch.tensor([1, 7, 3, 9, 7]), max_nodes=30)
    graph = replace(graph, nodes=graph.nodes.replace({"name": {graph.nodes["name"][3]: "<b>"}}))
    found = json.loads(json.dumps(to_circuit_tracer(graph)))
    assert list(found) == ["metadata", "qParams", "nodes", "links"]
    check(found["metadata"], METADATA)
    check(found["qParams"], QPARAMS)
    ids = [node["node_id"] for node in found["nodes"]]
    assert len(set(ids)) == len(ids) == len({node["jsNodeId"] for node in found["nodes"]})
    for number, (node, kind) in enumerate(zip(found["nodes"], graph.nodes["kind"], strict=True)):
        check(node, NODE | {"activation": float if kind == "neuron" else type(None)})
        assert 0 <= node["influence"] <= found["metadata"]["node_threshold"]  # else not drawn
        # The viewer writes it into its tooltips as HTML.
        assert "<" not in node["clerp"]
        if node["feature_type"] == "cross layer transcoder":
            assert shown_place(node) == (int(node["layer"]), number)
        if node["feature_type"] == "logit":
            # It reads the token and the probability like this, and stops where it cannot.
            assert node["clerp"].split('"')[1]
            assert node["clerp"].split("(p=")[1].split(")")[0] == "?"
    for link in found["links"]:
        check(link, LINK)
        assert {link["source"], link["target"]} <= set(ids)
    assert [node["ctx_idx"] for node in found["nodes"]] == graph.nodes["position"].tolist()
    assert found["nodes"][-1]["is_target_logit"]
    assert found["metadata"]["prompt_tokens"] == graph.tokens
    into = sum(link["weight"] for link in found["links"] if link["target"] == ids[-1])
    last = graph.nodes.iloc[-1]
    assert into + last["constant"] + last["left_out"] == pytest.approx(graph.value)
