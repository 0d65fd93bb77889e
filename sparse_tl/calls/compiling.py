"""Functions of tensors that run compiled where that pays, and as they are written elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

COMPILED_ON = ("cuda",)
"""Types of device on which functions are compiled."""


def fastest(function: Callable[..., Any], device: torch.device) -> tuple[Callable[..., Any], bool]:
    """The compiled form of a function and True on a GPU; else the function itself and False.

    Where the compiler is absent or fails, a warning says so once, and the function runs as written.
    """
    if device.type not in COMPILED_ON:
        return function, False
    compiled = _compiled(function)
    return compiled, not compiled.failed


class _Compiled:
    """A function compiled once for all shapes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.failed = function, False
        self.compiled = torch.compile(function, dynamic=True)

    def __call__(self, *args: Any) -> Any:
        if not self.failed:
            try:
                return self.compiled(*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of the compiler or of what it calls: many kinds
                self.failed = True
                reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
                warnings.warn(
                    f"torch.compile failed, so gates run uncompiled, which is slower: "
                    f"{type(error).__name__}: {reason}",
                    stacklevel=2,
                )
        return self.function(*args)


@cache
def _compiled(function: Callable[..., Any]) -> _Compiled:
    return _Compiled(function)
