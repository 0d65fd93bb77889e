"""``sparse-tl post-train`` end to end."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pandas as pd
import pytest
import torch
from command_line import Outcome, no_training, run_command
from tiny import HAS_HOOKED

from sparse_tl.backend import adapt, load_model, lora_parameters
from sparse_tl.data import read_documents, text_rows
from sparse_tl.gates import SparseTransformer
from sparse_tl.jobs import post_training
from sparse_tl.tasks import SkillComparison
from sparse_tl.training import HeldOut, evaluate_held_out

pytestmark = pytest.mark.long


def _text_run(model: object, text: object, out: Path, *more: str, target: str = "+0.1") -> Outcome:
    return run_command(
        *("post-train", "--model", model, "--text", text, "--target-loss", target, "--out", out),
        *("--window", "8", "--batch-size", "4", "--steps", "4", "--quiet", "--trained", "all"),
        *more,
    )


def test_post_train_writes_everything(
    tmp_path: Path, tiny: Path, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a line is a row of the table
    out = tmp_path / "out"
    outcome = _text_run(tiny, story, out)
    assert (outcome.code, outcome.err) == (0, "")
    metrics = json.loads((out / "metrics.json").read_text())
    assert {"seed", "verdict", "feasible", "held_out_windows", "dense", "sparse"} <= set(metrics)
    for name in ("dense", "sparse"):
        assert set(metrics[name]) == {field.name for field in fields(HeldOut)}
        assert metrics[name]["possible_attention_edges"] == 2 * 4 * 8 * 9 / 2
    assert metrics["dense"]["active_attention_edges"] == 288
    assert metrics["verdict"] in outcome.out
    assert metrics["verdict"].endswith("Skills of no group: kept 0 of 0 skills.")
    losses = [f"{metrics[side]['loss']:.3f}" for side in ("dense", "sparse")]
    for said in (*losses, "nats", "edges per token", "held-out rows"):
        assert said in outcome.out, said
    assert pd.read_csv(out / "history.csv")["step"].tolist() == [0, 1, 2, 3, 4]
    sparse = SparseTransformer.from_pretrained(out / "sparse", device="cpu")
    assert sparse.to_tokens("the cat").tolist() == [[0, 1, 2]]
    assert sorted(path.name for path in out.glob("[!.]*")) == [
        "history.csv",
        "metrics.json",
        "run.json",
        "skills.csv",
        "sparse",
        "texts.csv",
    ]
    (out / "checkpoint").mkdir()  # left by a job that was killed at its end
    with no_training():
        again = _text_run(tiny, story, out, "--prompt", "the cat sat")
    assert (again.code, again.out) == (0, outcome.out)
    assert not (out / "checkpoint").exists()
    drawn = (out / "circuit_diagram.svg").read_text()
    assert all(drawn.count(word) >= 2 for word in ("the", "cat", "sat"))  # in both panels
    assert {".html", ".png"} <= {path.suffix for path in out.glob("circuit_diagram.*")}


def test_the_verdict_says_which_skills_fell(
    tmp_path: Path, tiny: Path, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skills that a training task asks for are left out."""
    asked: dict[str, object] = {}

    def measured(dense: object, sparse: SparseTransformer, **options: object) -> SkillComparison:
        asked.update(options, dense=dense, sparse=sparse)
        row = {"family": "units", "title": "Units", "outcome": "fell", "change": -0.2}
        return SkillComparison(pd.DataFrame([row | {"above_dense": 0.9, "above_sparse": 0.7}]))

    monkeypatch.setattr(post_training, "compare_skills", measured)
    outcome = _text_run(tiny, story, tmp_path / "out")
    assert "Skills of no group: kept 0 of 1 skills; fell: Units 90% to 70%" in outcome.out
    assert asked["leave_out"] == [] and asked["dense"] is not asked["sparse"]
    assert pd.read_csv(tmp_path / "out" / "skills.csv")["family"].tolist() == ["units"]
    assert post_training._alike(["ioi", "anaphor"]) == ["anaphor_number"]


def test_post_train_on_other_held_out_text(tmp_path: Path, tiny: Path, story: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("the cat sat on a mat . " * 8)
    outcome = _text_run(tiny, story, tmp_path / "out", "--held-out-text", str(other))
    assert outcome.code == 0, outcome.err
    assert "other (held out): " in outcome.out
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert list(metrics["texts"]) == ["story", "other"]
    model, windows = (
        load_model(tiny),
        text_rows(read_documents(other), load_model(tiny).tokenizer, 8),
    )
    assert len(windows) == 7  # 57 tokens
    assert metrics["texts"]["other"]["dense"]["loss"] == evaluate_held_out(model, windows).loss


def test_documents_meet_or_not(tmp_path: Path, tiny: Path) -> None:
    """160 documents of six tokens, the first of which separates them, in windows of eight."""
    story, found = tmp_path / "story.txt", {}
    story.write_text("<|endoftext|>".join(["the cat sat on a"] * 160))
    for name in ("skip", "split"):
        outcome = _text_run(tiny, story, tmp_path / name, "--boundaries", name, "--steps", "1")
        assert outcome.code == 0, outcome.err
        metrics = json.loads((tmp_path / name / "metrics.json").read_text())
        dense = metrics["dense"]
        found[name] = metrics["held_out_windows"], dense["possible_attention_edges"]
        found[f"loss, {name}"] = dense["loss"]
    # A tenth of 120 or 160 windows is held out, and half of that is reported on; 8 heads.
    assert found["skip"] == (6, 8 * 8 * 9 / 2)
    assert found["split"] == (8, 8 * 6 * 7 / 2)
    assert found["loss, skip"] != found["loss, split"]


def test_gates_on_mlps_and_text_that_is_seen_twice(tmp_path: Path, tiny: Path, story: Path) -> None:
    outcome = _text_run(tiny, story, tmp_path / "out", "--mlps", "--steps", "24")
    assert outcome.code == 0
    assert "the run uses 96 rows of story, which has" in " ".join(outcome.err.split())
    assert "MLP outputs active" in " ".join(outcome.out.split())
    sparse = SparseTransformer.from_pretrained(tmp_path / "out" / "sparse", device="cpu")
    assert sparse.mlp_gates is not None


def test_activations_that_are_computed_twice(
    tmp_path: Path, tiny: Path, story: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[object] = []
    plain = post_training.checkpointed_activations

    def noted(model: object) -> object:
        entered.append(model)
        return plain(model)

    monkeypatch.setattr(post_training, "checkpointed_activations", noted)
    assert _text_run(tiny, story, tmp_path / "out", "--checkpoint-activations").code == 0
    assert len(entered) == 1


@pytest.mark.skipif(HAS_HOOKED, reason="the model is a HookedTransformer there, without adapters")
def test_low_rank_adapters_are_merged_in_what_is_written(
    tmp_path: Path, tiny: Path, story: Path
) -> None:
    lora = ("--trained", "lora", "--lora")
    outcome = _text_run(tiny, story, tmp_path / "out", *lora, "2")
    assert (outcome.code, outcome.err) == (0, "")
    sparse = SparseTransformer.from_pretrained(tmp_path / "out" / "sparse", device="cpu")
    assert not lora_parameters(sparse)
    changed = _text_run(tiny, story, tmp_path / "out", *lora, "3")
    assert changed.code == 2
    assert "lora" in changed.err


def test_a_mended_command_needs_no_restart(tmp_path: Path, tiny: Path, story: Path) -> None:
    """A command that was refused before it began has not made the folder its own."""
    with no_training():
        assert _text_run(tiny, story, tmp_path / "out", "--window", "800").code == 2
    outcome = _text_run(tiny, story, tmp_path / "out")
    assert outcome.code == 0, outcome.err


def test_restart_begins_anew(tmp_path: Path, tiny: Path, story: Path) -> None:
    out = tmp_path / "out"
    assert _text_run(tiny, story, out, "--steps", "1").code == 0
    own = ("notes.csv", "curves.png", "sparse/mine.json")
    (out / ".git").mkdir()
    for name in (*own, ".git/HEAD"):
        (out / name).touch()
    outcome = _text_run(tiny, story, out, "--seed", "1", "--restart")
    assert outcome.code == 0, outcome.err
    assert json.loads((out / "metrics.json").read_text())["seed"] == 1
    aside = out / "earlier-1"
    assert all((aside / name).exists() for name in own)
    assert json.loads((aside / "metrics.json").read_text())["seed"] == 0
    assert not any((out / name).exists() for name in own) and (out / ".git/HEAD").exists()
    (out / "run.json").rename(aside / "run.json")  # as if the next restart had been killed
    outcome = _text_run(tiny, story, out, "--seed", "1")
    assert outcome.code == 2 and "neither empty nor" in outcome.err


def test_weights_in_bfloat16(tmp_path: Path, tiny: Path, story: Path) -> None:
    outcome = _text_run(tiny, story, tmp_path / "out", "--dtype", "bfloat16", "--trained", "qk")
    assert (outcome.code, outcome.err) == (0, "")
    sparse = SparseTransformer.from_pretrained(tmp_path / "out" / "sparse", device="cpu")
    assert adapt(sparse).dtype == torch.bfloat16
    assert sparse.gates.bias.dtype == torch.float32
    wrong = _text_run(tiny, story, tmp_path / "wrong", "--dtype", "bf16")
    assert wrong.code == 2 and "--dtype: Input should be 'float32'" in wrong.err


def test_text_of_its_own_and_several_texts(tmp_path: Path, tiny: Path, story: Path) -> None:
    """The model writes the first text; each has its line."""
    out = tmp_path / "out"
    more = ("--window", "8", "--batch-size", "4", "--steps", "2", "--trained", "all", "--quiet")
    more += ("--own-windows", "60", "--text", "own", "--text", str(story))
    both = run_command("post-train", "--model", tiny, "--out", out, *more)
    assert (both.code, both.err) == (0, "")
    texts = ["own", "short", "short after BOS", "story"]
    metrics = json.loads((out / "metrics.json").read_text())
    assert list(metrics["texts"]) == texts
    assert metrics["texts"]["story"]["sparse"]["divergence"] is not None
    assert pd.read_csv(out / "texts.csv")["text"].tolist() == texts
    assert "divergence of 0.05 nats in each of 4 groups" in both.out
