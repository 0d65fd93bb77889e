"""``sparse-tl addition`` end to end, and what all commands do with their output folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command_line import ADDITION, Outcome, no_training, run_command

from sparse_tl.backend import load_model
from sparse_tl.gates import SparseTransformer
from sparse_tl.metrics import NoEffectError
from sparse_tl.tasks.addition import AdditionTask
from sparse_tl.training import HeldOut, evaluate_held_out

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def addition(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    out = tmp_path_factory.mktemp("runs") / "addition"
    return out, run_command(*ADDITION, "--out", out, "--device", "cpu")


def test_addition_writes_everything(addition: tuple[Path, Outcome]) -> None:
    out, _ = addition
    metrics = json.loads((out / "metrics.json").read_text())
    told = {"seed", "form", "verdict", "seconds", "dense", "sparse", "circuits", "no_circuits"}
    assert set(metrics) == told
    assert (metrics["seed"], metrics["form"]) == (0, "placeholder")
    assert metrics["seconds"] > 0
    for name in ("dense", "sparse"):
        assert set(metrics[name]) == {field.name for field in fields(HeldOut)}
    assert metrics["dense"]["active_attention_edges"] == 1056
    assert metrics["dense"]["possible_attention_edges"] == 4 * 4 * 11 * 12 / 2
    history = pd.read_csv(out / "history.csv")
    assert history["phase"].unique().tolist() == ["dense", "sparse"]
    assert history.groupby("phase")["step"].max().to_dict() == {"dense": 3, "sparse": 2}
    assert {"step", "loss", "lambda", "validation_loss"} <= set(history)
    html = (out / "addition.html").read_text(encoding="utf-8")
    assert "Base Model" in html
    assert "Sparse Model" in html
    assert "<svg" in (out / "addition.svg").read_text(encoding="utf-8")
    assert (out / "addition.png").read_bytes().startswith(b"\x89PNG")
    assert not list(out.glob("checkpoint*"))
    left = [path.name for path in out.rglob(".*") if path.suffix != ".lock"]
    assert not left, "something temporary"


def test_addition_tells_what_each_digit_needs(addition: tuple[Path, Outcome]) -> None:
    out, outcome = addition
    circuits = json.loads((out / "metrics.json").read_text())["circuits"]
    assert list(circuits) == ["tens", "units"]
    for digit, said in circuits.items():
        assert 1 <= said["dense"]["circuit_edges_at_0.9"] <= 4 * 4 * 37, "of a graph of 4 x 4 heads"
        for side in ("dense", "sparse"):
            scores = out / "circuits" / digit / "seed-0" / side / "circuit_edge_scores"
            assert (scores / "result.json").exists()
    assert "Parts needed for an explained effect of 0.9" in outcome.out
    assert (out / "circuits" / "circuit_edges_kept.html").exists()


def test_a_digit_without_an_effect_is_told_and_the_others_are_drawn(
    addition: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "addition"
    shutil.copytree(addition[0], out)
    shutil.rmtree(out / "circuits" / "units" / "seed-0" / "sparse")

    def refuse(*_: Any, **__: Any) -> None:
        raise NoEffectError("there is no effect to explain")

    monkeypatch.setattr("sparse_tl.jobs.addition.measure", refuse)
    outcome = run_command(*ADDITION, "--out", out, "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert "No circuit: Addition, units, sparse model: there is no effect" in outcome.out
    metrics = json.loads((out / "metrics.json").read_text())
    assert list(metrics["circuits"]) == ["tens"]
    assert len(metrics["no_circuits"]) == 1


def test_the_written_models_give_the_written_numbers(addition: tuple[Path, Outcome]) -> None:
    out, _ = addition
    metrics = json.loads((out / "metrics.json").read_text())
    test = AdditionTask("placeholder").split(seed=0)[2]
    written = {
        "dense": load_model(out / "dense", device="cpu"),
        "sparse": SparseTransformer.from_pretrained(out / "sparse", device="cpu"),
    }
    for name, model in written.items():
        measured = evaluate_held_out(model, test)
        assert measured.loss == metrics[name]["loss"]
        assert measured.active_attention_edges == metrics[name]["active_attention_edges"]
    assert written["dense"].to_tokens("36+28=").tolist() == [[3, 6, 10, 2, 8, 11]]


def test_called_again_it_reuses_what_is_finished(addition: tuple[Path, Outcome]) -> None:
    out, first = addition
    weights = (out / "sparse" / "model.safetensors").stat().st_mtime_ns
    before = json.loads((out / "metrics.json").read_text())
    with no_training():
        again = run_command(*ADDITION, "--out", out)
    assert again.code == 0, again.err
    assert (out / "sparse" / "model.safetensors").stat().st_mtime_ns == weights
    after = json.loads((out / "metrics.json").read_text())
    assert after["dense"] == before["dense"]
    assert after["sparse"] == before["sparse"]
    assert again.out.split(" seconds")[0].rsplit(" ", 1)[0] in first.out


def test_other_settings_on_the_same_folder(addition: tuple[Path, Outcome]) -> None:
    out, _ = addition
    with no_training():
        outcome = run_command(*ADDITION, "--out", out, "--dense-steps", "4")
    assert outcome.code == 2
    assert "dense_steps 3 there, 4 here" in outcome.err
    assert (out / "metrics.json").exists()


def test_restart_does_not_clear_a_folder_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with no_training():
        outcome = run_command(*ADDITION, "--out", tmp_path, "--restart")
    assert outcome.code == 2
    assert "thesis.tex" in outcome.err
    assert (tmp_path / "thesis.tex").read_text() == "precious"
