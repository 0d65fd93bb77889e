"""Attachment points other than TransformerLens hook points: before and after modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparse_tl.scopes import scope

HookFunction = Callable[[Any], Any]
"""Takes an activation, or what else a place shows, and returns its replacement or None."""
Place = Callable[[HookFunction], list[RemovableHandle]]
"""Lets a function read or replace an activation in every pass, until the handles are removed."""


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


@scope
def entered(point: nn.Module, rows: Tensor) -> Iterator[None]:
    """Inside the block, a residual stream replaces what enters a hook point, before its hooks.

    Args:
        point: hook point at the input of the first layer that runs.
        rows: the residual stream; or tokens, which replace nothing.
    """
    (handle,) = before(point, lambda value: rows if rows.is_floating_point() else None)
    with handle:
        yield


def read_input(module: nn.Module, function: HookFunction) -> list[RemovableHandle]:
    """Show the input of a module after it has returned, once all edits are made."""

    def show(_module: nn.Module, args: tuple[Any, ...], _output: Tensor) -> None:
        function(args[0])

    return [module.register_forward_hook(show)]


def read_call(
    modules: Sequence[nn.Module], read: Callable[[dict[str, Any]], Any], function: HookFunction
) -> list[RemovableHandle]:
    """Show something that follows from the keyword arguments that a module is called with.

    Args:
        modules: module that is called, such as a layer's attention, or several of which each may
            be skipped.
        read: function from the keyword arguments to what is shown.
        function: function to attach.
    """

    def show(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        function(read(kwargs))

    return [module.register_forward_pre_hook(show, with_kwargs=True) for module in modules]
