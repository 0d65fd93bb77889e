"""Attention scores that are computed a few queries at a time, in any model.

In a layer whose scores are deferred, ``q @ k^T`` returns a `Deferred` tensor. It has a shape and a
dtype but no storage, and records what the model's own code does to it: scale, soft cap, masks,
softmax. Code that can use an attention pattern block by block evaluates that record on a block. For
all other code, the tensor computes its values when they are needed, with the same results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformer_lens.hook_points import HookPoint

from sparse_tl.backend.attention import ENTRY, EVERYTHING, Expression
from sparse_tl.backend.hook_points import Forward, hook_point, hooked, stand_in
from sparse_tl.backend.hooks import AttachedHooks
from sparse_tl.backend.interface import Adapter
from sparse_tl.contexts import autograd

LONG = 256
"""Tokens per prompt from which scores are deferred; shorter prompts run faster undeferred."""

_BY_ENTRY = {
    *("mul", "multiply", "div", "divide", "true_divide", "add", "sub", "tanh", "masked_fill"),
    *("where", "isnan", "zeros_like", "to", "float", "type", "clamp", "nan_to_num"),
}
_IN_PLACE = {"add_", "sub_", "mul_", "div_", "masked_fill_"}
_FACTS = {
    *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_nested"),
    *("size", "dim", "numel", "is_floating_point", "is_complex"),
}


class Deferred(Tensor):
    """A tensor ``[prompt, head, query, key]`` without storage; see `Expression`."""

    expression: Expression
    computed: Tensor | None
    """The values once they have been computed; None before."""

    @classmethod
    def of(cls, expression: Expression) -> Any:
        q, k = expression.product.args
        dtype = expression.on(ENTRY).dtype  # after all casts that the functions make
        inputs = [q, k, *expression.leaves]
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        differentiable &= dtype.is_floating_point  # `isnan`, for example, gives booleans
        made = Tensor._make_wrapper_subclass(
            cls,
            (*q.shape[:3], k.shape[-1]),
            dtype=dtype,
            device=q.device,
            requires_grad=differentiable,
        )
        made.expression, made.computed = expression, None
        if differentiable:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse)
        return made

    def explicit(self) -> Tensor:
        """The values, computed once; differentiable as if nothing had been deferred."""
        if self.computed is None:
            with autograd(self.requires_grad):
                self.computed = self.expression.on(EVERYTHING)
        return self.computed

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, function_name(func)
        if name in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "dropout" and not _drops(*args[1:], **kwargs):
            return args[0]
        if name in _IN_PLACE:
            later = _recorded(getattr(torch, name[:-1]), args, kwargs)
            if later is not None and isinstance(args[0], Deferred) and args[0].dtype == later.dtype:
                args[0].expression = later.expression
                return args[0]
        elif name in _BY_ENTRY or (name == "softmax" and _axis(*args, **kwargs) in (-1, 3)):
            later = _recorded(func, args, kwargs)
            if later is not None:
                return later
        return func(*map(explicit, args), **{name: explicit(v) for name, v in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[bad-override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise TypeError(f"{func} needs the values of attention scores, which are deferred")

    def __repr__(self, **_: Any) -> str:
        return f"Deferred(shape={tuple(self.shape)}, dtype={self.dtype})"


def _refuse(_gradient: Tensor) -> None:
    """Raise where a gradient ends at a deferred tensor, as after a custom autograd function."""
    raise RuntimeError(
        "an autograd function of the model's own read deferred attention scores, and their "
        "gradient would be lost"
    )


def explicit(value: Any) -> Any:
    """The value with deferred tensors computed, also within lists and tuples."""
    if isinstance(value, list | tuple):
        return type(value)(map(explicit, value))
    return value.explicit() if isinstance(value, Deferred) else value


def function_name(func: Any) -> str:
    """The name of a function, or of a property, that torch dispatches."""
    name = func.__name__
    return func.__self__.__name__ if name == "__get__" else name


def _axis(input: Any, dim: int | None = None, *_: Any, **__: Any) -> int | None:
    """The axis of a softmax with these arguments."""
    return dim


def _drops(p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """Whether `torch.nn.functional.dropout` with these arguments changes anything."""
    return training and p > 0


def _recorded(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Deferred | None:
    """The deferred result of a function; None where it must be computed now."""
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    deferred = [value for value in values if isinstance(value, Deferred)]
    shape = deferred[0].shape
    if any(value.computed is not None or type(value) is not Deferred for value in deferred):
        return None
    if len({id(value.expression.product) for value in deferred}) > 1:
        return None
    for value in values:
        pairs = zip(reversed(value.shape), reversed(shape), strict=False)
        if value.ndim > 4 or any(size not in (1, there) for size, there in pairs):
            return None

    def record(value: Any) -> Any:
        return value.expression if isinstance(value, Deferred) else value

    named = {name: record(value) for name, value in kwargs.items()}
    return Deferred.of(Expression(func, [record(value) for value in args], named))


class _Deferring(TorchFunctionMode):
    """Records products of the queries and keys of `n_heads` heads."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (
            func.__name__ == "matmul"
            and [*map(type, args)] == [Tensor, Tensor]
            and not kwargs
            and args[0].ndim == args[1].ndim == 4  # [prompt, head, query, d] and [..., d, key]
            and args[0].shape[:2] == args[1].shape[:2]
            and args[0].shape[1] == self.n_heads
            and args[0].shape[3] < args[1].shape[3]
        ):
            return Deferred.of(Expression(torch.matmul, args, {}))
        return func(*args, **(kwargs or {}))


def defer_scores(adapter: Adapter, hooks: AttachedHooks) -> ExitStack:
    """Make all attention layers defer the scores of long prompts, until the result is closed.

    Layers in which a hook besides these reads the scores or the pattern compute them as before.
    """

    def deferring(points: Sequence[HookPoint], forward: Forward) -> Forward:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            inputs = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            n_tokens = next((value.shape[1] for value in inputs if value.ndim > 2), 0)
            if n_tokens < LONG or any(hooked(point, hooks.ids) for point in points):
                return forward(*args, **kwargs)
            with _Deferring(adapter.n_heads):
                return forward(*args, **kwargs)

        return run

    removed = ExitStack()
    for layer, block in enumerate(adapter.model.blocks):
        names = ("hook_attn_scores", "hook_pattern")
        points = [hook_point(adapter.model, f"blocks.{layer}.attn.{name}") for name in names]
        removed.callback(stand_in(block.attn, partial(deferring, points)))
    return removed
