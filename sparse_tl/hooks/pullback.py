"""Gradients at q, k, v and normalised inputs, pulled back to the residual stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from sparse_tl.hooks.points import HookedModel
from sparse_tl.hooks.streams import LayerReads


@torch.no_grad()
def pull_to_residual(
    model: HookedModel, layer: int, reads: LayerReads, gradients: Sequence[Tensor]
) -> Float[Tensor, "destination batch pos d_model"]:
    """Gradients at the residual stream as each destination of a layer reads it.

    Args:
        model: the model.
        layer: whose destinations.
        reads: what they read.
        gradients: at `reads.tensors`, in that order.

    Returns:
        In the graph's order: q of every head, k and v of every key-value head, the MLP.
    """
    attention = model.blocks[layer].attn
    pulled = []
    for slot, gradient in zip("qkv", gradients, strict=False):
        weight = getattr(attention, f"_W_{slot.upper()}", None)  # grouped: one per kv head
        weight = getattr(attention, f"W_{slot.upper()}") if weight is None else weight
        pulled.append(
            einsum(
                gradient,
                weight.to(gradient.dtype),
                "batch pos head d_head, head d_model d_head -> head batch pos d_model",
            )
        )
    normed = torch.cat(pulled)
    out = _through_norm(model, model.blocks[layer].ln1, reads.attention_residual, normed)
    if reads.mlp_residual is None:
        return out
    mlp = _through_norm(model, model.blocks[layer].ln2, reads.mlp_residual, gradients[3][None])
    return torch.cat([out, mlp])


def _through_norm(
    model: HookedModel,
    norm: nn.Module,
    residual: Float[Tensor, "batch pos d_model"],
    gradients: Float[Tensor, "destination batch pos d_model"],
) -> Float[Tensor, "destination batch pos d_model"]:
    """Through the transposed Jacobian of a normalisation, ``(g - mean g - x mean(g x)) / scale``.

    g is the gradient times the norm's weight and x the normalised input; an RMS norm subtracts no
    mean. The equation is exact with the norm's epsilon inside the scale.
    """
    kind = model.cfg.normalization_type
    if kind is None:
        return gradients
    x = residual.detach()
    weight = getattr(norm, "w", None)
    if weight is not None:
        gradients = gradients * weight
    if kind.startswith("LN"):
        x = x - x.mean(dim=-1, keepdim=True)
        gradients = gradients - gradients.mean(dim=-1, keepdim=True)
    scale = (x.pow(2).mean(dim=-1, keepdim=True) + model.cfg.eps).sqrt()
    x = x / scale
    along = (gradients * x).mean(dim=-1, keepdim=True)
    return gradients.addcmul_(along, x, value=-1).div_(scale)
