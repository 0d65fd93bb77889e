"""Examples in the help that run, and errors that say whose fault they are."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from command_line import run_command

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
