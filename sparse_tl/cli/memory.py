"""Keep the memory that an operation frees, so that the next one can reuse it."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
LARGEST_KEPT = 2**25
"""In bytes, glibc's maximum. Larger blocks return to the system as soon as they are freed."""


def keep_freed_memory() -> None:
    """Keep freed blocks in the process, if its C library is glibc.

    By default they return to the system after each operation, and every page is mapped and zeroed
    again for the next one: a fifth of the time of a small model's training step on a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
