"""Devices: whether PyTorch can use one here, and how much work one should be given at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def check_device(device: torch.device | str) -> None:
    """Raise a ValueError if PyTorch does not know a device, or cannot use it here."""
    try:
        torch.empty(1, device=device).tolist()  # some known devices, such as meta, hold no values
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(
            f"expected a device that PyTorch can use here, such as cpu or cuda; got "
            f"{str(device)!r} ({reason}). `sparse-tl doctor` lists the devices."
        ) from error


@dataclass(frozen=True)
class SizeByDevice:
    """A size for CPUs, whose caches hold little, and one for devices that cost time per operation.

    Args:
        cpu: the size on a CPU.
        elsewhere: the size on every other device.
    """

    cpu: int
    elsewhere: int

    def on(self, device: torch.device) -> int:
        """The size on a device."""
        return self.cpu if device.type == "cpu" else self.elsewhere
