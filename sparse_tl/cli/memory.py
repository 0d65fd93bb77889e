"""Memory of a command's process: what one operation frees is there for the next."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST_KEPT = 2**25
"""Bytes; glibc's own bound. Larger blocks go back to the system as soon as they are freed."""


def keep_freed_memory() -> None:
    """Let freed blocks stay with the process, where its C library is glibc.

    By default they go back to the system after each operation, and every page is mapped and zeroed
    anew for the next one: a fifth of the time of a small model's training step on a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
