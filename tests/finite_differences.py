"""Derivatives by central differences, for gradients to agree with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def derivative(
    function: Callable[[], Tensor], parameter: Tensor, index: Any, step: float = 1e-5
) -> float:
    """Of a scalar by one entry of a parameter: ``(f(x + step) - f(x - step)) / (2 step)``."""
    ends = []
    with torch.no_grad():
        for change in (step, -step):
            parameter[index] += change
            ends.append(function().item())
            parameter[index] -= change
    return (ends[0] - ends[1]) / (2 * step)
