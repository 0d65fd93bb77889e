"""Ctrl-C in the middle of a pass leaves no hook, no stand-in and no changed flag."""

from __future__ import annotations

import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from analyses import call, of_prompts
from jobs import FITTING, QUIET, rows, targets
from tiny import tiny_model
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from transformer_lens.hook_points import HookPoint

import sparse_tl as stl
from sparse_tl.backend import adapt
from sparse_tl.training import evaluate_held_out
from sparse_tl.training.memory import training_memory

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


def pairs() -> stl.PromptPairs:
    clean, corrupted = torch.randint(13, (2, 3, 6), generator=torch.Generator().manual_seed(1))
    answers = torch.arange(3)[:, None]
    return stl.PromptPairs(clean, corrupted, answers, answers + 5, torch.full((3,), 5))


def sampled(model: Any, _: Path) -> Any:
    with model.sampled(torch.Generator().manual_seed(0)), stl.checkpointed_activations(model):
        output, counts = model.run_with_counts(pairs().clean)
        return torch.autograd.grad(output.sum() + counts.expected.sum(), model.gates.bias)


def ablated(model: Any, _: Path) -> None:
    for block in (
        stl.ablate_heads(model, [(0, 0)], "mean", reference=pairs().corrupted),
        stl.ablate_attention_edges(model, [(0, 1, 3, 2)]),
    ):
        with block:
            model(pairs().clean)


def gated_run(model: Any, _: Path) -> Any:
    read = torch.ones(3, 6, dtype=torch.bool)
    run = stl.GatedRun(model, stl.CircuitEdges(), pairs().clean, read, patch="zero")
    shape = 2, *stl.CircuitEdges().shape(adapt(model))
    return run.logits(torch.rand(shape, generator=torch.Generator().manual_seed(0)))


def wrapped(model: Any, folder: Path) -> Any:
    sparse = stl.SparseTransformer(model, mlps=True)
    try:
        return sparse.save_pretrained(folder / "wrapped")
    finally:
        sparse.unwrap()


def post_train(model: Any, folder: Path) -> Any:
    how: dict[str, Any] = {"steps": 3, "validation": rows(), "checkpoint": folder / "training"}
    return stl.post_train(model, stl.ShuffledStream(rows(), 4, 0), target_loss=9.0, **how, **QUIET)


def analysis(name: str, **options: Any) -> Callable[[Any, Path], Any]:
    return lambda model, _: call(ANALYSES[name], model, pairs(), **options)


ANALYSES = of_prompts()
CALLS: dict[str, Callable[[Any, Path], Any]] = {
    **{name: analysis(name) for name in ANALYSES},
    "eap": analysis("attribute_circuit_edges", method="eap"),
    "relp": analysis("attribute_circuit_edges", method="relp"),
    "gates with checkpoints": lambda m, f: stl.fit_head_gates(
        m, targets(), checkpoint=f / "h", **FITTING
    ),
    "trace": lambda m, _: stl.trace_attention(m, pairs().clean[0], attribution=True, max_effects=2),
    "held out": lambda m, _: evaluate_held_out(m, rows()),
    "memory": lambda m, _: training_memory(m, 6),
    "ablated": ablated,
    "gated run": gated_run,
    "wrapped": wrapped,
    "sampled": sampled,
    "post-training": post_train,
}
"""Calls on a model and a folder for checkpoints, each a fraction of a second long."""


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_leaves_nothing(tmp_path: Path, name: str) -> None:
    run, draw, trains = CALLS[name], random.Random(name), name == "post-training"
    dense = tiny_model()
    model = stl.SparseTransformer(dense, mlps=True) if trains or name == "sampled" else dense
    run(model, tmp_path / "first")  # what is found out once, and then known
    with interrupted() as counted:
        run(model, tmp_path / "count")
    for at in draw.sample(range(1, counted.seen + 1), min(2, counted.seen)):
        before = state_of(model, weights=not trains)
        kept: BaseException | None = None  # as notebooks keep it, with all frames
        try:
            with interrupted(at):
                run(model, tmp_path / f"at {at}")
        except KeyboardInterrupt as stop:
            kept = stop
        assert not changed(before, state_of(model, weights=not trains)), at
        assert kept is not None or trains
