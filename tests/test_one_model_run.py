"""``sparse-tl head-behaviour`` and ``sparse-tl graph`` on small models, from end to end."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tiny import save_small_task_models

from sparse_tl.backend import load_model
from sparse_tl.circuits import AttributionGraph, HeadBehaviour, find_examples, head_behaviour
from sparse_tl.jobs import (
    one_model,
    run_addition,
    run_circuits,
    run_graph,
    run_head_behaviour,
    run_post_training,
)
from sparse_tl.tasks import GreaterThanTask, IOITask

QUIET: dict[str, Any] = {"device": "cpu", "progress": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [*map(str, save_small_task_models(folder, n_layer=2, n_head=2, n_embd=16, n_inner=16))]


def _refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("it was measured before")


def test_heads_by_what_they_do(
    models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_head_behaviour(tmp_path, model=models[0], **QUIET)
    model = load_model(models[0], device="cpu")
    expected = head_behaviour(model, length=15, progress=False)  # fits into 32 tokens
    saved = HeadBehaviour.load(tmp_path / "head_behaviour")
    for name, scores in expected.scores.items():
        assert torch.equal(found[name], scores) and torch.equal(saved[name], scores)
    table = pd.read_csv(tmp_path / "heads.csv")
    assert table["head"].tolist() == ["a0.h0", "a0.h1", "a1.h0", "a1.h1"]
    assert (tmp_path / "heads.html").stat().st_size > 1000
    monkeypatch.setattr(one_model, "load_named_model", _refuse)
    run_head_behaviour(tmp_path, model=models[0], **QUIET)


def test_a_file_of_pairs_that_has_changed(models: list[str], tmp_path: Path) -> None:
    model, file = load_model(models[0], device="cpu"), tmp_path / "pairs.jsonl"
    rows = pd.DataFrame(GreaterThanTask().pairs(model, 4).to_records(model.tokenizer))
    asked: dict[str, Any] = {"model": models[0], "pairs_file": str(file), **QUIET}
    rows.to_json(file, orient="records", lines=True)
    run_head_behaviour(tmp_path / "out", **asked)
    file.rename(tmp_path / "out" / file.name)  # the same pairs elsewhere
    run_head_behaviour(tmp_path / "out", **asked | {"pairs_file": f"{tmp_path}/out/{file.name}"})
    rows[:3].to_json(file, orient="records", lines=True)
    with pytest.raises(ValueError, match=r"other settings .*pairs\.jsonl"):
        run_head_behaviour(tmp_path / "out", **asked)


@pytest.mark.long
def test_the_graph_of_a_prompt_in_two_models(
    models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(models[0], device="cpu")
    (prompt,) = model.tokenizer.batch_decode(IOITask().pairs(model, 1).clean)
    asked: dict[str, Any] = {"model": models, "prompt": prompt, "nodes": 12, **QUIET}
    asked["examples"] = True
    monkeypatch.setattr(one_model, "load_examples", partial(find_examples, texts=[prompt]))
    graphs = run_graph(tmp_path, **asked)
    assert list(graphs) == ["dense", "sparse"]
    for title, graph in graphs.items():
        assert AttributionGraph.load(tmp_path / title / "graph").value == graph.value
        neurons = graph.nodes[graph.nodes["kind"] == "neuron"]
        assert len(neurons) and all(neurons["examples"])
        assert len(pd.read_csv(tmp_path / title / "nodes.csv")) == len(graph.nodes)
        assert len(pd.read_csv(tmp_path / title / "links.csv")) == len(graph.links)
    assert "sparse" in (tmp_path / "graph.html").read_text()
    monkeypatch.setattr(one_model, "load_named_model", _refuse)
    run_graph(tmp_path, **asked)


@pytest.mark.parametrize(
    "job",
    [
        run_addition,
        run_circuits,
        partial(run_graph, model="none", prompt="a"),
        partial(run_post_training, model="none", prompt="a"),
    ],
)
def test_what_cannot_be_drawn_is_not_begun(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**35, 2**35))
    with pytest.raises(MemoryError, match="address space"):
        job(tmp_path / "out", **QUIET)
    assert not (tmp_path / "out").exists()
