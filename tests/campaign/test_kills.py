"""Jobs that are killed at any moment, again and again, end as if they never had been."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from jobs import JOBS, content, hidden, inputs
from processes import run

from sparse_tl.storage.files import read_json, read_tensors, recover_folder

SIGNALS = (signal.SIGKILL,) * 3 + (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
KILLS = 3
"""Kills of one job before it may end."""
QUICK = {"post_train", "fit_head_gates"}
"""Jobs of the normal run, which make their models themselves."""


def _whole(folder: Path) -> None:
    """Every file can be read."""
    for earlier in folder.rglob("*.earlier"):
        recover_folder(earlier.parent.with_name(earlier.stem))
    for file in folder.rglob("*"):
        if file.suffix == ".json" and not hidden(file, folder):
            read_json(file)
        elif file.suffix == ".safetensors" and not hidden(file, folder):
            read_tensors(file)


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in JOBS]
)
def test_a_killed_job_loses_nothing(name: str, tmp_path: Path) -> None:
    if name not in QUICK:
        inputs(tmp_path / "inputs")
    folder, untouched, draw = tmp_path / "killed", tmp_path / "whole", random.Random(name)
    folder.mkdir()
    untouched.mkdir()
    expected = run(JOBS[name], untouched)
    assert expected.code == 0, expected.answer
    for _ in range(KILLS):
        number = draw.choice(SIGNALS)
        ended = run(JOBS[name], folder, (draw.randrange(1, expected.touches // 2), number))
        assert ended.code in (0, -number, 130), ended.answer
        _whole(folder)
    ended = run(JOBS[name], folder)
    assert (ended.code, ended.answer) == (0, expected.answer)
    assert content(folder) == content(untouched)
