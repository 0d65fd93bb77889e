"""The help that users read, and errors that say whose fault they are and what to do."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from command_line import Outcome, run_command

from sparse_tl import __version__

COMMANDS = ("addition", "post-train", "circuits", "head-roles", "doctor", "get")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def test_help_lists_the_commands_in_the_order_of_their_use() -> None:
    outcome = run_command("--help")
    assert (outcome.code, outcome.err) == (0, "")
    places = [outcome.out.index(f"│ {name} ") for name in COMMANDS]
    assert places == sorted(places)
    assert "First steps sparse-tl doctor" in outcome.out


def test_without_a_command_the_help_is_shown_and_nothing_else() -> None:
    outcome = run_command()
    assert outcome.code == 2
    assert outcome.err == ""
    assert outcome.out == run_command("--help").out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_groups_its_options_and_shows_examples(name: str) -> None:
    outcome = run_command(name, "--help", whole=True)
    assert outcome.code == 0, outcome.err
    assert "─ Input ─" in outcome.out
    assert "─ Run ─" in outcome.out
    assert "─ Options ─" not in outcome.out, "no option is left out of the groups"
    assert "<bool>" not in outcome.out
    _, _, examples = outcome.out.partition("\n Examples\n")
    assert examples.count(f"   sparse-tl {name}") >= 2
    assert max(map(len, examples.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_can_be_read_by_its_command(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = run_command(name, "--help", whole=True).out.partition("\n Examples\n")[2]
    lines = shown.replace("\\\n", " ").splitlines()
    examples = [line.split()[1:] for line in lines if line.startswith("   sparse-tl")]
    reached: list[Any] = []

    def stop(*arguments: Any, **options: Any) -> None:
        reached.append(options)
        raise ValueError("far enough")

    for job in ("addition", "post_training", "circuits", "head_roles", "doctor"):
        monkeypatch.setattr(f"sparse_tl.runs.run_{job}", stop)
    for name in ("get_language_model", "cached_file"):
        monkeypatch.setattr(f"sparse_tl.models.{name}", stop)
    assert len(examples) >= 2
    for words in examples:
        assert run_command(*words).code == 1, words
    assert len(reached) == len(examples)


def test_version() -> None:
    assert run_command("--version") == Outcome(0, f"sparse_tl {__version__}", "")


def test_the_package_can_be_run_as_a_module() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "sparse_tl", "--version"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (process.returncode, process.stdout.strip()) == (0, f"sparse_tl {__version__}")


def _circuits_that_raise(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("sparse_tl.runs.run_circuits", fail)


def test_a_bug_is_called_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    _circuits_that_raise(monkeypatch, KeyError("blocks[9]"))
    outcome = run_command("circuits")
    assert outcome.code == 1
    assert outcome.err.startswith("Error: unexpected KeyError: 'blocks[9]'. This is a bug")
    assert "--debug" in outcome.err and "sparse-tl doctor" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    "words",
    [("--debug", "circuits"), ("circuits", "--debug"), ("circuits", "--debug", "--seeds", "1")],
)
@pytest.mark.parametrize("error", [KeyError("x"), OSError(28, "No space left on device")])
def test_debug_shows_the_traceback_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], error: Exception
) -> None:
    _circuits_that_raise(monkeypatch, error)
    outcome = run_command(*words)
    assert outcome.code == 1
    assert outcome.err.startswith("Traceback (most recent call last)")
    assert "in fail raise error" in outcome.err
    assert "Error: " in outcome.err


def test_the_machine_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    _circuits_that_raise(monkeypatch, OSError(28, "No space left on device"))
    outcome = run_command("circuits")
    assert (outcome.code, outcome.err) == (1, "Error: [Errno 28] No space left on device")


@pytest.mark.every_case
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB\n"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory. Tried 2 GiB"),
    ],
)
def test_out_of_memory_says_what_to_make_smaller(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    _circuits_that_raise(monkeypatch, error)
    outcome = run_command("circuits")
    assert outcome.code == 1
    assert "memory. Tried 2 GiB. Use a smaller --batch-size" in outcome.err
    assert "bug" not in outcome.err


def test_commands_to_the_terminal_are_shown_and_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(*_: Any, **__: Any) -> None:
        warnings.warn("a\x1b[2J\x9b2J\u202eb.txt", stacklevel=1)
        raise ValueError("a\x1b[2J\x9b2J\u202eb.txt")

    monkeypatch.setattr("sparse_tl.runs.run_circuits", warn)
    for words in ([], ["--debug"]):
        outcome = run_command("circuits", *words)
        assert outcome.err.count(r"a\x1b[2J\x9b2J\u202eb.txt") >= 2
        assert outcome.err.isprintable()


def test_warnings_are_lines_without_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(*_: Any, **__: Any) -> None:
        warnings.warn("the model[0] misses its target", stacklevel=1)
        raise ValueError("enough")

    monkeypatch.setattr("sparse_tl.runs.run_circuits", warn)
    outcome = run_command("circuits")
    assert outcome.err.startswith("Warning: the model[0] misses its target Error: ")
