"""Where functions go that have no hook point of TransformerLens: before and after modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

HookFunction = Callable[[Tensor], Tensor | None]


@runtime_checkable
class Place(Protocol):
    """Something that shows a function an activation, and takes what it returns instead."""

    def attach(self, function: HookFunction) -> list[RemovableHandle]:
        """Call the function in every pass, until the handles are removed."""
        ...


@dataclass(frozen=True)
class Before:
    """What a module reads.

    Args:
        module: that reads it.
        first: whether the function runs before those that are there already.
    """

    module: nn.Module
    first: bool = False

    def attach(self, function: HookFunction) -> list[RemovableHandle]:
        def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            # A view has the module as its only reader, and a gradient of its own.
            shown = args[0].view_as(args[0])
            changed = function(shown)
            return (shown if changed is None else changed, *args[1:])

        return [self.module.register_forward_pre_hook(before, prepend=self.first)]


@dataclass(frozen=True)
class After:
    """What a module returns, for readers that all come by it."""

    module: nn.Module

    def attach(self, function: HookFunction) -> list[RemovableHandle]:
        def after(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
            # Without normalisation the output is the input itself.
            shown = output.view_as(output)
            changed = function(shown)
            return shown if changed is None else changed

        return [self.module.register_forward_hook(after)]


@dataclass(frozen=True)
class Given:
    """What a module was called with, shown once it has returned: all edits of it are made.

    Args:
        module: that was called.
    """

    module: nn.Module

    def attach(self, function: HookFunction) -> list[RemovableHandle]:
        def after(_module: nn.Module, args: tuple[Any, ...], _output: Tensor) -> None:
            function(args[0])

        return [self.module.register_forward_hook(after)]


@dataclass(frozen=True)
class CachedColumns:
    """How many columns of the prompts a key-value cache holds before a layer's attention is called.

    Args:
        attention: the module that is called.
        count: the number, from what it is called with by name.
    """

    attention: nn.Module
    count: Callable[[dict[str, Any]], int]

    def attach(self, function: HookFunction) -> list[RemovableHandle]:
        def before(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            function(torch.tensor(self.count(kwargs)))

        return [self.attention.register_forward_pre_hook(before, with_kwargs=True)]


@dataclass(frozen=True)
class Written:
    """What heads write with where the sum of their outputs is normalised: z over the scale.

    With W_h and the norm's weight w, ``norm(sum z_h W_h) = sum (z_h / scale) W_h w``. The scale is
    that of the very run, so that this is linear between runs, as z is without such a norm.

    Args:
        projection: the module that reads all heads' z, one after the other.
        norm: of what it returns.
        n_heads: of the layer.
        scale: the norm's, of an input.
        write: what is added to the residual stream for ``z / scale``.
    """

    projection: nn.Module
    norm: nn.Module
    n_heads: int
    scale: Callable[[Float[Tensor, "batch pos d_model"]], Float[Tensor, "batch pos 1"]]
    write: Callable[[Float[Tensor, "batch pos head d_head"]], Float[Tensor, "batch pos d_model"]]

    def attach(self, function: HookFunction) -> list[RemovableHandle]:
        kept: list[Tensor] = []

        def keep(_module: nn.Module, args: tuple[Any, ...]) -> None:
            kept.append(args[0])

        def show(_module: nn.Module, args: tuple[Any, ...], _output: Tensor) -> Tensor | None:
            z = kept.pop().unflatten(-1, (self.n_heads, -1))
            shown = (z / self.scale(args[0])[..., None]).to(z.dtype)
            changed = function(shown)
            return None if changed is None or changed is shown else self.write(changed)

        return [
            self.projection.register_forward_pre_hook(keep),
            self.norm.register_forward_hook(show),
        ]
