"""CPR, CMD and submissions as MIB's own code computes and reads them (arXiv 2504.13151).

The oracles follow hannamw/MIB-circuit-track (``evaluate_area_under_curve``, ``circuit_loading``)
and EAP-IG (``Graph.apply_topn``, ``Graph.prune``, node indices), on plain Python and numpy.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import run_patched_each
from random_models import shaken

from sparse_tl import CircuitGraph, Scores, evaluate_mib, load_mib, save_mib
from sparse_tl.backend import Model, adapt
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.metrics import logit_difference

Build = Callable[..., Model]
PERCENTAGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
PLAIN, GROUPED = CircuitGraph(2, 4, 4), CircuitGraph(2, 4, 2)


def _random_scores(graph: CircuitGraph, seed: int = 0) -> Scores:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(graph.exists.shape, generator=generator, dtype=torch.float64)
    return Scores(graph, values * graph.exists, "random")


class MIBGraph:
    """The arrays of EAP-IG's ``Graph``, filled as MIB's ``load_graph_from_json`` does."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        self.n_layers, self.n_heads = cfg["n_layers"], cfg["n_heads"]
        self.parallel = cfg["parallel_attn_mlp"]
        assert cfg["d_model"] > 0
        n_forward = 1 + self.n_layers * (self.n_heads + 1)
        n_backward = self.n_layers * (3 * self.n_heads + 1) + 1
        self.real = np.zeros((n_forward, n_backward), bool)
        self.forward_to_backward = np.zeros((n_forward, n_backward), bool)
        before = [0]
        for layer in range(self.n_layers):
            heads = [self.forward(f"a{layer}.h{head}") for head in range(self.n_heads)]
            mlp = self.forward(f"m{layer}")
            for head, row in enumerate(heads):
                for slot in "qkv":
                    column = self.backward(f"a{layer}.h{head}", slot)
                    self.real[before, column] = True
                    self.forward_to_backward[row, column] = True
            self.real[before if self.parallel else before + heads, self.backward(f"m{layer}")] = 1
            self.forward_to_backward[mlp, self.backward(f"m{layer}")] = True
            before = [*before, *heads, mlp]
        self.real[:, -1] = True
        self.scores = np.zeros(self.real.shape)
        self.in_graph = np.zeros(self.real.shape, bool)

    def forward(self, name: str) -> int:
        if name == "input":
            return 0
        if name[0] == "m":
            return 1 + int(name[1:]) * (self.n_heads + 1) + self.n_heads
        layer, head = name.split(".")
        return 1 + int(layer[1:]) * (self.n_heads + 1) + int(head[1:])

    def backward(self, name: str, slot: str = "") -> int:
        if name == "logits":
            return -1
        if name[0] == "m":
            return int(name[1:]) * (3 * self.n_heads + 1) + 3 * self.n_heads
        layer, head = name.split(".")
        first = int(layer[1:]) * (3 * self.n_heads + 1) + "qkv".index(slot) * self.n_heads
        return first + int(head[1:])

    @classmethod
    def read(cls, path: Path) -> MIBGraph:
        content = json.loads(path.read_text())
        assert all(key in content for key in ("cfg", "nodes", "edges"))
        graph = cls(content["cfg"])
        names = {f"a{i}.h{j}" for i in range(graph.n_layers) for j in range(graph.n_heads)}
        names |= {f"m{layer}" for layer in range(graph.n_layers)} | {"input", "logits"}
        assert content["nodes"].keys() == names
        assert all(isinstance(node["in_graph"], bool) for node in content["nodes"].values())
        assert len(content["edges"]) == graph.real.sum()
        for name, edge in content["edges"].items():
            parent, child = name.split("->")
            child, _, slot = child.partition("<")
            place = graph.forward(parent), graph.backward(child, slot[:1])
            assert graph.real[place]
            graph.scores[place] = edge.get("score", 0.0)
            graph.in_graph[place] = edge["in_graph"]
        return graph

    def apply_topn(self, n: int, absolute: bool) -> None:
        scores = np.abs(self.scores) if absolute else self.scores.copy()
        scores[~self.real] = -np.inf
        order = np.argsort(-scores.ravel(), kind="stable")
        self.in_graph.ravel()[order[:n]] = True
        self.in_graph.ravel()[order[n:]] = False
        self.prune()

    def prune(self) -> None:
        while True:
            ingoing = self.forward_to_backward @ self.in_graph.any(axis=0)
            ingoing[0] = True
            nodes = self.in_graph.any(axis=1) & ingoing
            children = nodes @ self.forward_to_backward
            children[-1] = True
            pruned = self.in_graph & np.outer(nodes, children)
            if (pruned == self.in_graph).all():
                return
            self.in_graph[:] = pruned


def test_cpr_and_cmd_are_those_of_mib(
    build_tiny: Build, pairs: PromptPairs, tmp_path: Path
) -> None:
    """From the submitted file on: cuts, pruning, faithfulness by a slow oracle, areas."""
    model = shaken(build_tiny(dtype="float64"))
    graph = adapt(model).graph
    scores = _random_scores(graph, seed=3)
    found = evaluate_mib(model, pairs, logit_difference, scores, batch_size=2, progress=False)
    theirs = MIBGraph.read(save_mib(scores, tmp_path / "ioi_gpt2", 16) / "importances.json")
    masks = [np.zeros_like(theirs.real), theirs.real]
    for absolute in (False, True):
        for pct in PERCENTAGES:
            theirs.apply_topn(int(pct * theirs.real.sum()), absolute)
            masks.append(theirs.in_graph.copy())
    logits = run_patched_each(model, graph, pairs, torch.from_numpy(np.stack(masks)))
    values = [logit_difference(each, pairs).mean().item() for each in logits]
    corrupted, baseline, *effects = values
    areas: dict[bool, tuple[float, float]] = {}
    for absolute, ours in ((False, found.signed), (True, found.absolute)):
        those = slice(len(PERCENTAGES) * absolute, len(PERCENTAGES) * (absolute + 1))
        faithfulnesses = [(each - corrupted) / (baseline - corrupted) for each in effects[those]]
        assert list(ours.sizes) == [int(mask.sum()) for mask in masks[2:][those]]
        assert ours.effect.tolist() == pytest.approx(faithfulnesses, rel=1e-8, abs=1e-9)
        under = from_1 = 0.0
        for i in range(len(PERCENTAGES) - 1):
            width = PERCENTAGES[i + 1] - PERCENTAGES[i]
            under += width * (faithfulnesses[i] + faithfulnesses[i + 1]) / 2
            from_1 += width * (abs(1 - faithfulnesses[i]) + abs(1 - faithfulnesses[i + 1])) / 2
        areas[absolute] = under, from_1
    assert found.cpr == pytest.approx(areas[False][0], rel=1e-8)
    assert found.cmd == pytest.approx(areas[True][1], rel=1e-8)
    assert areas[False] != areas[True], "the rankings differ"
    assert list(found.to_pandas()["fraction"]) == list(PERCENTAGES)


@pytest.mark.parametrize("graph", [PLAIN, CircuitGraph(2, 4, 4, parallel=True)])
def test_mib_cuts_the_same_circuits_from_saved_scores(graph: CircuitGraph, tmp_path: Path) -> None:
    scores = _random_scores(graph)
    theirs = MIBGraph.read(save_mib(scores, tmp_path / "ioi_gpt2", 16) / "importances.json")
    for n in (5, 20, 60, graph.n_edges):
        for absolute in (True, False):
            theirs.apply_topn(n, absolute)
            ours = scores.top(n, signed=not absolute).connected()
            assert torch.equal(torch.from_numpy(theirs.in_graph), ours.mask)
    again = load_mib(tmp_path / "ioi_gpt2")
    assert torch.equal(again.values, scores.values)


def test_heads_of_a_group_have_edges_of_their_own(tmp_path: Path) -> None:
    scores = _random_scores(GROUPED)
    folder = save_mib(scores, tmp_path / "ioi_llama3", 16)
    theirs = MIBGraph.read(folder / "importances.json")
    row, k = theirs.forward("m0"), [theirs.backward(f"a1.h{head}", "k") for head in range(4)]
    assert theirs.scores[row, k] == pytest.approx(
        [-scores[f"m0->a1.kv{kv}<k>"] / 2 for kv in (0, 0, 1, 1)]
    )
    q = theirs.backward("a1.h3", "q")
    assert theirs.scores[row, q] == pytest.approx(-scores["m0->a1.h3<q>"])
    again = load_mib(folder, GROUPED)
    torch.testing.assert_close(again.values, scores.values, rtol=1e-12, atol=0)
    apart = load_mib(folder)
    assert apart.grid == PLAIN
    with pytest.raises(ValueError, match="not of .*3 layers"):
        load_mib(folder, CircuitGraph(3, 4, 2))


def test_a_file_made_by_hand(tmp_path: Path) -> None:
    """With nodes and edges in MIB's words; what it leaves out is 0, and not in the circuit."""
    content = {
        "cfg": {"n_layers": 2, "n_heads": 4, "parallel_attn_mlp": False, "d_model": 8},
        "nodes": {"input": {"in_graph": True}, "a0.h1": {"in_graph": True}},
        "edges": {
            "input->a0.h1<q>": {"score": 0.5, "in_graph": False},
            "a0.h1->m1": {"score": -2.0, "in_graph": False},
            "m1->logits": {"in_graph": False},
        },
    }
    (tmp_path / "importances.json").write_text(json.dumps(content))
    scores = load_mib(tmp_path)
    assert scores["input->a0.h1<q>"] == -0.5 and scores["a0.h1->m1"] == 2.0
    assert scores.values.count_nonzero() == 2
    for edge, message in (("a0.h9->m1", "has no a0.h9"), ("m1->m0", "too late")):
        wrong = content | {"edges": {edge: {"in_graph": True}}}
        (tmp_path / "importances.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=message):
            load_mib(tmp_path)
    one_of_two = content | {"edges": {"input->a0.h1<k>": {"in_graph": True}}}
    (tmp_path / "importances.json").write_text(json.dumps(one_of_two))
    with pytest.raises(ValueError, match="do not keep the same edges"):
        load_mib(tmp_path, GROUPED)


def test_submissions_that_are_refused_leave_nothing(tmp_path: Path) -> None:
    scores, folder = _random_scores(PLAIN), tmp_path / "ioi_gpt2"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds .'notes.txt'.*Choose another folder"):
        save_mib(scores, folder, 16)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
