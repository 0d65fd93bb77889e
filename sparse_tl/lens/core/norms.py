"""A normalisation of the residual stream as one operation, and its pullback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparse_tl.lens.core.architecture import HALVES
from sparse_tl.lens.core.rounding import precise


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

    def pulled_back(
        self,
        residual: Float[Tensor, "*rows d_model"],
        gradient: Float[Tensor, "*rows d_model"],
    ) -> Float[Tensor, "*rows d_model"]:
        """Multiply by an RMS norm's transposed Jacobian: ``(g - x (g . x) / (n scale^2)) / scale``.

        g is the gradient times the weight. Exact, with epsilon included in the scale.

        Args:
            residual: the norm's input.
            gradient: with respect to its output.
        """
        g = gradient if self.weight is None else gradient * self.weight
        inverse = (residual.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        along = (g * residual).sum(dim=-1, keepdim=True) * inverse**2
        return torch.addcmul(g, along, residual, value=-1 / residual.shape[-1]).mul_(inverse)


class ClosedForm(torch.autograd.Function):
    """An RMS norm as its module computes it, with the gradient in closed form.

    Autograd takes longer and keeps more activations. The weight gets no gradient.
    """

    @staticmethod
    def forward(ctx: Any, residual: Tensor, norm: Norm, module: nn.Module) -> Tensor:
        ctx.norm = norm
        ctx.save_for_backward(residual)
        return module(residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.norm.pulled_back(*ctx.saved_tensors, gradient), None, None


def bridge_norm(cfg: Any, module: Any) -> Norm:
    """The normalisation that a bridge's component performs; the identity without a component."""
    inner = None if module is None else module.original_component
    if module is None or isinstance(inner, nn.Identity):
        return Norm(None, None, None, 0.0)
    if not hasattr(module, "uses_rms_norm"):
        raise ValueError(
            f"expected normalisations that TransformerLens describes; {cfg.model_name!r} has a "
            f"{type(inner).__name__} as one of them"
        )
    rms = bool(module.uses_rms_norm)
    weight, bias = getattr(inner, "weight", None), getattr(inner, "bias", None)
    offset = getattr(module, "uses_weight_offset", None)
    if offset is None:  # TransformerLens before 4.1
        offset = rms and bool(getattr(cfg, "rmsnorm_uses_offset", False))
    if offset and weight is not None:
        weight = 1.0 + weight
    known = [getattr(inner, name, None) for name in ("eps", "variance_epsilon")]
    eps = next((value for value in known if value is not None), cfg.eps)
    return Norm("rms" if rms else "layer", weight, None if rms else bias, float(eps))
