"""Context managers: autograd on or off, and blocks that warn if they are never entered."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
Value = TypeVar("Value")


class Scope(AbstractContextManager[Value, None], Generic[Value]):
    """What a function under `scope` returns; see there. It can be entered several times."""

    def __init__(self, make: Callable[[], AbstractContextManager[Value]]) -> None:
        self._make, self._open, self._used = make, list[AbstractContextManager[Value]](), False

    def __enter__(self) -> Value:
        self._used = True
        self._open.append(self._make())
        return self._open[-1].__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self._open.pop().__exit__(*error)

    def __del__(self) -> None:
        if not self._used:
            warnings.warn("this call has an effect only in a `with` block", stacklevel=2)


def scope(function: Callable[P, Iterator[Value]]) -> Callable[P, Scope[Value]]:
    """`contextlib.contextmanager`, with a warning about a block that was never entered."""
    make = contextmanager(function)

    @wraps(function)
    def opened(*args: P.args, **kwargs: P.kwargs) -> Scope[Value]:
        return Scope(partial(make, *args, **kwargs))

    return opened


@contextmanager
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
