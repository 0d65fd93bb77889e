"""One forward pass with what stood at some hook points kept, and some of it replaced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.lens.attaching import HookFunction, Order, attached

if TYPE_CHECKING:
    from sparse_tl.lens.adapter import Adapter

EMBEDDED = "blocks.0.hook_resid_pre"
"""Where the input node writes: token and learned positional embeddings together."""


@runtime_checkable
class Activations(Protocol):
    """Values by the name of their hook point: a dictionary, or TransformerLens's cache."""

    def __getitem__(self, name: str, /) -> Tensor: ...

    def __iter__(self) -> Iterator[str]: ...


def source_points(n_layers: int, has_mlps: bool) -> list[str]:
    """The hook points at which the sources of a circuit graph write; heads as z, before ``W_O``."""
    names = [EMBEDDED]
    for layer in range(n_layers):
        names.append(f"blocks.{layer}.attn.hook_z")
        names += [f"blocks.{layer}.hook_mlp_out"] * has_mlps
    return names


def destination_points(layer: int, has_mlps: bool) -> list[str]:
    """What the destinations of a layer read: q, k and v before rotary embeddings, and the MLP."""
    names = [f"blocks.{layer}.attn.hook_{slot}" for slot in "qkv"]
    return names + [f"blocks.{layer}.mlp_normalized"] * has_mlps


def residual_points(layer: int, has_mlps: bool) -> list[str]:
    """The residual stream at the places where a layer reads it."""
    return [f"blocks.{layer}.hook_resid_pre"] + [f"blocks.{layer}.mlp_input"] * has_mlps


def record(
    adapter: Adapter,
    tokens: Int[Tensor, "batch pos"],
    names: Sequence[str],
    *,
    replaced: Activations | None = None,
    differentiable: bool = False,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
) -> tuple[dict[str, Tensor], Float[Tensor, "batch pos d_model"]]:
    """What stands at some hook points, after all edits, and the final residual stream.

    Args:
        adapter: of the model.
        tokens: the prompts.
        names: of the hook points.
        replaced: values to put in the place of the model's own.
        differentiable: keep the autograd graph, from the first replaced value or the input node on:
            these are leaves, so that weights may be frozen and nothing before needs a gradient.
        attention_mask: 0 at padding.
    """
    kept: dict[str, Tensor] = {}
    changed = {} if replaced is None else {name: replaced[name] for name in replaced}

    def keep(name: str, value: Tensor) -> Tensor:
        value = changed.get(name, value)
        if differentiable and (name in changed or name == EMBEDDED):
            value = value.detach().requires_grad_()
        kept[name] = value
        # Returned also where nothing changes: some models hand out a view that leads nowhere.
        return value

    every = [*names, *changed, *([EMBEDDED] if differentiable else [])]
    hooks: list[tuple[str, Order, HookFunction]] = [
        (name, Order.LAST, partial(keep, name)) for name in dict.fromkeys(every)
    ]
    with attached(adapter.model, hooks), torch.set_grad_enabled(differentiable):
        return kept, adapter.final(tokens, attention_mask=attention_mask)


@torch.no_grad()
def source_outputs(
    adapter: Adapter, values: Activations
) -> Float[Tensor, "source batch pos d_model"]:
    """Every source's own contribution to the residual stream, in the graph's order.

    Biases of ``W_O`` belong to no head and cancel in differences; so do MLPs' own.
    """
    graph = adapter.graph
    embedded = values[EMBEDDED]
    batch, pos, d_model = embedded.shape
    out = embedded.new_empty(len(graph.sources), batch, pos, d_model)
    out[0] = embedded
    for layer in range(adapter.n_layers):
        first = graph.source_index(f"a{layer}.h0")
        z = values[f"blocks.{layer}.attn.hook_z"]
        out[first : first + graph.n_heads] = heads_written(adapter, layer, z)
        if graph.has_mlps:
            out[graph.source_index(f"m{layer}")] = values[f"blocks.{layer}.hook_mlp_out"]
    return out


def heads_written(
    adapter: Adapter,
    layer: int,
    z: Float[Tensor, "batch pos head d_head"],
    *,
    heads: Sequence[int] | None = None,
) -> Float[Tensor, "some batch pos d_model"]:
    """What all heads of a layer, or some, add to the residual stream, without the bias."""
    weight = adapter.W_O(layer).to(z.dtype)
    if heads is not None and len(heads) < len(weight):
        weight, z = weight[list(heads)], z[:, :, list(heads)]
    flat = rearrange(z, "batch pos head d_head -> head (batch pos) d_head")
    return torch.bmm(flat, weight).view(len(weight), *z.shape[:2], -1)
