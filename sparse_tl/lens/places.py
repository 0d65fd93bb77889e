"""Attachment points other than TransformerLens hook points: before and after modules."""

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
    """A point that passes an activation to a function and uses what it returns."""

    def attach(self, function: HookFunction) -> list[RemovableHandle]:
        """Call the function in every pass until the handles are removed."""
        ...


@dataclass(frozen=True)
class Before:
    """The input of a module.

    Args:
        module: module that reads the input.
        first: whether the function runs before existing pre-hooks.
    """

    module: nn.Module
    first: bool = False

    def attach(self, function: HookFunction) -> list[RemovableHandle]:
        def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            # The view is read only by this module, and has a gradient of its own.
            shown = args[0].view_as(args[0])
            changed = function(shown)
            return (shown if changed is None else changed, *args[1:])

        return [self.module.register_forward_pre_hook(before, prepend=self.first)]


@dataclass(frozen=True)
class After:
    """The output of a module, for all its readers."""

    module: nn.Module

    def attach(self, function: HookFunction) -> list[RemovableHandle]:
        def after(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
            # Without normalisation the output is the input tensor itself.
            shown = output.view_as(output)
            changed = function(shown)
            return shown if changed is None else changed

        return [self.module.register_forward_hook(after)]


@dataclass(frozen=True)
class ReadInput:
    """The input of a module, shown after it has returned, once all edits are made.

    Args:
        module: module that is called.
    """

    module: nn.Module

    def attach(self, function: HookFunction) -> list[RemovableHandle]:
        def after(_module: nn.Module, args: tuple[Any, ...], _output: Tensor) -> None:
            function(args[0])

        return [self.module.register_forward_hook(after)]


@dataclass(frozen=True)
class CachedColumns:
    """The number of prompt columns in the key-value cache when a layer's attention is called.

    Args:
        attention: attention module.
        count: function from the module's keyword arguments to the number.
    """

    attention: nn.Module
    count: Callable[[dict[str, Any]], int]

    def attach(self, function: HookFunction) -> list[RemovableHandle]:
        def before(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            function(torch.tensor(self.count(kwargs)))

        return [self.attention.register_forward_pre_hook(before, with_kwargs=True)]


@dataclass(frozen=True)
class Written:
    """The value that heads write from if the sum of their outputs is normalised: z over the scale.

    With W_h and the norm's weight w, ``norm(sum z_h W_h) = sum (z_h / scale) W_h w``. The scale is
    taken from the run itself, so the write is linear in this value, as in z without such a norm.

    Args:
        projection: module that reads the concatenated z of all heads.
        norm: norm of the projection's output.
        n_heads: number of heads in the layer.
        scale: function from the norm's input to its scale.
        write: function from ``z / scale`` to what is added to the residual stream.
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
