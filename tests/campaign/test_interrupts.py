"""Ctrl-C in the middle of a pass leaves no hook, no stand-in and no changed flag."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import CALLS, VOCABULARY
from state import changed, state_of
from tiny import tiny_model
from torch import nn

import sparse_tl as stl


class Interrupter:
    """Ctrl-C at the n-th call of a module inside a block, or at none, to count them."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.seen = at, 0

    def __call__(self, frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is nn.Module._call_impl.__code__:
            self.seen += 1
            if self.seen == self.at:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)


@contextmanager
def interrupted(at: int | None = None) -> Iterator[Interrupter]:
    sender = Interrupter(at)
    sys.setprofile(sender)
    try:
        yield sender
    finally:
        sys.setprofile(None)


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_leaves_nothing(tmp_path: Path, name: str) -> None:
    call, draw = CALLS[name], random.Random(name)
    dense = tiny_model(n_layers=1)
    model = stl.SparseTransformer(dense, mlps=True) if call.sparse else dense
    call.run(model, tmp_path / "first")  # what is found out once, and then known
    with interrupted() as counted:
        call.run(model, tmp_path / "count")
    for at in draw.sample(range(1, counted.seen + 1), min(4, counted.seen)):
        before = state_of(model, weights=not call.trains)
        kept: BaseException | None = None  # as notebooks keep it, with all frames
        try:
            with interrupted(at):
                call.run(model, tmp_path / f"at {at}")
        except KeyboardInterrupt as stop:
            kept = stop
        assert not changed(before, state_of(model, weights=not call.trains)), at
        assert kept is not None or call.trains


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
