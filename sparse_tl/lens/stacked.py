"""The model under many matrices of head gates in one forward pass, computing no more than is read.

The prompts are repeated once per matrix. Up to the first gate all copies are the same, so the first
layer's attention sees the prompts once, and only its gated heads are stacked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sparse_tl.lens.attaching import HookFunction, Order, attached
from sparse_tl.lens.lean import lean
from sparse_tl.lens.points import HookedModel, layer_points


def final_under_heads(
    model: HookedModel,
    tokens: Int[Tensor, "batch pos"],
    gates: Float[Tensor, "stack layer head"],
    read: Bool[Tensor, "batch pos"],
    attention_mask: Int[Tensor, "batch pos"] | None = None,
) -> Float[Tensor, "stack label d_model"]:
    """The residual stream after the last layer, with ``hook_z`` of every head times its gate.

    Differentiable in the gates. Equal to one pass per matrix; with gates of 1 to the plain model.

    Args:
        model: dense or sparse; it is not changed.
        tokens: the prompts.
        gates: 1 keeps a head, 0 takes away what it writes.
        read: the positions that are asked for, row by row.
        attention_mask: 0 at padding.
    """
    n_stack, n_rows = len(gates), len(tokens)
    names = layer_points(model, "attn.hook_z")
    hooks: list[tuple[str, Order, HookFunction]] = [
        (name, Order.LAST, partial(_gate, gates[:, layer], n_rows))
        for layer, name in enumerate(names)
    ]
    masked = {} if attention_mask is None else {"attention_mask": attention_mask.repeat(n_stack, 1)}
    read = read.repeat(n_stack, 1)
    with (
        attached(model, hooks),
        _once(model.blocks[0].attn, n_rows),
        lean(model, read),
    ):
        final = model(tokens.repeat(n_stack, 1), stop_at_layer=model.cfg.n_layers, **masked)
    return rearrange(final[read], "(stack label) d -> stack label d", stack=n_stack)


def _gate(
    gates: Float[Tensor, "stack head"], n_rows: int, z: Float[Tensor, "rows pos head d_head"]
) -> Float[Tensor, "stacked pos head d_head"]:
    # The first layer gives the prompts once; every later one gives a copy for each matrix.
    copies = z[None] if len(z) == n_rows else z.view(len(gates), n_rows, *z.shape[1:])
    return (copies * gates.to(z.dtype)[:, None, None, :, None]).flatten(0, 1)


@contextmanager
def _once(attention: nn.Module, n_rows: int) -> Iterator[None]:
    """The attention layer sees the first `n_rows` rows of what it is called with."""

    def first(value: Any) -> Any:
        return value[:n_rows] if isinstance(value, Tensor) else value

    def shorten(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return tuple(map(first, args)), {name: first(value) for name, value in kwargs.items()}

    handle = attention.register_forward_pre_hook(shorten, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
