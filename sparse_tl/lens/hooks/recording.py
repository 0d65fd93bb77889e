"""A forward pass that records activations at some hook points and replaces others."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sparse_tl.calls.scopes import autograd
from sparse_tl.lens.core.adapter import Adapter
from sparse_tl.lens.core.attaching import Hook, Order, attached, without_user_hooks
from sparse_tl.lens.core.masks import AttentionMask
from sparse_tl.lens.core.points import EMBEDDED, Model
from sparse_tl.lens.core.rounding import excess
from sparse_tl.lens.core.shortcuts import hooked


@runtime_checkable
class Activations(Protocol):
    """Values by hook point name: a dictionary, or TransformerLens's cache."""

    def __getitem__(self, name: str, /) -> Tensor: ...

    def __iter__(self) -> Iterator[str]: ...

    def keys(self) -> Iterable[str]: ...


def record(
    adapter: Adapter,
    tokens: Int[Tensor, "batch pos"],
    names: Sequence[str],
    *,
    first: Sequence[str] = (),
    replaced: Activations | None = None,
    differentiable: bool = False,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    copies: int = 1,
) -> tuple[dict[str, Tensor], Float[Tensor, "rows pos d_model"]]:
    """Activations at some hook points, and the final residual stream.

    Args:
        adapter: adapter of the model.
        tokens: prompts.
        names: names of the hook points.
        first: names of those that are recorded, or replaced, before other hooks at the same point
            run; all others are recorded after them.
        replaced: values that replace the model's own.
        differentiable: keep the autograd graph from the replaced values or the input node on; these
            are leaves, so weights may be frozen and nothing earlier needs a gradient.
        attention_mask: 0 at padding.
        copies: number of copies of the prompts to run, one after the other.

    Raises:
        ValueError: a hook point does not fire.
    """
    kept: dict[str, Tensor] = {}
    changed = {} if replaced is None else {name: replaced[name] for name in replaced}

    def keep(name: str, value: Tensor) -> Tensor:
        value = changed.get(name, value)
        if differentiable and (name in changed or name == EMBEDDED):
            value = value.detach().requires_grad_()
        kept[name] = value
        # Returned even if unchanged: some models pass a view that nothing else reads.
        return value.clone() if name in edited else value

    every = dict.fromkeys([*names, *changed, *([EMBEDDED] if differentiable else [])])
    places = {name: adapter.place(name) for name in first}
    # Hooks may edit in place.
    edited = {name for name, at in places.items() if isinstance(at, nn.Module) and hooked(at)}
    hooks: list[Hook] = [
        (name, Order.FIRST if name in places else Order.LAST, partial(keep, name)) for name in every
    ]
    with attached(adapter, hooks), autograd(differentiable):
        final = adapter.final(tokens, copies=copies, attention_mask=attention_mask)
    check_fired(adapter, names, kept)
    return kept, final


def check_fired(adapter: Adapter, names: Sequence[str], kept: Container[str]) -> None:
    """Check that all hook points have fired in a pass.

    Raises:
        ValueError: one has not.
    """
    silent = [name for name in names if name not in kept]
    if silent:
        raise ValueError(
            f"expected every part of {adapter.name!r} to be called in a forward pass; {silent[0]} "
            "never fires: the model computes it by other means, and its parts cannot be told apart"
        )


def mask_hooks(adapter: Adapter, masks: dict[int, AttentionMask]) -> list[Hook]:
    """Hooks that store the mask of every layer's attention in a dictionary, by layer."""
    return [
        (f"blocks.{layer}.attn.mask", Order.FIRST, partial(masks.__setitem__, layer))
        for layer in range(adapter.n_layers)
    ]


@autograd(False)
def source_outputs(
    adapter: Adapter, values: Activations
) -> Float[Tensor, "source batch pos d_model"]:
    """Each source's contribution to the residual stream, in the graph's order.

    Biases of ``W_O`` belong to no head and cancel in differences; so do biases of MLPs.
    """
    graph = adapter.graph
    embedded = values[EMBEDDED]
    batch, pos, d_model = embedded.shape
    out = embedded.new_empty(len(graph.sources), batch, pos, d_model)
    out[0] = embedded
    for layer in range(adapter.n_layers):
        first = graph.source_index(f"a{layer}.h0")
        z = values[adapter.heads_point(layer)].to(out.dtype)
        adapter.heads_written(layer, z, out=out[first : first + graph.n_heads])
        if graph.has_mlps:
            out[graph.source_index(f"m{layer}")] = values[f"blocks.{layer}.hook_mlp_out"]
    return out


_enters: WeakKeyDictionary[Model, bool] = WeakKeyDictionary()


@autograd(False)
def enters(adapter: Adapter) -> bool:
    """Whether a pass from a later layer on ends like a full pass; tested once per model.

    A layer that needs more from earlier ones than the residual stream, such as their choice of
    keys, cannot be entered this way.
    """
    model = adapter.model
    if model not in _enters:
        last = f"blocks.{adapter.n_layers - 1}.entering"
        tokens = torch.arange(min(3, adapter.n_ctx, adapter.d_vocab), device=adapter.device)[None]
        with without_user_hooks(model):
            kept, final = record(adapter, tokens, [last])
            try:
                found = adapter.final(kept[last], from_layer=adapter.n_layers - 1)
                size = final.abs().amax(dim=-1, keepdim=True)
                _enters[model] = excess(adapter.dtype, final, found, size) is None
            except Exception:  # a layer that lacks an input may raise anything
                _enters[model] = False
    return _enters[model]
