"""``sparse-tl`` as a launcher starts it: several processes, one folder, one table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run_command

LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1")
LAUNCH += ("--num_processes", "2", "--main_process_port", "0", "-m", "sparse_tl")


def _launched(*arguments: object) -> subprocess.CompletedProcess[str]:
    """On CPUs, also where there are GPUs."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *LAUNCH, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)


@pytest.mark.long
@pytest.mark.parametrize("shard", [(), ("--shard",)], ids=["whole", "sharded"])
def test_post_train_on_two_ranks(
    tmp_path: Path, tiny: Path, story: Path, shard: tuple[str, ...]
) -> None:
    """The folder is that of one process, and everything is said once."""
    run = ("post-train", "--model", tiny, "--text", story, "--target-loss", "+0.1")
    run += ("--window", 8, "--batch-size", 4, "--steps", 4)
    outcome = _launched(*run, *shard, "--out", tmp_path / "out")
    assert outcome.returncode == 0, outcome.stderr
    written = sorted(path.name for path in (tmp_path / "out").glob("[!.]*"))
    skills = [] if shard else ["skills.csv"]
    files = ["history.csv", "metrics.json", "run.json", *skills, "sparse", "texts.csv"]
    assert written == files
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    said = " ".join(outcome.stdout.split())
    assert said.count(metrics["verdict"]) == 1 and said.count("on held-out rows") == 1
    assert outcome.stderr.count("post-training · 4 of 4") <= 1
    alone = run_command(*run, "--quiet", "--out", tmp_path / "alone")
    assert alone.code == 0, alone.err
    dense = json.loads((tmp_path / "alone" / "metrics.json").read_text())["dense"]
    assert metrics["dense"]["loss"] == pytest.approx(dense["loss"], rel=1e-6)
    again = run_command(*run, "--quiet", "--out", tmp_path / "out")
    assert again.code == 0 and metrics["verdict"] in again.out, "the folder is whole"
