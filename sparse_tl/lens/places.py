"""Attachment points other than TransformerLens hook points: before and after modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

HookFunction = Callable[[Tensor], Tensor | None]
Place = Callable[[HookFunction], list[RemovableHandle]]
"""Lets a function replace an activation in every pass, until the handles are removed."""


def before(
    module: nn.Module, function: HookFunction, *, first: bool = False
) -> list[RemovableHandle]:
    """Attach to the input of a module; if `first`, before its existing pre-hooks."""

    def replaced(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # The view is read only by this module, and has a gradient of its own.
        shown = args[0].view_as(args[0])
        changed = function(shown)
        return (shown if changed is None else changed, *args[1:])

    return [module.register_forward_pre_hook(replaced, prepend=first)]


def after(module: nn.Module, function: HookFunction) -> list[RemovableHandle]:
    """Attach to the output of a module, for all its readers."""

    def replaced(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        # Without normalisation the output is the input tensor itself.
        shown = output.view_as(output)
        changed = function(shown)
        return shown if changed is None else changed

    return [module.register_forward_hook(replaced)]


def read_input(module: nn.Module, function: HookFunction) -> list[RemovableHandle]:
    """Show the input of a module after it has returned, once all edits are made."""

    def show(_module: nn.Module, args: tuple[Any, ...], _output: Tensor) -> None:
        function(args[0])

    return [module.register_forward_hook(show)]


def columns_in_cache(
    attention: nn.Module, count: Callable[[dict[str, Any]], int], function: HookFunction
) -> list[RemovableHandle]:
    """Show the number of prompt columns in the key-value cache when attention is called.

    Args:
        attention: a layer's attention.
        count: function from its keyword arguments to the number.
        function: function to attach.
    """

    def show(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        function(torch.tensor(count(kwargs)))

    return [attention.register_forward_pre_hook(show, with_kwargs=True)]


def written(
    projection: nn.Module,
    norm: nn.Module,
    n_heads: int,
    scale: Callable[[Float[Tensor, "batch pos d_model"]], Float[Tensor, "batch pos 1"]],
    write: Callable[[Float[Tensor, "batch pos head d_head"]], Float[Tensor, "batch pos d_model"]],
    function: HookFunction,
) -> list[RemovableHandle]:
    """Attach to what heads write from if the sum of their outputs is normalised: z over the scale.

    With W_h and the norm's weight w, ``norm(sum z_h W_h) = sum (z_h / scale) W_h w``. The scale is
    taken from the run itself, so the write is linear in this value, as in z without such a norm.

    Args:
        projection: module that reads the concatenated z of all heads.
        norm: norm of the projection's output.
        n_heads: number of heads in the layer.
        scale: function from the norm's input to its scale.
        write: function from ``z / scale`` to what is added to the residual stream.
        function: function to attach.
    """
    kept: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple[Any, ...]) -> None:
        kept.append(args[0])

    def replaced(_module: nn.Module, args: tuple[Any, ...], _output: Tensor) -> Tensor | None:
        z = kept.pop().unflatten(-1, (n_heads, -1))
        shown = (z / scale(args[0])[..., None]).to(z.dtype)
        changed = function(shown)
        return None if changed is None or changed is shown else write(changed)

    return [projection.register_forward_pre_hook(keep), norm.register_forward_hook(replaced)]
