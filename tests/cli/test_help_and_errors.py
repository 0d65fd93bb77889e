"""Examples in the help that run, and errors that say whose fault they are."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command_line import run_command

from sparse_tl.cli.app import show

COMMANDS = ("addition", "post-train", "circuits", "head-roles", "head-behaviour", "graph")
COMMANDS += ("doctor", "get")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_can_be_read_by_its_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pairs.csv").touch()
    shown = run_command(name, "--help", whole=True).out.partition("\n Examples\n")[2]
    lines = shown.replace("\\\n", " ").splitlines()
    examples = [shlex.split(line)[1:] for line in lines if line.startswith("   sparse-tl")]
    reached: list[Any] = []

    def stop(*arguments: Any, **options: Any) -> None:
        reached.append(options)
        raise NotImplementedError("far enough")

    jobs = ("addition", "post_training", "circuits", "head_roles", "head_behaviour", "graph")
    for job in (*jobs, "doctor"):
        monkeypatch.setattr(f"sparse_tl.jobs.run_{job}", stop)
    for name in ("get_language_model", "cached_file"):
        monkeypatch.setattr(f"sparse_tl.zoo.{name}", stop)
    assert len(examples) >= 2
    for words in examples:
        assert run_command(*words).code == 1, words
    assert len(reached) == len(examples)


def test_no_number_is_cut_off_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    numbers = {
        "dense_loss": 1.62,
        "sparse_loss": 1.66,
        "divergence": 0.048,
        "dense_edges_per_token": 1300.0,
        "sparse_edges_per_token": 179.3,
        "times_fewer": 7.25,
    }
    show("Held-out rows", pd.DataFrame(numbers, index=["tinystories_val"]))
    printed = capsys.readouterr().out
    assert all(number in printed for number in ("1.62", "1.66", "0.048", "1,300", "179.3", "7.25"))
    assert all(len(line) == 80 for line in printed.splitlines())


def _circuits_that_raise(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("sparse_tl.jobs.run_circuits", fail)


def test_a_bug_is_called_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    _circuits_that_raise(monkeypatch, KeyError("blocks[9]"))
    outcome = run_command("circuits")
    assert outcome.code == 1
    assert outcome.err.startswith("Error: unexpected KeyError: 'blocks[9]'. This is a bug")
    assert "--debug" in outcome.err and "sparse-tl doctor" in outcome.err
    assert "Traceback" not in outcome.err
