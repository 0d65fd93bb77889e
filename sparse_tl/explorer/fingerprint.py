"""A fingerprint of a model's weights, to detect changes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparse_tl.lens import HookedModel


def fingerprint(model: HookedModel) -> list[tuple[int, int, tuple[float, ...]]]:
    """For each tensor of a model: its address, its count of in-place writes, and some values."""
    return [
        (tensor.data_ptr(), tensor._version, tuple(_some_numbers(tensor.detach())))
        for tensor in _tensors(model)
    ]


def _tensors(model: HookedModel) -> Iterator[Tensor]:
    assert isinstance(model, torch.nn.Module)
    yield from model.parameters()
    yield from model.buffers()


def _some_numbers(tensor: Tensor, most: int = 16) -> list[float]:
    numbers = tensor.flatten() if tensor.is_contiguous() else tensor[(0,) * (tensor.ndim - 1)]
    return numbers[:: max(1, numbers.numel() // most)].float().tolist()
