"""The device that models are placed on: the requested one, or the default."""

from __future__ import annotations

import torch
from transformer_lens.utilities import devices

from sparse_tl.calls.devices import check_device
from sparse_tl.parallel import ranks


def checked_device(device: str | torch.device | None) -> str:
    """The requested device; by default a GPU if there is one, a different one for each rank.

    Raises:
        ValueError: as in `check_device`.
    """
    if device is None:
        return ranks.device() or str(devices.get_device())
    check_device(device)
    return str(device)
