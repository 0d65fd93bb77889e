"""Gradients at the residual stream as each destination reads it, from those at q, k, v and MLPs.

The gradient g at a head's q, k or v goes back through its projection W and the normalisation with
weight w, scale s and standardised input x (an RMS norm centres nothing):

    back(g) = (V g - x mean(x . V g)) / s,     V = w W, centred over d_model

V holds weights alone, so over passes only ``g / s`` and the coefficients of x are collected; the
large product with V is done once, in `ReadGradients.layer`. And ``x . V g`` needs no product at
all: ``x V`` is q, k or v without its biases.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from sparse_tl.lens import Adapter, destination_points, residual_points


class ReadGradients:
    """Those of all destinations, summed over passes.

    Args:
        adapter: of the model.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self.has_mlps = adapter, adapter.graph.has_mlps
        self._heads: list[list[Tensor]] = [[] for _ in range(adapter.n_layers)]
        self._along: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(adapter.n_layers)]
        self._mlps: list[Tensor | None] = [None] * adapter.n_layers
        self.final: Tensor | None = None

    @torch.no_grad()
    def add(
        self,
        kept: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        final: Float[Tensor, "batch pos d_model"],
        share: float,
    ) -> None:
        """One pass.

        Args:
            kept: what stood at the destination and residual points of every layer.
            gradients: at the destination points.
            final: the gradient at the final residual stream.
            share: what the pass counts.
        """
        for layer in range(self.adapter.n_layers):
            points = destination_points(layer, self.has_mlps)
            residuals = residual_points(layer, self.has_mlps)
            values = [kept[name] for name in points[:3]]
            slots = [share * gradients[name] for name in points[:3]]
            self._add_heads(layer, kept[residuals[0]], values, slots)
            if self.has_mlps:
                norm = self.adapter.norm(layer, "mlp")
                back = share * norm.pulled_back(kept[residuals[1]], gradients[points[3]])
                self._mlps[layer] = _plus(self._mlps[layer], back)
        self.final = _plus(self.final, share * final)

    def _add_heads(
        self, layer: int, residual: Tensor, values: list[Tensor], gradients: list[Tensor]
    ) -> None:
        norm = self.adapter.norm(layer, "attn")
        if norm.kind is not None:
            x, scale = norm.standardised(residual)
            gradients = [gradient / scale[..., None] for gradient in gradients]
            along = [
                ((value.detach() - self._constant(layer, slot)) * gradient).sum(dim=-1)
                for slot, value, gradient in zip("qkv", values, gradients, strict=True)
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
            torch.bmm(flat, through.mT, out=out[done : done + len(flat)].flatten(1, 2))
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
        weight, _ = self.adapter.qkv(layer, slot)  # type: ignore[arg-type]
        norm = self.adapter.norm(layer, "attn")
        if norm.weight is not None:
            weight = weight * norm.weight[:, None]
        return norm.centred(weight.mT).mT

    def _constant(self, layer: int, slot: str) -> Float[Tensor, "head d_head"]:
        """What q, k or v is where the normalised input is 0."""
        weight, bias = self.adapter.qkv(layer, slot)  # type: ignore[arg-type]
        shift = self.adapter.norm(layer, "attn").bias
        return bias if shift is None else bias + einsum(weight, shift, "head d e, d -> head e")


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more
