"""Functions that run before, after or in place of a module, where there is no hook point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint

Forward = Callable[..., Any]
"""The `forward` of a module."""
HookFunction = Callable[[Any], Any]
"""Function from an activation, or another value, to its replacement, or None to keep it."""
Place = Callable[[HookFunction], list[RemovableHandle]]
"""Attaches a function to an activation of every pass, until the returned handles are removed."""


@dataclass(frozen=True)
class Viewed:
    """A hook point where functions see the activation in another shape.

    `view` turns a function of the activation in that shape into one of the activation itself.
    """

    point: HookPoint
    view: Callable[[HookFunction], HookFunction]


def before(
    module: nn.Module, function: HookFunction, *, first: bool = False
) -> list[RemovableHandle]:
    """Attach to the input of a module; if `first`, before its existing pre-hooks."""

    def replaced(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # Only this module reads the view, so the view has its own gradient.
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


def between(
    first: nn.Module,
    last: nn.Module,
    shown: Callable[[Tensor, Tensor], Tensor],
    write: Callable[[Tensor], Tensor],
    function: HookFunction,
) -> list[RemovableHandle]:
    """Attach to a value that is made from two modules' inputs and determines the last one's output.

    `shown` makes the value from both inputs; `write` makes the output from a changed value.
    """
    kept: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple[Any, ...]) -> None:
        kept.append(args[0])

    def replaced(_module: nn.Module, args: tuple[Any, ...], _output: Tensor) -> Tensor | None:
        value = shown(kept.pop(), args[0])
        changed = function(value)
        return None if changed is None or changed is value else write(changed)

    return [first.register_forward_pre_hook(keep), last.register_forward_hook(replaced)]


def before_branch(
    point: nn.Module, end: nn.Module, function: HookFunction
) -> list[RemovableHandle]:
    """Attach to the residual stream at a hook point that feeds only one of its branches.

    A change of the stream is also added at `end`, where the branch has been added to the stream.
    The function runs before all other hooks.
    """
    change: Tensor | None = None

    def edit(_module: nn.Module, _args: tuple[Any, ...], value: Tensor) -> Tensor | None:
        nonlocal change
        changed = function(value)
        change = None if changed is None or changed is value else changed - value
        return changed

    def add(_module: nn.Module, _args: tuple[Any, ...], stream: Tensor) -> Tensor | None:
        nonlocal change
        added, change = change, None
        return None if added is None else stream + added

    hooks = (point, edit), (end, add)
    return [place.register_forward_hook(hook, prepend=True) for place, hook in hooks]


def read_input(module: nn.Module, function: HookFunction) -> list[RemovableHandle]:
    """Show a module's input after all edits, once the module has returned."""

    def show(_module: nn.Module, args: tuple[Any, ...], _output: Tensor) -> None:
        function(args[0])

    return [module.register_forward_hook(show)]


def read_call(
    modules: Sequence[nn.Module], read: Callable[[dict[str, Any]], Any], function: HookFunction
) -> list[RemovableHandle]:
    """Show what `read` derives from the keyword arguments with which these modules are called."""

    def show(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        function(read(kwargs))

    return [module.register_forward_pre_hook(show, with_kwargs=True) for module in modules]


@contextmanager
def hooks_on(
    hooks: Sequence[tuple[nn.Module, Callable[..., Any]]], *, with_kwargs: bool = False
) -> Iterator[None]:
    """Inside the block, torch calls these functions after these modules."""
    with ExitStack() as handles:
        for module, hook in hooks:
            handle = module.register_forward_hook(hook, with_kwargs=with_kwargs)
            handles.enter_context(handle)
        yield


def hooked(module: nn.Module, own: Set[int] = frozenset()) -> bool:
    """Whether a module has hooks other than those in `own`."""
    kinds = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks.keys() - own for hooks in kinds if hooks)


def stand_in(module: nn.Module, make: Callable[[Forward], Forward]) -> Callable[[], None]:
    """Replace a module's `forward` by what `make` makes of it, until the result is called."""
    before = module.__dict__.get("forward")

    def remove() -> None:
        module.__dict__.pop("forward", None)
        if before is not None:
            module.__dict__["forward"] = before

    module.__dict__["forward"] = make(module.forward)  # bridges set attributes on what they wrap
    return remove
