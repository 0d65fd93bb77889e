"""Whatever discovery returns can be saved, read again, and never eats another folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from sparse_tl import (
    Acdc,
    AttentionEdgeScores,
    Circuit,
    EdgeScores,
    HeadCircuit,
    HeadScores,
    Pruning,
)
from sparse_tl.graph import CircuitGraph

GRAPH = CircuitGraph(2, 2, 2)
NUMBERS = torch.arange(GRAPH.exists.numel()).view(GRAPH.exists.shape) / 7
SCORES = EdgeScores(GRAPH, GRAPH.exists * NUMBERS, "eap")
HEADS = HeadScores(torch.tensor([[0.5, -2.0], [1.0, 0.0]]), "eap-ig")
HISTORY = pd.DataFrame({"part": ["a1.h0->logits", "m0->m1"], "moved": [0.25, -1.0]})
RESULTS: dict[str, Any] = {
    "edge scores": SCORES,
    "head scores": HEADS,
    "attention edges": AttentionEdgeScores(torch.rand(2, 1, 2, 3, 3), "eap"),
    "circuit": SCORES.top(5),
    "heads": HEADS.top(2),
    "acdc on edges": Acdc(SCORES.top(5), 0.1, 0.5, 2, 1.5, HISTORY),
    "acdc on heads": Acdc(HEADS.top(2), 0.1, 0.5, 2, 1.5, HISTORY),
    "pruning": Pruning(SCORES.top(5), SCORES, HISTORY.assign(divergence=[0.2, 0.1])),
}


def _parts(result: Any) -> dict[str, Any]:
    """Everything a result holds, down to what can be compared."""
    if isinstance(result, Acdc | Pruning | Circuit | HeadCircuit | EdgeScores | HeadScores):
        return {
            f"{name}.{key}": part
            for name, value in vars(result).items()
            for key, part in _parts(value).items()
        }
    if isinstance(result, AttentionEdgeScores):
        return vars(result)
    return {"": result}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_read_as_it_was_saved(name: str, tmp_path: Path) -> None:
    result = RESULTS[name]
    folder = result.save(tmp_path / "result")
    assert result.save(folder) == folder, "an earlier result of the same kind is replaced"
    parts, again = _parts(result), _parts(type(result).load(folder))
    assert parts.keys() == again.keys()
    for key, part in parts.items():
        if isinstance(part, torch.Tensor):
            assert torch.equal(part, again[key]) and part.dtype == again[key].dtype
        elif isinstance(part, pd.DataFrame):
            pd.testing.assert_frame_equal(part, again[key])
        else:
            assert part == again[key], key
    assert sorted(path.name for path in folder.iterdir()) == ["result.json", "result.safetensors"]


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_prints_in_a_notebook(name: str) -> None:
    part = "a0.h1" if "heads" in name or name == "head scores" else SCORES.top(1).edges[0].source
    shown = RESULTS[name]._repr_html_()
    assert "query" in shown if name == "attention edges" else str(part) in shown


def test_another_kind_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    folder = SCORES.save(tmp_path / "result")
    with pytest.raises(ValueError, match="expected a saved Circuit in .*; it holds EdgeScores"):
        Circuit.load(folder)
    with pytest.raises(ValueError, match="it holds EdgeScores"):
        HEADS.save(folder)
    with pytest.raises(ValueError, match=r"there is no result\.json"):
        EdgeScores.load(tmp_path)
    (folder / "notes.md").write_text("mine")
    with pytest.raises(ValueError, match=r"also holds \['notes.md'\], which would be deleted"):
        SCORES.save(folder)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(ValueError, match="which would be deleted"):
        SCORES.save(tmp_path / "thesis")


def test_a_result_outlives_a_kill_between_two_renames(tmp_path: Path) -> None:
    folder = SCORES.save(tmp_path / "result")
    folder.rename(tmp_path / ".result.previous")  # as a killed `save` leaves it
    assert torch.equal(EdgeScores.load(folder).scores, SCORES.scores)


def test_a_damaged_result_says_what_is_missing(tmp_path: Path) -> None:
    folder = SCORES.save(tmp_path / "result")
    HEADS.save(tmp_path / "heads")
    (folder / "result.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match="expected a safetensors file"):
        EdgeScores.load(folder)
    (folder / "result.json").write_text('{"kind": "EdgeScores"}')
    (tmp_path / "heads" / "result.safetensors").rename(folder / "result.safetensors")
    with pytest.raises(ValueError, match="expected a whole EdgeScores in .*; it lacks 'graph'"):
        EdgeScores.load(folder)
