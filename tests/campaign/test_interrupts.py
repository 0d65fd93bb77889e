"""Ctrl-C at any instruction of a public call leaves no hook, no stand-in and no changed flag."""

from __future__ import annotations

import _thread
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calls import CALLS, VOCABULARY
from state import changed, state_of
from tiny import tiny_model

import sparse_tl as stl
from sparse_tl.calls import scopes
from sparse_tl.calls.scopes import scope

EVENTS = ("call", "c_call", "c_return")  # where the interpreter looks for signals; also in loops


class Interrupter:
    """Sends a signal to this process at the n-th event of a block, or at none to count them."""

    def __init__(self, number: int, at: int | None = None) -> None:
        self.number, self.at, self.seen = number, at, 0

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        if event in EVENTS:
            self.seen += 1
            if self.seen == self.at:
                sys.setprofile(None)
                signal.raise_signal(self.number)

    def __enter__(self) -> Interrupter:
        sys.setprofile(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until what came at a bad moment was sent again."""
    sent: list[threading.Event] = []

    def start(function: Callable[[int], None], arguments: tuple[int]) -> None:
        done = threading.Event()
        sent.append(done)

        def run() -> None:
            function(*arguments)
            done.set()

        _thread.start_new_thread(run, ())

    def wait() -> None:
        while sent:
            sent[-1].wait()
            sent.pop()

    again = SimpleNamespace(start_new_thread=start, interrupt_main=_thread.interrupt_main)
    monkeypatch.setattr(scopes, "_thread", again)
    return wait


def interrupted(name: str, model: Any, folder: Path, number: int, at: int | None) -> Interrupter:
    """Call it, and send the signal at one of its events, if any."""
    with Interrupter(number, at) as sender:
        CALLS[name].run(model, folder)
    return sender


class Campaign:
    """Interrupted calls of all kinds, and what was wrong after each."""

    def __init__(self, folder: Path, arrived: Callable[[], None]) -> None:
        self.arrived = arrived
        self.folder, self.models, self.events = folder, dict[bool, Any](), dict[str, int]()
        self.totals, self.wrong = Counter[str](), list[str]()

    def model(self, sparse: bool) -> Any:
        if sparse not in self.models:
            dense = tiny_model(n_layers=1)
            self.models[sparse] = stl.SparseTransformer(dense, mlps=True) if sparse else dense
        return self.models[sparse]

    def attack(self, name: str, draw: random.Random, numbers: list[int]) -> None:
        call = CALLS[name]
        model, folder = self.model(call.sparse), self.folder / str(sum(self.totals.values()))
        if name not in self.events:
            CALLS[name].run(model, folder / "first")  # what is found out once, and then known
            self.events[name] = interrupted(name, model, folder / "count", numbers[0], None).seen
        before = state_of(model, weights=not call.trains)
        at, number = draw.randrange(1, self.events[name] + 1), draw.choice(numbers)
        kept: BaseException | None = None  # as notebooks keep it, with all frames
        try:
            interrupted(name, model, folder, number, at)
            self.arrived()
        except KeyboardInterrupt as stop:
            kept = stop
        after = state_of(model, weights=not call.trains)
        found = changed(before, after)
        self.totals["stopped" if kept is not None else "finished"] += 1
        if found:
            self.wrong.append(f"{name}, event {at} of {self.events[name]}: {found[:3]}")
            self.models.clear()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            torch.set_grad_enabled(True)

    def say(self) -> None:
        print(f"interrupts: {sum(self.totals.values())} over {len(self.events)} kinds of calls,")
        print(f"  {dict(self.totals)}; {len(self.wrong)} left something behind")


@scope
def plain() -> Iterator[None]:
    yield


def test_every_event_of_one_scope(arrived: Callable[[], None]) -> None:
    """A signal between any two steps of entering and leaving it leaves no stand-in of a handler."""
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    with handled_by(stopped, numbers):
        before = [signal.getsignal(number) for number in numbers]
        with Interrupter(signal.SIGINT) as counted, plain():
            pass
        assert counted.seen > 50
        for number in numbers:
            for at in range(1, counted.seen + 1):
                with suppress(KeyboardInterrupt), Interrupter(number, at):
                    with plain():
                        pass
                    arrived()
                left = [signal.getsignal(some) for some in numbers]
                assert left == before, f"{number} at event {at}"


@pytest.mark.parametrize("strikes", [1, 2])
def test_a_handler_that_strikes_as_soon_as_it_is_back(
    strikes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    put, struck = signal.signal, []

    def striking(number: int, handler: Any) -> Any:
        put(number, handler)
        if handler is stopped and len(struck) < strikes:
            struck.append(number)
            raise KeyboardInterrupt

    with handled_by(stopped, numbers):
        with pytest.raises(KeyboardInterrupt), plain():
            monkeypatch.setattr(signal, "signal", striking)
        monkeypatch.undo()
        assert len(struck) == strikes
        assert {signal.getsignal(number) for number in numbers} == {stopped}


def stopped(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(number)


@contextmanager
def handled_by(handler: Any, numbers: list[int]) -> Iterator[None]:
    """As a notebook server or a scheduler's library would."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(folder: Path, arrived: Callable[[], None], n: int) -> Campaign:
    """`n` interrupts at random events, over all calls in turn."""
    campaign, draw = Campaign(folder, arrived), random.Random(0)
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    with handled_by(stopped, numbers[1:]):
        for one in range(n):
            campaign.attack([*CALLS][one % len(CALLS)], draw, numbers)
    campaign.say()
    return campaign


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_interrupts(tmp_path: Path, arrived: Callable[[], None]) -> None:
    campaign = run(tmp_path, arrived, 200)
    assert not campaign.wrong
    assert campaign.totals["stopped"] > len(CALLS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_thousand_interrupts(tmp_path: Path, arrived: Callable[[], None]) -> None:
    campaign = run(tmp_path, arrived, 1000)
    assert not campaign.wrong


def test_what_is_checked_is_seen() -> None:
    model = tiny_model(n_layers=1)
    before = state_of(model)
    handle = model.blocks[0].mlp.register_forward_hook(lambda *_: None)
    (found,) = changed(before, state_of(model))
    assert found.endswith("mlp _forward_hooks")
    handle.remove()
    with torch.no_grad():
        assert changed(before, state_of(model)) == ["gradients"]
    assert model(torch.zeros(1, 3, dtype=torch.long)).shape[-1] == VOCABULARY
    assert not changed(before, state_of(model))
