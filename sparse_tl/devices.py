"""Devices: whether PyTorch can use one here, how much work one is given at once, and compiling."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

COMPILED_ON = ("cuda",)
"""Types of device on which functions are compiled."""


def check_device(device: torch.device | str) -> None:
    """Raise a ValueError if PyTorch does not know a device, or cannot use it here."""
    try:
        torch.empty(1, device=device).tolist()  # some known devices, such as meta, hold no values
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(
            f"PyTorch cannot use {str(device)!r} here ({reason}). `sparse-tl doctor` lists the "
            "devices."
        ) from error


def is_slow_in_bfloat16(device: torch.device) -> bool:
    """Whether products take 5 to 50 times as long as in float32: on a CPU without AVX-512."""
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"


@dataclass(frozen=True)
class SizeByDevice:
    """A size for CPUs, whose caches hold little, and one for devices that pay per operation."""

    cpu: int
    elsewhere: int

    def on(self, device: torch.device) -> int:
        return self.cpu if device.type == "cpu" else self.elsewhere


def fastest(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The compiled form of a function on a GPU; else the function itself.

    Where the compiler is absent or fails, a warning says so once, and the function runs as written.
    """
    return _compiled(function) if device.type in COMPILED_ON else function


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
                warnings.warn(
                    f"torch.compile failed, so gates run uncompiled, which is slower: "
                    f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
                    stacklevel=2,
                )
        return self.function(*args)


_compiled = cache(_Compiled)
