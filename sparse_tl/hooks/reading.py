"""How destinations read the residual stream: from it to q, k and v, and gradients back to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from sparse_tl.hooks.points import HookedModel
from sparse_tl.hooks.streams import LayerReads


def normalised(
    model: HookedModel, norm: nn.Module, residual: Float[Tensor, "*rows d_model"]
) -> Float[Tensor, "*rows d_model"]:
    """What a normalisation of the model makes of any residual stream, without its hook points."""
    kind = model.cfg.normalization_type
    if kind is None:
        return residual
    weight, bias = getattr(norm, "w", None), getattr(norm, "b", None)
    shape = residual.shape[-1:]
    if kind.startswith("LN"):
        return nn.functional.layer_norm(residual, shape, weight, bias, model.cfg.eps)
    return nn.functional.rms_norm(residual, shape, weight, model.cfg.eps)


def projected(
    model: HookedModel,
    layer: int,
    slot: str,
    normed: Float[Tensor, "head batch pos d_model"],
    head: int | None = None,
) -> Float[Tensor, "batch pos head d_head"]:
    """Each head's q, k or v from its own normalised input, or one head's; k and v of kv heads."""
    weight, bias = head_weights(model, layer, slot)
    if head is not None:
        weight, bias = weight[head : head + 1], bias[head : head + 1]
    flat = rearrange(normed, "head batch pos d_model -> head (batch pos) d_model")
    out = torch.baddbmm(bias.to(flat.dtype)[:, None], flat, weight.to(flat.dtype))
    return rearrange(out, "head (batch pos) d_head -> batch pos head d_head", pos=normed.shape[2])


def head_weights(
    model: HookedModel, layer: int, slot: str
) -> tuple[Float[Tensor, "head d_model d_head"], Float[Tensor, "head d_head"]]:
    """``W_Q``, ``W_K`` or ``W_V`` and its bias; k and v of key-value heads."""
    attention = model.blocks[layer].attn
    upper = slot.upper()
    weight = getattr(attention, f"_W_{upper}", None)
    if weight is None:
        return getattr(attention, f"W_{upper}"), getattr(attention, f"b_{upper}")
    return weight, getattr(attention, f"_b_{upper}")


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
    pulled = []
    for slot, gradient in zip("qkv", gradients, strict=False):
        weight, _ = head_weights(model, layer, slot)
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
