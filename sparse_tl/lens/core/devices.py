"""The device that models are placed on: the requested one, or the default."""

from __future__ import annotations

import torch
from transformer_lens.utilities import devices

from sparse_tl.parallel import ranks


def checked_device(device: str | torch.device | None) -> str:
    """The requested device; by default a GPU if there is one, a different one for each rank.

    Raises:
        ValueError: PyTorch does not know the device, or cannot use it here.
    """
    if device is None:
        return ranks.device() or str(devices.get_device())
    try:
        torch.empty(1, device=device).tolist()  # some known devices, such as meta, hold no values
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(
            f"expected a device that PyTorch can use here, such as cpu or cuda; got "
            f"{str(device)!r} ({reason}). `sparse-tl doctor` lists the devices."
        ) from error
    return str(device)
