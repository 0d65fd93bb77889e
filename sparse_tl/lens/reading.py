"""How destinations read the residual stream: from it to q, k and v, and gradients back to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from sparse_tl.lens.points import HookedModel
from sparse_tl.lens.streams import LayerReads


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


class PulledGradients:
    """Gradients at the residual stream as each destination reads it, summed over passes.

    The gradient g at a head's q, k or v goes back through its projection W and the normalisation
    with weight w, scale s and normalised input x (an RMS norm centres nothing):

        pulled = (V g - x mean(x . V g)) / s,     V = w W, centred over d_model

    V holds weights alone, so over passes only ``g / s`` and the coefficients of x are collected;
    the large product with V is done once, in `layer`. And ``x . V g`` needs no product at all:
    ``x V`` is q, k or v without its biases.
    """

    def __init__(self, model: HookedModel, n_layers: int) -> None:
        self.model = model
        self._heads: list[list[Tensor]] = [[] for _ in range(n_layers)]
        self._along: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(n_layers)]
        self._mlps: list[Tensor | None] = [None] * n_layers
        self.final: Tensor | None = None

    @torch.no_grad()
    def add(
        self, reads: Sequence[LayerReads], gradients: Sequence[Tensor], final: Tensor, share: float
    ) -> None:
        """One pass: gradients at each layer's `LayerReads.tensors` in turn, and at the logits."""
        start = 0
        for layer, read in enumerate(reads):
            mine = gradients[start : start + len(read.tensors)]
            self._add_heads(layer, read, [share * gradient for gradient in mine[:3]])
            if read.mlp_residual is not None:
                norm = self.model.blocks[layer].ln2
                pulled = share * _through_norm(self.model, norm, read.mlp_residual, mine[3])
                self._mlps[layer] = _plus(self._mlps[layer], pulled)
            start += len(read.tensors)
        self.final = _plus(self.final, share * final)

    def _add_heads(self, layer: int, read: LayerReads, gradients: Sequence[Tensor]) -> None:
        if self.model.cfg.normalization_type is not None:
            x, scale = _standardised(self.model, read.attention_residual)
            gradients = [gradient / scale[..., None] for gradient in gradients]
            along = [
                ((value.detach() - self._constant(layer, slot)) * gradient).sum(dim=-1)
                for slot, value, gradient in zip("qkv", read.tensors, gradients, strict=False)
            ]
            self._along[layer].append((torch.cat(along, dim=-1) / x.shape[-1], x))
        found = self._heads[layer] or [None] * len(gradients)
        self._heads[layer] = [_plus(*some) for some in zip(found, gradients, strict=True)]

    @torch.no_grad()
    def layer(
        self, layer: int, out: Float[Tensor, "destination batch pos d_model"]
    ) -> Float[Tensor, "some batch pos d_model"]:
        """One layer's destinations in the graph's order, written into a buffer: q of every head,
        k and v of every key-value head, the MLP."""
        done = 0
        for slot, gradient in zip("qkv", self._heads[layer], strict=True):
            flat = rearrange(gradient, "batch pos head d_head -> head (batch pos) d_head")
            through = self._through(layer, slot).to(flat.dtype)
            rows = out[done : done + len(flat)].flatten(1, 2)
            torch.bmm(flat, through.mT, out=rows)
            done += len(flat)
        for along, x in self._along[layer]:
            heads = rearrange(along, "batch pos head -> head batch pos 1")
            out[:done].addcmul_(heads, x, value=-1)
        mlp = self._mlps[layer]
        if mlp is not None:
            out[done] = mlp
            done += 1
        return out[:done]

    def _through(self, layer: int, slot: str) -> Float[Tensor, "head d_model d_head"]:
        """V."""
        weight, _ = head_weights(self.model, layer, slot)
        scale = getattr(self.model.blocks[layer].ln1, "w", None)
        if scale is not None:
            weight = weight * scale[:, None]
        return weight - weight.mean(dim=1, keepdim=True) if _centres(self.model) else weight

    def _constant(self, layer: int, slot: str) -> Float[Tensor, "head d_head"]:
        """What q, k or v is where the normalised input is 0."""
        weight, bias = head_weights(self.model, layer, slot)
        shift = getattr(self.model.blocks[layer].ln1, "b", None)
        return bias if shift is None else bias + einsum(weight, shift, "head d e, d -> head e")


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more


def _centres(model: HookedModel) -> bool:
    kind = model.cfg.normalization_type
    return kind is not None and kind.startswith("LN")


def _standardised(
    model: HookedModel, residual: Float[Tensor, "batch pos d_model"]
) -> tuple[Float[Tensor, "batch pos d_model"], Float[Tensor, "batch pos 1"]]:
    """A normalisation's input without mean and scale, and the scale."""
    x = residual.detach()
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()  # squares of large activations overflow in half precision
    if _centres(model):
        x = x - x.mean(dim=-1, keepdim=True)
    scale = (x.pow(2).mean(dim=-1, keepdim=True) + model.cfg.eps).sqrt()
    return (x / scale).to(residual.dtype), scale.to(residual.dtype)


def _through_norm(
    model: HookedModel,
    norm: nn.Module,
    residual: Float[Tensor, "batch pos d_model"],
    gradient: Float[Tensor, "batch pos d_model"],
) -> Float[Tensor, "batch pos d_model"]:
    """Through the transposed Jacobian of a normalisation, ``(g - mean g - x mean(g x)) / scale``.

    g is the gradient times the norm's weight and x the normalised input; an RMS norm subtracts no
    mean. The equation is exact with the norm's epsilon inside the scale.
    """
    if model.cfg.normalization_type is None:
        return gradient
    x, scale = _standardised(model, residual)
    weight = getattr(norm, "w", None)
    if weight is not None:
        gradient = gradient * weight
    if _centres(model):
        gradient = gradient - gradient.mean(dim=-1, keepdim=True)
    along = (gradient * x).mean(dim=-1, keepdim=True)
    return (gradient - along * x) / scale
