"""Whether two values differ by more than rounding explains.

A sum in finite precision differs from the exact one by about ``eps * size``. The size is that of
its terms: the sum of their absolute values for a few parts; the root of the sum of their squares
for the many products of a projection, whose roundings are independent. The result itself can be
much smaller. So values are rebuilt in float32 from what the model had at that point, and each entry
is allowed its own error; a model's largest activation says nothing about the others.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_ERRORS = 4
"""Multiple of ``eps * size`` that is allowed; 14 architectures in half precision need 1.2."""
_TF32 = 2.0**-10
"""The eps of float32 products on GPUs that use TF32."""


def precise(value: Tensor) -> Float[Tensor, "*shape"]:
    """The value in float32, or in float64 if it already is."""
    return value if value.dtype == torch.float64 else value.float()


def tolerance(dtype: torch.dtype) -> float:
    """How far two runs of a model may differ, as a share of the largest value."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2


def excess(
    dtype: torch.dtype,
    found: Float[Tensor, "*shape"],
    rebuilt: Float[Tensor, "*shape"],
    size: Float[Tensor, "*#shape"],
) -> tuple[float, float] | None:
    """The worst entry's error and its allowed error; None if rounding explains all entries.

    Args:
        dtype: precision of the model.
        found: values that the model computed.
        rebuilt: the same values, computed from its parts.
        size: size of the terms of each value.
    """
    off = (precise(found) - precise(rebuilt).to(found.device)).abs()
    size = precise(size).to(found.device).expand_as(off)
    allowed = _ERRORS * max(torch.finfo(dtype).eps, _TF32) * size
    if bool((off <= allowed).all()):  # false for NaN
        return None
    worst = (off - allowed).nan_to_num(nan=torch.inf).argmax()
    return off.flatten()[worst].item(), allowed.flatten()[worst].item()
