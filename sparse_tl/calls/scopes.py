"""Blocks of `with` that say so if they are never entered."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator
from functools import partial, wraps
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
Value = TypeVar("Value")


class Scope(ContextDecorator, AbstractContextManager[Value, None], Generic[Value]):
    """What a function under `scope` returns; see there."""

    def __init__(self, make: Callable[[], AbstractContextManager[Value]]) -> None:
        self._make, self._used = make, False

    def _recreate_cm(self) -> Scope[Value]:
        self._used = True
        return Scope(self._make)  # as a decorator, it is entered in every call

    def __call__(self, function: Any) -> Any:
        self._used = True
        return super().__call__(function)

    def __enter__(self) -> Value:
        self._used = True
        self._inner = self._make()
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._inner.__exit__(*error)

    def __del__(self) -> None:
        if not self._used:
            warnings.warn("this call has an effect only in a `with` block", stacklevel=2)


def scope(function: Callable[P, Iterator[Value]]) -> Callable[P, Scope[Value]]:
    """`contextlib.contextmanager`, with a warning about a block that was never entered."""
    make = contextlib.contextmanager(function)

    @wraps(function)
    def opened(*args: P.args, **kwargs: P.kwargs) -> Scope[Value]:
        return Scope(partial(make, *args, **kwargs))

    return opened


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
