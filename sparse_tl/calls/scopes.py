"""Context managers whose entry and exit no signal, such as Ctrl-C, can interrupt.

Python runs signal handlers between any two instructions, even between registering a hook and
storing its handle, between the entry of a `contextlib` block and the guarantee of its exit, and
inside `finally`. An exception there leaves a hook on the model, or gradients off. Therefore:

1. While a scope is open, a handler that inspects the call stack replaces the main thread's handlers
   of `SIGNALS`.
2. If a scope is being entered or left, the handler sends the signal again a moment later.
3. Otherwise, it calls the previous handler: Ctrl-C raises KeyboardInterrupt.

The stack decides, not a flag that is set and cleared, so there is no moment at which it is wrong.
Signals interrupt only the main thread; in other threads, scopes are plain context managers.
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
"""Signals that ask a process to stop; SIGHUP does not exist on every platform."""
AGAIN = 0.002
"""Seconds after which a deferred signal is sent again."""

P = ParamSpec("P")
Value = TypeVar("Value")
Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])


class Scope(ContextDecorator, AbstractContextManager[Value, None], Generic[Value]):
    """A context manager whose entry and exit no signal interrupts; see `scope`."""

    def __init__(self, make: Callable[[], AbstractContextManager[Value]]) -> None:
        self._make = make

    def __repr__(self) -> str:  # a notebook shows it after a call whose `with` was forgotten
        return "A block, with effect only inside `with ...:`"

    def _recreate_cm(self) -> Scope[Value]:
        return Scope(self._make)  # as a decorator, it is entered in every call

    def __enter__(self) -> Value:
        self._guarded = _guard()
        try:
            self._inner = self._make()
            return self._inner.__enter__()
        except BaseException:
            _restore_all(self._guarded)
            raise

    def __exit__(self, *error: Any) -> Any:
        try:
            return self._inner.__exit__(*error)
        finally:
            _restore_all(self._guarded)


def scope(function: Callable[P, Iterator[Value]]) -> Callable[P, Scope[Value]]:
    """`contextlib.contextmanager`, except that no signal interrupts the code around `yield`."""
    make = contextlib.contextmanager(function)

    @wraps(function)
    def opened(*args: P.args, **kwargs: P.kwargs) -> Scope[Value]:
        return Scope(partial(make, *args, **kwargs))

    return opened


def uninterruptible(function: Callable[P, Value]) -> Callable[P, Value]:
    """Protect a function, which must be short, from interruption by signals."""
    _UNINTERRUPTIBLE.add(unwrap(function).__code__)  # a wrapper's code is shared by others

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Value:
        with Scope(contextlib.nullcontext):
            return function(*args, **kwargs)

    return run


def interruptible(function: Wrapped) -> Wrapped:
    """Let signals interrupt a function, which may take long, even where a scope calls it."""
    _INTERRUPTIBLE.add(unwrap(function).__code__)
    return function


@scope
def autograd(on: bool) -> Iterator[None]:
    """Switch torch's autograd on or off within the block or the decorated function.

    Raises:
        RuntimeError: it cannot be switched on, under `torch.inference_mode`.
    """
    if on and torch.is_inference_mode_enabled():
        raise RuntimeError(
            "this needs gradients, which torch.inference_mode() rules out; leave it, or use "
            "torch.no_grad() instead"
        )
    with torch.set_grad_enabled(on):
        yield


_INTERRUPTIBLE: set[CodeType] = set()
_UNINTERRUPTIBLE: set[CodeType] = {
    function.__code__
    for kind in (
        Scope,
        # Third-party context managers that change global state.
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
    """Calls the handler `before`, but not while a scope is being entered or left."""

    def __init__(self, before: Callable[[int, FrameType | None], Any]) -> None:
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _is_protected(frame):
            _thread.start_new_thread(_send_again, (number,))
        else:
            self.before(number, frame)


def _is_protected(frame: FrameType | None) -> bool:
    """Whether the innermost marked call on the stack is marked as uninterruptible."""
    while frame is not None:
        if frame.f_code in _INTERRUPTIBLE:
            return False
        if frame.f_code in _UNINTERRUPTIBLE:
            return True
        frame = frame.f_back
    return False


def _send_again(number: int) -> None:
    time.sleep(AGAIN)
    _thread.interrupt_main(signal.Signals(number))


def _guard() -> list[tuple[int, _Guard]]:
    """Replace the main thread's signal handlers, unless an outer scope already has."""
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
        _restore_all(guarded)
        raise
    return guarded


def _restore_all(guarded: list[tuple[int, _Guard]]) -> None:
    """Restore all handlers, even if restored ones raise midway (at most twice)."""
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
