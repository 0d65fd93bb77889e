"""Memory of a piece of work: measured in a process of its own, since a peak never falls again."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Found = TypeVar("Found")


def peak() -> float:
    """Peak memory of this process until now in MB; on a GPU, that of its tensors."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def own_process(work: Callable[..., Found], *args: Any) -> Found:
    """The result of a function that runs in a new process.

    Its peak starts at that of the process which started it: measure first of all.
    """
    # Freed tensors go back to the system at once, as they do on a GPU.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "131072"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, args)
