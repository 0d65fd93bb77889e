"""The device that models are placed on by default."""

from __future__ import annotations

from transformer_lens.utilities import devices

from sparse_tl import ranks


def get_device() -> str:
    """A GPU if there is one, of several ranks each its own; otherwise what this machine has."""
    return ranks.device() or str(devices.get_device())
