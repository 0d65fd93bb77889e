"""Gradients, switched on for what needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
