"""What commands refuse and how they stop, as users meet it: without the checks of annotations that
pytest switches on."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ADDITION, run_command

from sparse_tl.data.streams import ShuffledStream
from sparse_tl.storage.files import read_tensors

REFUSED = {
    "task": (["circuits", "--tasks", "IOI"], "Did you mean 'ioi'"),
    "task of a model": (["head-roles", "--model", "MODEL", "--tasks", "IOI"], "Did you mean 'ioi'"),
    "method": (["circuits", "--method", "eapig"], "Did you mean 'eap-ig'"),
    "model": (["circuits", "--model", "smolm2"], "short names, such as 'smollm2'"),
    "model of the hub": (["graph", "--model", "gemma-2b", "--prompt", "a"], "google/gemma-2b"),
    "model to download": (["get", "smollm"], "Did you mean 'smollm2'"),
    "no sparse model": (
        ["circuits", "--model", "MODEL", "--sparse", "missing"],
        "missing",
    ),
    "no pairs": (["circuits", "--model", "MODEL", "--pairs-file", "a.csv"], "no file a.csv"),
    "no prompt": (["graph", "--model", "MODEL"], "--prompt"),
    "option": (["addition", "--sed", "1"], "No such option: --sed"),
    "no text": (
        [
            *("post-train", "--model", "MODEL", "--text", "missing.txt", "--target-loss", "+1"),
            *("--window", "8"),
        ],
        "missing.txt is not a file",
    ),
}


@pytest.fixture(autouse=True)
def plain(offline: None, unchecked_types: None) -> None:
    """As on a machine without a network, and without the checks of annotations."""


@pytest.mark.parametrize("name", list(REFUSED))
def test_bad_input_gets_one_clear_paragraph(
    name: str, tiny: Path, story: Path, tmp_path: Path
) -> None:
    words, message = REFUSED[name]
    places = {"MODEL": tiny, "STORY": story}
    out = () if words[0] == "get" else ("--out", tmp_path / "out")
    outcome = run_command(*(places.get(word, word) for word in words), *out)
    assert outcome.code == 2
    assert outcome.err.startswith("Error: ")
    assert "Traceback" not in outcome.err
    assert re.search(message, outcome.err), outcome.err
    assert len(outcome.err) < 1500
    assert not list(tmp_path.rglob("*.safetensors")), "refused before training"


@pytest.mark.long
def test_the_same_command_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    out = tmp_path / "interrupted"
    batch = ShuffledStream.batch

    def pressed(self: ShuffledStream, step: int) -> Any:
        if step == 1:
            signal.raise_signal(signal.SIGINT)
        return batch(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShuffledStream, "batch", pressed)
        outcome = run_command(*ADDITION, "--device", "cpu", "--out", out)
    assert outcome.code == 130, outcome.err
    assert "run the same command again to resume" in outcome.err
    assert "Traceback" not in outcome.err
    assert not (out / "metrics.json").exists()
    assert (out / "checkpoint-dense" / "state.json").exists()
    steps: list[int] = []

    def noted(self: ShuffledStream, step: int) -> Any:
        steps.append(step)
        return batch(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShuffledStream, "batch", noted)
        # What comes after training is tested elsewhere, and takes far longer than these steps.
        patch.setattr("sparse_tl.jobs.addition.DIGITS", ())
        assert run_command(*ADDITION, "--device", "cpu", "--out", out).code == 0
        data, trained = steps[:2], steps[2:]
        assert data == [0, 1], "whether it is the same data"
        assert trained == [2, 0, 1], "the dense model goes on at step 2, post-training starts"
        assert run_command(*ADDITION, "--device", "cpu", "--out", tmp_path / "whole").code == 0
    # And ends where the uninterrupted run ended.
    for name in ("dense", "sparse"):
        one, other = (
            read_tensors(run / name / "model.safetensors") for run in (tmp_path / "whole", out)
        )
        assert all(torch.equal(one[key], other[key]) for key in one), name
