"""Use of a model by an analysis: by one thread at a time, and in evaluation mode.

Hooks, modes and gates sit on the model itself, so the passes of two threads would take part in one
another. A model that another thread uses is refused. Waiting would be no better: two threads gain
nothing on one model, and a thread that waits for a pool of others inside a block would wait for
ever. In evaluation mode, since dropout would be mistaken for an effect.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import RLock, get_ident
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

P = ParamSpec("P")
Value = TypeVar("Value")

_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_evaluated: list[nn.Module] = []
"""Models that are in evaluation mode until a block ends."""


def _core(model: Any) -> nn.Module:
    """The module that all wrappers around the same model share."""
    inner = model.model if hasattr(model, "model_under_gates") else model
    return getattr(inner, "original_model", inner)


@contextmanager
def in_use(model: Any) -> Iterator[None]:
    """Inside the block, only this thread can use a model, even without this package.

    Raises:
        RuntimeError: another thread uses the model; in that thread, when it calls the model.
    """
    core, here = _core(model), get_ident()
    lock = _locks.setdefault(core, RLock())
    refusal = RuntimeError(
        "another thread is using this model, whose hooks would act in both. Call it from one "
        "thread at a time, or load it once for each thread"
    )

    def refuse_others(module: nn.Module, _args: Any) -> None:
        if module is core and get_ident() != here:  # a copy of the model is free
            raise refusal

    if not lock.acquire(blocking=False):
        raise refusal
    try:
        with core.register_forward_pre_hook(refuse_others, prepend=True):
            if _called_elsewhere(core, model):
                raise refusal
            yield
    finally:
        lock.release()


def _called_elsewhere(*modules: Any) -> bool:
    """Whether another thread is inside a call of one of these modules."""
    for thread, frame in sys._current_frames().items():
        while thread != get_ident() and frame is not None:
            named = frame.f_code.co_varnames[:1] == ("self",)
            if named and any(frame.f_locals.get("self") is module for module in modules):
                return True
            frame = frame.f_back
    return False


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Use a model in evaluation mode inside the block; then restore each of its modules' mode."""
    core = _core(model)
    with in_use(model):
        if any(core is held for held in _evaluated):
            yield
            return
        # A bridge does not list all modules of the model that it wraps, such as GPT-2's first
        # dropout; that model lists all modules of the bridge but the bridge itself.
        training = [module for module in (model, *core.modules()) if module.training]
        _evaluated.append(core)
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True
            _evaluated.remove(core)


def in_evaluation_mode(function: Callable[P, Value]) -> Callable[P, Value]:
    """Decorate an analysis to run its first argument, the model, in evaluation mode."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Value:
        with evaluation_mode(args[0] if args else kwargs["model"]):
            return function(*args, **kwargs)

    return run


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Inside the block, weights get no gradients, so passes keep nothing for them."""
    training = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in training:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in training:
            weight.requires_grad_(True)
