"""Ctrl-C in the middle of a pass leaves no hook, no stand-in and no changed flag."""

from __future__ import annotations

import random
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import CALLS
from tiny import tiny_model
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from transformer_lens.hook_points import HookPoint

import sparse_tl as stl

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def state_of(model: Any, *, weights: bool = True) -> dict[str, Any]:
    """Facts by name, to be compared with those of another moment.

    Args:
        model: the model that is called.
        weights: whether parameters belong to it too, and thereby every logit.
    """
    facts: dict[str, Any] = {
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
        "function modes": len(_get_current_function_mode_stack()),
        "warnings": len(warnings.filters),
        "handlers": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
    }
    for name, module in model.named_modules():
        for kind in _HOOKS:
            facts[f"{name} {kind}"] = len(getattr(module, kind))
        facts[f"{name} training"] = module.training
        facts[f"{name} forward"] = "forward" in module.__dict__
        if isinstance(module, HookPoint):
            facts[f"{name} TransformerLens"] = len(module.fwd_hooks + module.bwd_hooks)
    for name, parameter in model.named_parameters():
        facts[f"{name} requires_grad"] = parameter.requires_grad
        facts[f"{name} grad"] = parameter.grad is not None
        if weights:
            facts[f"{name} values"] = parameter.detach().double().sum().item(), parameter.data_ptr()
    for gates in (getattr(model, "gates", None), getattr(model, "mlp_gates", None)):
        facts[f"settings of {type(gates).__name__}"] = repr(getattr(gates, "settings", None))
    return facts


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of the facts that differ."""
    return [name for name in before | after if before.get(name) != after.get(name)]


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
    for at in draw.sample(range(1, counted.seen + 1), min(2, counted.seen)):
        before = state_of(model, weights=not call.trains)
        kept: BaseException | None = None  # as notebooks keep it, with all frames
        try:
            with interrupted(at):
                call.run(model, tmp_path / f"at {at}")
        except KeyboardInterrupt as stop:
            kept = stop
        assert not changed(before, state_of(model, weights=not call.trains)), at
        assert kept is not None or call.trains
