"""Gradients with respect to each destination's residual input, from those at q, k, v and MLPs.

The gradient g at a head's q, k or v is pulled back through its projection W and the normalisation
with weight w, scale s and standardised input x (an RMS norm does not centre):

    back(g) = (V g - x mean(x . V g)) / s,     V = w W, centred over d_model

Where the scale counts as a constant (``relp``), the term with x is absent.
V depends only on weights, so only ``g / s`` and the coefficients of x are summed over passes; the
large product with V is computed once, in `ReadGradients.layer`. ``x . V g`` needs no extra product:
``x V`` is q, k or v without its biases.
"""

from __future__ import annotations

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.linalg import vecdot

from sparse_tl.calls.scopes import autograd
from sparse_tl.circuits.methods.gradient_passes import GradientPass
from sparse_tl.lens import Adapter

Places = Int[Tensor, " place"]
"""Positions of a batch of prompts, as flat indices."""
READS_AT_ONCE = 2**25
"""Maximum number of values that all destinations of a layer read, held at one time."""


def at_places(value: Float[Tensor, "batch pos ..."], places: Places) -> Float[Tensor, "place ..."]:
    """The values at some positions of the prompts."""
    return value.flatten(0, 1).index_select(0, places)


class ReadGradients:
    """Gradients of all destinations, summed over passes.

    Args:
        adapter: adapter of the model.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._sums: dict[str, Tensor] = {}
        self._constants: dict[tuple[int, str], Tensor] = {}
        self._along: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(adapter.n_layers)]

    @property
    def final(self) -> Float[Tensor, "batch pos d_model"]:
        """The gradient with respect to the final residual stream, which the logits read."""
        return self._sums["final"]

    @autograd(False)
    def add(self, one: GradientPass) -> None:
        """Add a pass's gradients at every destination."""
        layers = range(self.adapter.n_layers)
        heads = [self.adapter.destination_points(layer)[:3] for layer in layers]
        residuals = [self.adapter.residual_points(layer) for layer in layers]
        others = [*(name for names in residuals for name in names[1:]), "final"]
        gradients = one.gradients([*sum(heads, []), *others])
        for layer, names in enumerate(heads):
            self._add_heads(layer, one, names, one.kept[residuals[layer][0]], gradients)
        for name in others:
            self._add(name, one.over_copies(gradients[name]))

    def _add_heads(
        self,
        layer: int,
        one: GradientPass,
        names: list[str],
        residual: Float[Tensor, "batch pos d_model"],
        gradients: dict[str, Tensor],
    ) -> None:
        norm = self.adapter.norm(layer, "attn")
        found = {name: gradients[name] for name in names}
        if norm.kind is not None:
            x, scale = norm.standardised(residual)
            found = {name: gradient / scale[..., None] for name, gradient in found.items()}
            if not one.by_relevance:
                along = [
                    vecdot(one.kept[name].detach() - self._constant(layer, slot), gradient)
                    for slot, (name, gradient) in zip("qkv", found.items(), strict=True)
                ]
                coefficients = torch.cat(along, dim=-1) / x.shape[-1]
                steps = zip(coefficients.chunk(one.copies), x.chunk(one.copies), strict=True)
                self._along[layer] += steps
        for name, gradient in found.items():
            self._add(name, one.over_copies(gradient))

    def _add(self, name: str, more: Tensor) -> None:
        self._sums[name] = self._sums[name] + more if name in self._sums else more

    @autograd(False)
    def layer(
        self,
        layer: int,
        places: Places,
        out: Float[Tensor, "destination place d_model"],
    ) -> Float[Tensor, "some place d_model"]:
        """Gradients of one layer's destinations at some places, written into `out` in the graph's
        order: q of every head, k and v of every key-value head, then the MLP."""
        done, norm = 0, self.adapter.norm(layer, "attn")
        for slot, name in zip("qkv", self.adapter.destination_points(layer)[:3], strict=True):
            read = at_places(self._sums[name], places).transpose(0, 1)
            weight, _ = self.adapter.qkv(layer, slot)  # type: ignore[arg-type]
            torch.bmm(read, weight.to(read.dtype).mT, out=out[done : done + len(read)])
            done += len(read)
        if norm.weight is not None:
            out[:done] *= norm.weight
        if norm.kind == "layer":
            out[:done] -= out[:done].mean(dim=-1, keepdim=True)
        for along, x in self._along[layer]:
            heads = at_places(along, places).T[..., None]
            out[:done].addcmul_(heads, at_places(x, places), value=-1)
        for name in self.adapter.residual_points(layer)[1:]:
            out[done] = at_places(self._sums[name], places)
            done += 1
        return out[:done]

    @autograd(False)
    def summed(
        self, readers: Bool[Tensor, "batch pos destination"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The sum of the gradients of chosen destinations, at each place."""
        graph, d_model = self.adapter.graph, self.adapter.d_model
        total = (readers[..., -1:] * self.final).flatten(0, 1)
        size = graph.n_heads + 2 * graph.n_kv_heads + graph.has_mlps
        chosen = readers[..., :-1].unflatten(-1, (graph.n_layers, size))
        at_once = max(1, READS_AT_ONCE // (size * d_model))
        for layer in range(graph.n_layers):
            weights = chosen[:, :, layer].flatten(0, 1)
            for places in weights.any(dim=-1).nonzero()[:, 0].split(at_once):
                read = self.layer(layer, places, total.new_empty(size, len(places), d_model))
                weight = weights[places].to(read.dtype)
                total[places] += einsum(weight, read, "place to, to place d -> place d")
        return total.view_as(self.final)

    def _constant(self, layer: int, slot: str) -> Float[Tensor, "head d_head"]:
        """The value of q, k or v for a normalised input of 0; computed in the first pass."""
        if (layer, slot) not in self._constants:
            weight, bias = self.adapter.qkv(layer, slot)  # type: ignore[arg-type]
            shift = self.adapter.norm(layer, "attn").bias
            if shift is not None:
                bias = bias + einsum(weight, shift, "head d e, d -> head e")
            self._constants[layer, slot] = bias
        return self._constants[layer, slot]
