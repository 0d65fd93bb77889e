"""Scopes that are entered and left as a whole: Ctrl-C never finds one half way.

Python runs signal handlers between two instructions, whichever they are: also between registering
a hook and noting its handle, between entering a block of `contextlib` and being bound to leave it,
and inside `finally`. An exception there leaves a hook on the model, or gradients off. Therefore:

1. While a scope is open, the main thread's handlers of `SIGNALS` are stood in for by one that looks
   at the stack of calls.
2. Where a scope is being entered or left, the signal is sent again a moment later.
3. Everywhere else, what handled the signal before handles it: Ctrl-C raises KeyboardInterrupt.

The stack decides, not a flag that is set and cleared, so there is no moment at which it is wrong.
Only the main thread is interrupted by signals; in other threads scopes are plain ones.
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, ExitStack
from functools import partial, wraps
from inspect import unwrap
from types import CodeType, FrameType
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""What asks a process to stop; SIGHUP does not exist on every platform."""
AGAIN = 0.002
"""Seconds after which a signal that came at a bad moment is sent again."""

P = ParamSpec("P")
Value = TypeVar("Value")
Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])


class Scope(ContextDecorator, AbstractContextManager[Value, None], Generic[Value]):
    """A context manager whose ends no signal interrupts; see `scope`."""

    def __init__(self, make: Callable[[], AbstractContextManager[Value]]) -> None:
        self._make = make

    def _recreate_cm(self) -> Scope[Value]:
        return Scope(self._make)  # as a decorator, it is entered in every call

    def __enter__(self) -> Value:
        self._guarded = _guard()
        try:
            self._inner = self._make()
            return self._inner.__enter__()
        except BaseException:
            _put_back(self._guarded)
            raise

    def __exit__(self, *error: Any) -> Any:
        try:
            return self._inner.__exit__(*error)
        finally:
            _put_back(self._guarded)


def scope(function: Callable[P, Iterator[Value]]) -> Callable[P, Scope[Value]]:
    """`contextlib.contextmanager`, except that what comes before and after `yield` is whole."""
    make = contextlib.contextmanager(function)

    @wraps(function)
    def opened(*args: P.args, **kwargs: P.kwargs) -> Scope[Value]:
        return Scope(partial(make, *args, **kwargs))

    return opened


def whole(function: Callable[P, Value]) -> Callable[P, Value]:
    """A function, which must be short, that no signal interrupts."""
    _WHOLE.add(unwrap(function).__code__)  # a wrapper's code may be that of many wrappers

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Value:
        with Scope(contextlib.nullcontext):
            return function(*args, **kwargs)

    return run


def interruptible(function: Wrapped) -> Wrapped:
    """A function, which may take long, that signals interrupt also where a scope calls it."""
    _INTERRUPTIBLE.add(unwrap(function).__code__)
    return function


@scope
def autograd(on: bool) -> Iterator[None]:
    """Inside the block, or in the decorated function, torch builds an autograd graph or none."""
    with torch.set_grad_enabled(on):
        yield


_INTERRUPTIBLE: set[CodeType] = set()
_WHOLE: set[CodeType] = {
    function.__code__
    for kind in (
        Scope,
        # Other people's, where they are used inside a scope: what they change is global.
        contextlib._GeneratorContextManager,
        torch.no_grad,
        torch.enable_grad,
        torch.set_grad_enabled,
        torch.autocast,
        torch.autograd.graph.saved_tensors_hooks,
        TorchFunctionMode,
    )
    for function in (kind.__enter__, kind.__exit__)
} | {ExitStack.enter_context.__code__, ExitStack.__exit__.__code__}


class _Guard:
    """Handles a signal as `before` did, but not while a scope is entered or left."""

    def __init__(self, before: Callable[[int, FrameType | None], Any]) -> None:
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _is_whole(frame):
            _thread.start_new_thread(_send_again, (number,))
        else:
            self.before(number, frame)


def _is_whole(frame: FrameType | None) -> bool:
    """Whether the nearest call that says so must not be interrupted."""
    while frame is not None:
        if frame.f_code in _INTERRUPTIBLE:
            return False
        if frame.f_code in _WHOLE:
            return True
        frame = frame.f_back
    return False


def _send_again(number: int) -> None:
    time.sleep(AGAIN)
    _thread.interrupt_main(signal.Signals(number))


def _guard() -> list[tuple[int, _Guard]]:
    """Stand in for the handlers of this thread's signals, unless an outer scope does."""
    if threading.current_thread() is not threading.main_thread():
        return []
    guarded: list[tuple[int, _Guard]] = []
    try:
        for number in SIGNALS:
            before = signal.getsignal(number)
            if callable(before) and not isinstance(before, _Guard):
                guarded.append((number, _Guard(before)))
                signal.signal(*guarded[-1])
    except BaseException:
        _put_back(guarded)
        raise
    return guarded


def _put_back(guarded: list[tuple[int, _Guard]]) -> None:
    """Put all handlers back, also if one that is back strikes before the others are, and again."""
    try:
        _restore(guarded)
    except BaseException:
        try:
            _restore(guarded)
        finally:
            _restore(guarded)
        raise


def _restore(guarded: list[tuple[int, _Guard]]) -> None:
    if threading.current_thread() is threading.main_thread():
        for number, guard in guarded:
            if signal.getsignal(number) is guard:
                signal.signal(number, guard.before)
