"""The commands end to end: what they write, what they refuse, how they stop and go on."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sparse_tl.cli import main
from sparse_tl.hooks import Model, load_model, save_model
from sparse_tl.masks import SparseTransformer
from sparse_tl.metrics import NoEffectError
from sparse_tl.tasks.addition import AdditionTask
from sparse_tl.training import evaluate_held_out
from sparse_tl.training.data import ShuffledStream

ADDITION = ["addition", "--base-steps", "3", "--steps", "2", "--target-loss", "9", "--quiet"]


@dataclass
class Outcome:
    """How a command ended and what it said, on one line."""

    code: int
    out: str
    err: str


def _sparse_tl(*arguments: object) -> Outcome:
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["sparse-tl", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = before
    return Outcome(code, " ".join(out.getvalue().split()), " ".join(err.getvalue().split()))


@contextmanager
def _no_training() -> Iterator[None]:
    def refuse(self: ShuffledStream, step: int) -> Any:
        raise AssertionError("training began")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShuffledStream, "batch", refuse)
        yield


# addition


@pytest.fixture(scope="module")
def addition(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    out = tmp_path_factory.mktemp("runs") / "addition"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparse_tl.runs.addition.PAIRS", 8)
        return out, _sparse_tl(*ADDITION, "--out", out, "--device", "cpu")


def test_addition_prints_a_table(addition: tuple[Path, Outcome]) -> None:
    _, outcome = addition
    assert (outcome.code, outcome.err) == (0, "")
    for text in (
        "Addition, autoregressive, seed 0: 1,000 held-out sums",
        "base",
        "sparse",
        "sums exactly right",
        "active attention edges per sum",
        "share of 1056 possible",
        "heads in use",
    ):
        assert text in outcome.out, text
    # Three steps cannot get every sum right, and the command says so.
    assert "NOT met" in outcome.out


def test_addition_writes_everything(addition: tuple[Path, Outcome]) -> None:
    out, _ = addition
    metrics = json.loads((out / "metrics.json").read_text())
    assert set(metrics) == {"seed", "form", "seconds", "base", "sparse", "circuits", "no_circuits"}
    assert (metrics["seed"], metrics["form"]) == (0, "autoregressive")
    assert metrics["seconds"] > 0
    for name in ("base", "sparse"):
        assert set(metrics[name]) == {
            "heldout_accuracy",
            "heldout_loss",
            "active_attention_edges",
            "possible_attention_edges",
            "active_heads",
        }
    assert metrics["base"]["active_attention_edges"] == 1056
    assert metrics["base"]["possible_attention_edges"] == 4 * 4 * 11 * 12 / 2
    history = pd.read_csv(out / "history.csv")
    assert history["phase"].unique().tolist() == ["base", "sparse"]
    assert history.groupby("phase")["step"].max().to_dict() == {"base": 3, "sparse": 2}
    assert {"step", "loss", "lambda", "held_out_loss"} <= set(history)
    html = (out / "addition.html").read_text(encoding="utf-8")
    assert "Base Model" in html
    assert "Sparse Model" in html
    assert "<svg" in (out / "addition.svg").read_text(encoding="utf-8")
    assert (out / "addition.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / "checkpoints").exists()
    assert not [path for path in out.rglob(".*")], "nothing temporary is left"


def test_addition_tells_what_each_digit_needs(addition: tuple[Path, Outcome]) -> None:
    out, outcome = addition
    circuits = json.loads((out / "metrics.json").read_text())["circuits"]
    assert list(circuits) == ["hundreds", "tens", "units"]
    for digit, said in circuits.items():
        assert 1 <= said["dense"]["edges_at_0.9"] <= 4 * 4 * 37, "of a graph of 4 x 4 heads"
        for side in ("dense", "sparse"):
            assert (out / "circuits" / digit / side / "edge_scores" / "result.json").exists()
    assert "Parts needed for an explained effect of 0.9" in outcome.out
    assert (out / "circuits" / "edges_kept.html").exists()


def test_a_digit_without_an_effect_is_told_and_the_others_are_drawn(
    addition: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "addition"
    shutil.copytree(addition[0], out)
    shutil.rmtree(out / "circuits" / "units" / "sparse")

    def refuse(*_: Any, **__: Any) -> None:
        raise NoEffectError("there is no effect to explain")

    monkeypatch.setattr("sparse_tl.runs.addition.measure", refuse)
    outcome = _sparse_tl(*ADDITION, "--out", out, "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert "No circuit: Addition, units, sparse model: there is no effect" in outcome.out
    metrics = json.loads((out / "metrics.json").read_text())
    assert list(metrics["circuits"]) == ["hundreds", "tens"]
    assert len(metrics["no_circuits"]) == 1


def test_the_written_models_give_the_written_numbers(addition: tuple[Path, Outcome]) -> None:
    out, _ = addition
    metrics = json.loads((out / "metrics.json").read_text())
    test = AdditionTask("autoregressive").split(seed=0)[2]
    written = {
        "base": load_model(out / "base", device="cpu"),
        "sparse": SparseTransformer.from_pretrained(out / "sparse", device="cpu"),
    }
    for name, model in written.items():
        measured = evaluate_held_out(model, test)
        assert measured.loss == metrics[name]["heldout_loss"]
        assert measured.active_edges == metrics[name]["active_attention_edges"]
    assert written["base"].to_tokens("36+28=").tolist() == [[3, 6, 10, 2, 8, 11]]


def test_called_again_it_reuses_what_is_finished(addition: tuple[Path, Outcome]) -> None:
    out, first = addition
    weights = (out / "sparse" / "model.safetensors").stat().st_mtime_ns
    before = json.loads((out / "metrics.json").read_text())
    with _no_training():
        again = _sparse_tl(*ADDITION, "--out", out)
    assert again.code == 0, again.err
    assert (out / "sparse" / "model.safetensors").stat().st_mtime_ns == weights
    after = json.loads((out / "metrics.json").read_text())
    assert after["base"] == before["base"]
    assert after["sparse"] == before["sparse"]
    assert again.out.split(" seconds")[0].rsplit(" ", 1)[0] in first.out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--seed", "1"], "seed 0 there, 1 here"),
        (["--form", "placeholder"], "form 'autoregressive' there, 'placeholder' here"),
        (["--base-steps", "4"], "base_steps 3 there, 4 here"),
    ],
)
def test_other_settings_on_the_same_folder(
    addition: tuple[Path, Outcome], change: list[str], message: str
) -> None:
    out, _ = addition
    with _no_training():
        outcome = _sparse_tl(*ADDITION, "--out", out, *change)
    assert outcome.code == 1
    assert outcome.out == ""
    assert outcome.err.startswith("Error: ")
    assert message in outcome.err
    assert "--restart" in outcome.err
    assert "Traceback" not in outcome.err
    assert (out / "metrics.json").exists()


def test_post_train_does_not_take_the_folder_of_another_command(
    addition: tuple[Path, Outcome], tiny: Path, story: Path
) -> None:
    out, _ = addition
    with _no_training():
        outcome = _sparse_tl(
            *("post-train", "--model", tiny, "--text", story),
            *("--target-loss", "+0.1", "--out", out),
        )
    assert outcome.code == 1
    assert "command 'addition' there, 'post-train' here" in outcome.err


def test_restart_begins_anew(tmp_path: Path, tiny: Path, story: Path) -> None:
    out = tmp_path / "out"
    assert _text_run(tiny, story, out).code == 0
    (out / "of the first run").touch()
    outcome = _text_run(tiny, story, out, "--seed", "1", "--restart")
    assert outcome.code == 0, outcome.err
    assert json.loads((out / "metrics.json").read_text())["seed"] == 1
    assert not (out / "of the first run").exists()


def test_restart_does_not_clear_a_folder_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with _no_training():
        outcome = _sparse_tl(*ADDITION, "--out", tmp_path, "--restart")
    assert outcome.code == 1
    assert "thesis.tex" in outcome.err
    assert (tmp_path / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("sub", ["file.txt", "file.txt/sub"])
def test_an_output_folder_that_cannot_be_written(tmp_path: Path, sub: str) -> None:
    (tmp_path / "file.txt").touch()
    with _no_training():
        outcome = _sparse_tl(*ADDITION, "--out", tmp_path / sub)
    assert outcome.code == 1
    assert outcome.err.startswith("Error: expected a folder that can be written; got ")
    assert "Traceback" not in outcome.err


# post-train

WORDS = ["<s>", "the", "cat", "dog", "sat", "ran", "on", "a", "mat", "hill", ".", "and"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, build_tiny: Callable[..., Model]) -> Path:
    """A model of our own format with a tokenizer of a dozen words."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="."))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<s>")
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    save_model(build_tiny("grouped", d_vocab=len(WORDS), tokenizer=tokenizer), folder)
    return folder


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty stories of eleven words: ninety windows of eight tokens."""
    path = tmp_path_factory.mktemp("text") / "story.txt"
    choice = random.Random(0)
    stories = [" ".join(choice.choices(WORDS[1:], k=11)) for _ in range(60)]
    path.write_text("\n<|endoftext|>\n".join(stories), encoding="utf-8")
    return path


def _text_run(model: object, text: object, out: Path, *more: str, target: str = "+0.1") -> Outcome:
    return _sparse_tl(
        *("post-train", "--model", model, "--text", text, "--target-loss", target, "--out", out),
        *("--window", "8", "--batch-size", "4", "--steps", "4", "--quiet", *more),
    )


def test_post_train_writes_everything(tmp_path: Path, tiny: Path, story: Path) -> None:
    out = tmp_path / "out"
    outcome = _text_run(tiny, story, out)
    assert (outcome.code, outcome.err) == (0, "")
    metrics = json.loads((out / "metrics.json").read_text())
    assert {"seed", "verdict", "feasible", "heldout_windows", "dense", "sparse"} <= set(metrics)
    for name in ("dense", "sparse"):
        assert {
            "heldout_loss",
            "active_attention_edges",
            "possible_attention_edges",
            "active_heads",
        } <= set(metrics[name])
        assert metrics[name]["possible_attention_edges"] == 2 * 4 * 8 * 9 / 2
    assert metrics["dense"]["active_attention_edges"] == 288
    assert metrics["verdict"] in outcome.out
    for text in ("dense", "sparse", "loss (nats per token)", "heads in use", "held-out windows"):
        assert text in outcome.out, text
    assert pd.read_csv(out / "history.csv")["step"].tolist() == [0, 1, 2, 3, 4]
    sparse = SparseTransformer.from_pretrained(out / "sparse", device="cpu")
    assert sparse.to_tokens("the cat").tolist() == [[0, 1, 2]]
    assert sorted(path.name for path in out.iterdir()) == [
        "history.csv",
        "metrics.json",
        "run.json",
        "sparse",
    ]
    with _no_training():
        again = _text_run(tiny, story, out)
    assert (again.code, again.out) == (0, outcome.out)


def test_post_train_on_other_held_out_text(tmp_path: Path, tiny: Path, story: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("the cat sat on a mat . " * 8)
    outcome = _text_run(tiny, story, tmp_path / "out", "--held-out-text", str(other))
    assert outcome.code == 0, outcome.err
    # 57 tokens: seven windows of eight, of which four are reported on.
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["heldout_windows"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [(5, "one window of 8 tokens; got 6 tokens"), (100, "at least 20 windows of text")],
)
def test_too_little_text(tmp_path: Path, tiny: Path, words: int, message: str) -> None:
    text = tmp_path / "short.txt"
    text.write_text("cat " * words)
    with _no_training():
        outcome = _text_run(tiny, text, tmp_path / "out")
    assert outcome.code == 1
    assert outcome.err.startswith("Error: expected")
    assert message in outcome.err


def test_a_target_below_the_dense_loss(tmp_path: Path, tiny: Path, story: Path) -> None:
    with _no_training():
        outcome = _text_run(tiny, story, tmp_path / "out", target="0.1")
    assert outcome.code == 1
    assert "expected a target loss that the model can reach" in outcome.err


def test_a_mended_command_needs_no_restart(tmp_path: Path, tiny: Path, story: Path) -> None:
    """A command that was refused before it began has not made the folder its own."""
    with _no_training():
        assert _text_run(tiny, story, tmp_path / "out", "--window", "800").code == 1
    outcome = _text_run(tiny, story, tmp_path / "out")
    assert outcome.code == 0, outcome.err


# As users meet it: without the checks of annotations that pytest switches on.

PLAIN = """
import contextlib, io, json, os, signal, sys, traceback
from sparse_tl.cli import main
from sparse_tl.training.data import ShuffledStream

batch = ShuffledStream.batch

def pressed(self, step):
    if step == 1:
        os.kill(os.getpid(), signal.SIGINT)
    return batch(self, step)

results = {}
source, target = sys.argv[1:]
for name, arguments in json.load(open(source)).items():
    sys.argv = ["sparse-tl", *arguments]
    ShuffledStream.batch = pressed if name == "interrupted" else batch
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        code = 1
        err.write(traceback.format_exc())
    results[name] = [code, " ".join(out.getvalue().split()), " ".join(err.getvalue().split())]
json.dump(results, open(target, "w"))
"""

REFUSED = {
    "form": (["addition", "--form", "roman"], "expected form .*; got 'roman'"),
    "target": (["addition", "--target-loss", "little"], "expected a target loss in nats above 0"),
    "option": (["addition", "--sed", "1"], "No such option: --sed"),
    "number": (["addition", "--seed", "one"], "--seed"),
    "command": (["multiplication"], "No such command 'multiplication'"),
    "missing": (["post-train", "--model", "MODEL", "--text", "STORY"], "--target-loss"),
    "no model": (
        ["post-train", "--model", "nowhere/model", "--text", "STORY", "--target-loss", "+1"],
        "nowhere/model",
    ),
    "offline model": (
        ["post-train", "--model", "gpt2", "--text", "STORY", "--target-loss", "+1"],
        "gpt2",
    ),
    "no text": (
        [
            *("post-train", "--model", "MODEL", "--text", "missing.txt", "--target-loss", "+1"),
            *("--window", "8"),
        ],
        "missing.txt is no file",
    ),
    "brackets": (
        [
            *("post-train", "--model", "MODEL", "--text", "story[bold].txt", "--target-loss", "+1"),
            *("--window", "8"),
        ],
        r"story\[bold\]\.txt",
    ),
    "window": (
        [
            *("post-train", "--model", "MODEL", "--text", "STORY", "--target-loss", "+1"),
            *("--window", "17"),
        ],
        "a window of at most 16 tokens, the model's context; got 17",
    ),
    "precision": (
        [
            *("post-train", "--model", "MODEL", "--text", "STORY", "--target-loss", "+1"),
            *("--window", "8", "--steps", "1", "--precision", "fp16"),
        ],
        "fp16",
    ),
    "trained": (
        [
            *("post-train", "--model", "MODEL", "--text", "STORY", "--target-loss", "+1"),
            *("--window", "8", "--steps", "1", "--trained", "some"),
        ],
        "expected trained to be one of .*'some'",
    ),
}


@pytest.fixture(scope="module")
def plain(
    tmp_path_factory: pytest.TempPathFactory, tiny: Path, story: Path
) -> dict[str, tuple[Outcome, Path]]:
    folder = tmp_path_factory.mktemp("plain")
    places = {"MODEL": str(tiny), "STORY": str(story)}
    commands = {
        name: [places.get(word, word) for word in words] + ["--out", str(folder / name)]
        for name, (words, _) in REFUSED.items()
    }
    commands["target"] += ["--base-steps", "1", "--quiet"]
    commands["interrupted"] = [*ADDITION, "--device", "cpu", "--out", str(folder / "interrupted")]
    threads = str(torch.get_num_threads())
    (folder / "commands.json").write_text(json.dumps(commands))
    process = subprocess.run(
        [sys.executable, "-c", PLAIN, "commands.json", "results.json"],
        # As without a network, and without its minutes of retries.
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
    )
    assert process.returncode == 0, process.stderr
    results = json.loads((folder / "results.json").read_text())
    return {name: (Outcome(*result), folder / name) for name, result in results.items()}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
        )
        for name in REFUSED
    ],
)
def test_bad_input_gets_one_clear_paragraph(
    plain: dict[str, tuple[Outcome, Path]], name: str
) -> None:
    outcome, _ = plain[name]
    assert outcome.code in {1, 2}
    assert outcome.err.startswith("Error: ")
    assert "Traceback" not in outcome.err
    assert re.search(REFUSED[name][1], outcome.err), outcome.err
    assert len(outcome.err) < 1500


def test_a_target_that_is_none_is_refused_before_training(
    plain: dict[str, tuple[Outcome, Path]],
) -> None:
    _, folder = plain["target"]
    assert not (folder / "base").exists()


def test_ctrl_c_ends_with_130(plain: dict[str, tuple[Outcome, Path]]) -> None:
    outcome, _ = plain["interrupted"]
    assert outcome.code == 130, outcome.err
    assert "the same command goes on from there" in outcome.err


def test_the_same_command_goes_on_after_ctrl_c(
    plain: dict[str, tuple[Outcome, Path]], addition: tuple[Path, Outcome]
) -> None:
    outcome, out = plain["interrupted"]
    assert "Traceback" not in outcome.err
    assert not (out / "metrics.json").exists()
    assert (out / "checkpoints" / "base" / "state.json").exists()
    steps: list[int] = []
    batch = ShuffledStream.batch

    def noted(self: ShuffledStream, step: int) -> Any:
        steps.append(step)
        return batch(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShuffledStream, "batch", noted)
        assert _sparse_tl(*ADDITION, "--device", "cpu", "--out", out).code == 0
    assert steps == [2, 0, 1], "the base model goes on at step 2, post-training starts"
    # And ends where the uninterrupted run ended.
    for name in ("base", "sparse"):
        one = load_model(addition[0] / name, device="cpu").state_dict()
        other = load_model(out / name, device="cpu").state_dict()
        assert all(torch.equal(one[key], other[key]) for key in one), name
