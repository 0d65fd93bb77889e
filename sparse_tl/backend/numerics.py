"""Normalisations of the residual stream, and how far values may differ by rounding.

A sum in finite precision differs from the exact one by about ``eps * size``. The size is that of
its terms: the sum of their absolute values for a few parts; the root of the sum of their squares
for the many products of a projection, whose roundings are independent. The result itself can be
much smaller. So values are rebuilt in float32 from what the model had at that point, and each entry
is allowed its own error; a model's largest activation says nothing about the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
_ERRORS = 4
"""Multiple of ``eps * size`` that is allowed; 14 architectures in half precision need 1.2."""
_TF32 = 2.0**-10
"""The eps of float32 products on GPUs that use TF32."""


def precise(value: Tensor) -> Float[Tensor, "*shape"]:
    """The value in float32, or in float64 if it already is."""
    return value if value.dtype == torch.float64 else value.float()


def tolerance(dtype: torch.dtype) -> float:
    """How far two runs of a model may differ, as a fraction of the largest value."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2


def excess(
    dtype: torch.dtype,
    found: Float[Tensor, "*shape"],
    rebuilt: Float[Tensor, "*shape"],
    size: Float[Tensor, "*#shape"],
) -> tuple[float, float] | None:
    """The worst entry's error and its allowed error; None if rounding explains all entries.

    Values that a model of this precision computed are compared to the same rebuilt from its parts;
    `size` is that of each value's terms.
    """
    off = (precise(found) - precise(rebuilt).to(found.device)).abs()
    size = precise(size).to(found.device).expand_as(off)
    allowed = _ERRORS * max(torch.finfo(dtype).eps, _TF32) * size
    if bool((off <= allowed).all()):  # false for NaN
        return None
    worst = (off - allowed).nan_to_num(nan=torch.inf).argmax()
    return off.flatten()[worst].item(), allowed.flatten()[worst].item()


@dataclass(frozen=True)
class Norm:
    """``weight (x - mean) / scale + bias`` with ``scale = sqrt(mean((x - mean)^2) + eps)``.

    An RMS norm does not subtract the mean; without normalisation (`kind` None) it is the identity.
    """

    kind: Literal["layer", "rms"] | None
    weight: Float[Tensor, " d_model"] | None
    bias: Float[Tensor, " d_model"] | None
    eps: float

    def __call__(self, residual: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_model"]:
        """Apply the norm as one operation, without the model's hook points."""
        if self.kind is None:
            return residual
        shape = residual.shape[-1:]
        if self.kind == "layer":
            return F.layer_norm(residual, shape, self.weight, self.bias, self.eps)
        return F.rms_norm(residual, shape, self.weight, self.eps)

    def size(self, residual: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_model"]:
        """The size of the output's summands: ``|weight| (|x| + |mean|) / scale + |bias|``."""
        if self.kind is None:
            return residual.abs()
        size = residual.abs()
        if self.kind == "layer":
            size = size + residual.mean(dim=-1, keepdim=True).abs()
        size = size / self.scale(residual)
        size = size if self.weight is None else size * self.weight.abs()
        return size if self.bias is None else size + self.bias.abs()

    def precise(self) -> Norm:
        """The norm in float32, or in float64 if it already is."""
        weight, bias = (None if w is None else precise(w) for w in (self.weight, self.bias))
        return Norm(self.kind, weight, bias, self.eps)

    def centred(self, x: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_model"]:
        """Subtract the mean over d_model, if this norm does so."""
        return x - x.mean(dim=-1, keepdim=True) if self.kind == "layer" else x

    def scale(self, residual: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows 1"]:
        """``sqrt(mean((x - mean)^2) + eps)``, differentiable."""
        x = residual
        if x.dtype in HALVES:
            x = x.float()  # squares of large activations overflow in half precision
        x = self.centred(x)
        return (torch.linalg.vecdot(x, x)[..., None] / x.shape[-1] + self.eps).sqrt()

    def share(
        self, part: Float[Tensor, "*parts d_model"], residual: Float[Tensor, "*rows d_model"]
    ) -> Float[Tensor, "*parts d_model"]:
        """The share of a part of the residual stream in the output, without the bias.

        ``weight (part - mean) / scale(residual)``: with the scale held fixed, the norm is linear.
        """
        if self.kind is None:
            return part
        shown = self.centred(part) / self.scale(residual).to(part.dtype)
        return shown if self.weight is None else shown * self.weight

    def standardised(
        self, residual: Float[Tensor, "*rows d_model"]
    ) -> tuple[Float[Tensor, "*rows d_model"], Float[Tensor, "*rows 1"]]:
        """The input minus its mean and divided by its scale, and the scale."""
        x = residual.detach()
        scale = self.scale(x)
        return (self.centred(x) / scale).to(x.dtype), scale.to(x.dtype)
