"""Sizes that depend on the device: how much work an operation should be given at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
