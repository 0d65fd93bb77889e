"""Memory of a piece of work: measured in a process of its own, since a peak never falls again."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

Found = TypeVar("Found")


def peak() -> float:
    """Peak memory of this process until now in MB; on a GPU, that of its tensors."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def rise(work: Callable[[], Any]) -> float:
    """Peak main memory during a piece of work over what this process held before it, in MB.

    Unlike `peak`, it does not depend on earlier work; only Linux can forget an earlier peak.
    """
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return _resident("VmHWM") - before


def _resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1e3


def own_process(work: Callable[..., Found], *args: Any, as_on_gpu: bool = True) -> Found:
    """The result of a function that runs in a new process.

    Its peak starts at that of the process which started it: measure first of all. `as_on_gpu`:
    freed tensors go back to the system at once, instead of as the C library likes.
    """
    if as_on_gpu:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "131072"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, args)
