"""Recognise out-of-memory errors, and tell the user what to do about them."""

from __future__ import annotations

from traceback import clear_frames
from typing import Any

_OF_THE_CPU = "can't allocate memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the machine ran out of memory."""
    import torch  # slow: not needed for help

    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or isinstance(error, RuntimeError) and _OF_THE_CPU in str(error)


def reason(error: BaseException) -> str:
    """The error's message in one sentence; also frees the memory that the failed call held."""
    clear_frames(error.__traceback__)
    message = (str(error).strip().splitlines() or ["out of memory"])[0][:200]
    return message if message.endswith(".") else f"{message}."


def batches_too_large(name: str, batch_size: Any, error: BaseException) -> MemoryError:
    """The error to raise when a function with a `batch_size` runs out of memory."""
    given = "" if batch_size is None else f" with batch_size={batch_size}"
    return MemoryError(
        f"{name} ran out of memory{given}. A smaller batch_size needs less. ({reason(error)})"
    )
