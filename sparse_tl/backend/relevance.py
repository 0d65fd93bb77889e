"""Gradients by the rules of layer-wise relevance propagation, in place of the model's own.

Forward passes are unchanged. In the backward pass, each non-linear part counts as a linear map,
fixed at the current input:

- a norm of the residual stream keeps its scale fixed (LN-rule): ``dy = w centred(dx) / scale``;
- an activation function is a factor (identity rule): ``da = (a / pre) d pre``;
- where a product gates the MLP, each factor gets half (half-rule): ``d(a l) = (l da + a dl) / 2``.

Attention keeps its ordinary gradient. Where patterns are constant, as for prompts of one token, and
there are no biases, output = gradient . input.

Reference: RelP, arXiv 2508.21258.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from sparse_tl.backend.hook_points import hooks_on
from sparse_tl.backend.hooks import Hook, Order, attached
from sparse_tl.backend.interface import Adapter
from sparse_tl.backend.numerics import Norm


@contextmanager
def relevance_rules(adapter: Adapter) -> Iterator[None]:
    """Inside the block, gradients follow these rules, if there is one for every part."""
    adapter.check_supported("relp")
    hooks = [hook for layer in range(adapter.n_layers) for hook in _mlp_hooks(adapter, layer)]
    norms = list[tuple[nn.Module, Callable[..., Any]]]()
    for name, norm in adapter.norms().items():
        module, edited = attrgetter(name)(adapter.model), list[Tensor]()
        if getattr(module, "hook_in", None) is not None:
            hooks.append((f"{name}.hook_in", Order.LAST, partial(_keep, edited)))
        norms.append((module, partial(_after_norm, norm, edited)))
    with hooks_on(norms), attached(adapter, hooks):
        yield


def _keep(edited: list[Tensor], residual: Tensor) -> Tensor:
    """Keep a norm's input as its hook point shows it after all edits."""
    edited[:] = [residual]
    return residual


def _after_norm(
    norm: Norm,
    edited: list[Tensor],
    _module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Tensor,
) -> Tensor | None:
    """The norm's output, with the gradient of a norm whose scale is a constant."""
    residual = edited.pop() if edited else args[0] if args else kwargs["hidden_states"]
    if not torch.is_grad_enabled():
        return None
    return _with_gradient_of(output, norm.share(residual, residual.detach()))


def _mlp_hooks(adapter: Adapter, layer: int) -> list[Hook]:
    """The hooks that make an MLP linear in what enters its activation function and its gate."""
    if not adapter.has_mlps:
        return []
    mlp: Any = adapter.model.blocks[layer].mlp
    gated = getattr(mlp, "hook_pre_linear", None) is not None
    factors = ["hook_pre", "hook_pre_linear"] if gated else ["hook_pre"]
    kept: dict[str, Tensor] = {}

    def after(post: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        product = post.detach()
        if getattr(mlp, "b_in", None) is not None and gated:
            product = product - mlp.b_in.detach()  # HookedTransformers add it to the product
        first, *others = [_ratio(product, kept[name]) * kept[name] for name in factors]
        return _with_gradient_of(post, sum(others, first) / len(factors))

    block = f"blocks.{layer}.mlp"
    before = [(f"{block}.{name}", Order.LAST, partial(kept.__setitem__, name)) for name in factors]
    return [*before, (f"{block}.hook_post", Order.FIRST, after)]


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient as a constant; 0 where the denominator is 0."""
    below = denominator.detach()
    return torch.where(below == 0, 0.0, numerator / torch.where(below == 0, 1.0, below))


def _with_gradient_of(value: Tensor, linear: Tensor) -> Tensor:
    """This value, bit for bit, with the gradient of another tensor."""
    return value.detach() + (linear - linear.detach()).to(value.dtype)
