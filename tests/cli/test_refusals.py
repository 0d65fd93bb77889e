"""What commands refuse and how they stop, as users meet it: without the checks of annotations that
pytest switches on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ADDITION, Outcome, run_command

from sparse_tl.data.streams import ShuffledStream
from sparse_tl.files import read_tensors

PLAIN = """
import contextlib, io, json, os, signal, sys, traceback
from sparse_tl.cli import main
from sparse_tl.data.streams import ShuffledStream

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
    "device": (
        ["circuits", "--device", "abacus"],
        "a device that PyTorch can use here, .* got 'abacus' .*See `sparse-tl circuits --help`",
    ),
    "command": (["multiplication"], "No such command 'multiplication'.* See `sparse-tl --help`"),
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
    commands["target"] += ["--dense-steps", "1", "--quiet"]
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
    assert not (folder / "dense").exists()


def test_ctrl_c_ends_with_130(plain: dict[str, tuple[Outcome, Path]]) -> None:
    outcome, _ = plain["interrupted"]
    assert outcome.code == 130, outcome.err
    assert "the same command goes on from there" in outcome.err


def test_the_same_command_goes_on_after_ctrl_c(
    plain: dict[str, tuple[Outcome, Path]], tmp_path: Path
) -> None:
    outcome, out = plain["interrupted"]
    assert "Traceback" not in outcome.err
    assert not (out / "metrics.json").exists()
    assert (out / "checkpoint-dense" / "state.json").exists()
    steps: list[int] = []
    batch = ShuffledStream.batch

    def noted(self: ShuffledStream, step: int) -> Any:
        steps.append(step)
        return batch(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShuffledStream, "batch", noted)
        # What comes after training is tested elsewhere, and takes far longer than these steps.
        patch.setattr("sparse_tl.runs.addition.DIGITS", ())
        assert run_command(*ADDITION, "--device", "cpu", "--out", out).code == 0
        assert steps == [2, 0, 1], "the dense model goes on at step 2, post-training starts"
        assert run_command(*ADDITION, "--device", "cpu", "--out", tmp_path).code == 0
    # And ends where the uninterrupted run ended.
    for name in ("dense", "sparse"):
        one, other = (read_tensors(run / name / "model.safetensors") for run in (tmp_path, out))
        assert all(torch.equal(one[key], other[key]) for key in one), name
