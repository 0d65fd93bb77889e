"""Every option of every command is given what it cannot take.

Each command must end with exit code 1 or 2 and one message, before long work: no traceback, no
"bug in sparse_tl", no file that a run would take for a result.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest
import typer

from sparse_tl.cli import app
from sparse_tl.cli.errors import main
from sparse_tl.data.streams import ShuffledStream

LONGEST = 60
"""Seconds that a refusal may take."""
AT_MOST = int(os.environ.get("SPARSE_TL_CAMPAIGN", "20"))
"""Malformed commands in the normal run; 0 for all."""
COMMANDS = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
del COMMANDS["get"]  # it downloads, and has tests of its own
HUGE = str(10**20)
NAMES = ("form", "trained", "gates", "precision", "dtype", "method", "patch", "task", "tasks")
READ = ("text", "held_out_text", "model", "sparse")
"""Options that name files, folders or models."""


class Places(NamedTuple):
    """Files and folders that options are given."""

    model: Path
    text: Path
    latin: Path
    empty: Path
    folder: Path
    missing: Path


def needed(command: str, places: Places) -> dict[str, str]:
    """Options without which the command is not valid."""
    given = {"out": str(places.missing.parent / "out"), "device": "cpu", "quiet": ""}
    if command == "post-train":
        given |= {"model": str(places.model), "text": str(places.text), "target_loss": "+1"}
        given |= {"window": "8", "steps": "1"}
    return {} if command == "doctor" else given


def kinds(command: str) -> dict[str, type]:
    """What each option is read as."""
    function = next(some.callback for some in app.registered_commands if some.name == command)
    hints = get_type_hints(function)
    return {name: next(iter(get_args(hint)), hint) for name, hint in hints.items()}


def values(command: str, option: Any, places: Places) -> Iterator[str]:
    """What an option cannot take."""
    name = str(option.name)
    kind = kinds(command)[name]
    if kind in (int, float):
        yield from ("", "many", "1e", "nan", "inf", "-inf", "[1]")
    if kind is int:
        yield from ("1.5", "-1", HUGE, "-" + HUGE)
        if name not in ("seed", "lora"):  # 0 is a seed, and no adapters
            yield "0"
    if name in ("steps", "dense_steps", "updates", "batch_size", "prompts", "pairs"):
        yield str(10**9 + 1)
    if name == "seeds" and kind is int:
        yield str(10**9)
    if name in ("learning_rate", "head_cost"):
        yield from ("-1", "-1e-9")
    if name == "initial_bias":
        yield from (HUGE, "-" + HUGE)
    if name in ("lambda_", "learning_rate"):
        yield "0"
    if name == "target_loss":
        yield from ("", "little", "nan", "-1", "0", "+0", "+nan", "++1", "1e999")
    if name == "target_edges":  # the command has a target loss already
        yield from ("", "few", "nan", "-1", "0x", "x", "2")
    if name in NAMES:
        yield from ("nonsense", "Nonsense[bold]", "é")
    if name == "seeds" and kind is str:
        yield from ("", ",", "-1", "1.5", "one", HUGE, "0,-1", "0;1")
    if name == "device":
        yield from ("abacus", "cuda:99", "meta", "gpu", "cpu:x", "0")
    if name == "out":
        yield from (str(places.text), str(places.text / "below"), str(places.folder), "/dev/null/x")
    if name in READ:
        yield from map(str, (places.missing, places.latin, places.empty, places.folder))
        yield "nobody/nothing-of-this-name"
        yield str(places.missing) + "\x1b[31m"


def cases(places: Places) -> Iterator[list[str]]:
    """Command lines, each with one thing that is wrong."""
    for name, command in COMMANDS.items():
        base = needed(name, places)
        yield [name, "--no-such-option"]
        yield [name, "unexpected"]
        if "out" in base:
            yield [name, *_words(command, {**base, "device": "cpu"}), "--sed", "1"]
        for option in command.params:
            if option.param_type_name != "option" or option.name in ("help", "restart", "quiet"):
                continue
            for value in values(name, option, places):
                own = {} if name == "doctor" and option.name != "window" else base
                more = {"model": str(places.model)} if name == "doctor" else {}
                if name == "circuits" and option.name == "sparse":
                    more = {"model": str(places.model)}
                if name == "circuits" and option.name == "model":
                    more = {"sparse": str(places.folder)}
                if name == "doctor" and option.name == "model":
                    more = {}
                yield [name, *_words(command, {**own, **more, str(option.name): value})]
            if not option.is_flag:
                yield [name, option.opts[0]]  # without its value
        if name == "post-train":
            yield [name, *_words(command, {k: v for k, v in base.items() if k != "model"})]
    yield from (["nonsense"], ["--steps", "1"], ["addition", "--out"], ["Addition"], ["-x"])


def _words(command: Any, given: dict[str, str]) -> list[str]:
    by_name = {str(option.name): option for option in command.params}
    words: list[str] = []
    for name, value in given.items():
        option: Any = by_name[name]
        words += [option.opts[0]] if option.is_flag else [f"{option.opts[0]}={value}"]
    return words


@pytest.fixture
def places(tmp_path: Path, tiny_folder: Path) -> Places:
    named = {name: tmp_path / name for name in ("text", "latin", "empty", "folder", "missing")}
    named["text"].write_text("the cat sat on the mat\n" * 200, encoding="utf-8")
    named["latin"].write_bytes(("caf\xe9 " * 200).encode("latin-1"))
    named["empty"].write_bytes(b"")
    named["folder"].mkdir()
    (named["folder"] / "thesis.tex").write_text("precious")
    return Places(tiny_folder, **named)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: ShuffledStream, step: int) -> Any:
        raise AssertionError("training began")

    monkeypatch.setattr(ShuffledStream, "batch", refuse)


def outcome(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """ "refused", or what happened instead."""

    def late(*_: Any) -> None:
        raise AssertionError(f"more than {LONGEST} s")

    before, sys.argv = sys.argv, ["sparse-tl", *words]
    handler, code, started = signal.signal(signal.SIGALRM, late), 0, time.monotonic()
    signal.alarm(LONGEST)
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 99
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        sys.argv = before
    said = capsys.readouterr()
    whole = " ".join((said.out + said.err).split())
    if code not in (1, 2):
        return f"exit code {code} after {time.monotonic() - started:.1f} s: {whole[:150]}"
    for bad in ("Traceback", "bug in sparse_tl", "training began"):
        if bad in whole:
            return whole[:400]
    if words[0] == "doctor" and code == 1:
        return "refused" if "✗" in said.out or said.err.startswith("Error: ") else whole[:200]
    if not said.err.startswith("Error: ") or said.err.count("Error: ") > 1:
        return f"no single message: {said.err[:200]!r}"
    return "refused" if len(said.err) < 1500 else f"{len(said.err)} characters"


Attack = Callable[[int], list[str]]


@pytest.fixture
def attack(
    places: Places,
    capsys: pytest.CaptureFixture[str],
    offline: None,
    unchecked_types: None,
    no_training: None,
) -> Attack:
    """Runs so many of the commands, or all for 0; returns what was not refused."""

    def run(at_most: int) -> list[str]:
        every = list(cases(places))
        chosen = random.Random(0).sample(every, at_most) if at_most else every
        wrong = []
        for words in chosen:
            if (found := outcome(words, capsys)) != "refused":
                wrong.append(f"{' '.join(words)}: {found}")
        left = list(places.missing.parent.rglob("*.safetensors"))
        wrong += [f"{path} was written" for path in left]
        assert (places.folder / "thesis.tex").read_text() == "precious"
        with capsys.disabled():
            if not at_most:
                print(f"malformed commands: {len(chosen)}; {len(wrong)} not refused as they should")
        return wrong

    return run


@pytest.mark.filterwarnings("ignore")
def test_malformed_commands_are_refused(attack: Attack) -> None:
    wrong = attack(AT_MOST)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_malformed_commands_are_refused(attack: Attack) -> None:
    wrong = attack(0)
    assert not wrong, "\n".join(wrong)
