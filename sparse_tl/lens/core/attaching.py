"""Hooks that persist until removed, run in a defined order, and leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack
from enum import Enum
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint, LensHandle

from sparse_tl.calls.scopes import scope
from sparse_tl.lens.core import modes
from sparse_tl.lens.core.adapter import Adapter
from sparse_tl.lens.core.places import HookFunction, Viewed
from sparse_tl.lens.core.points import HookedModel

Forward = Callable[..., Any]

OWN: set[int] = set()
"""The ids of all hooks that this package has attached and not yet removed."""


class Order(Enum):
    """When a hook runs relative to all other hooks of its point, whatever is registered later.

    Among several hooks with the same order, those attached earlier run earlier.

    Gates must read scores after all edits by user hooks, and must write patterns before any user
    hook reads them.
    """

    FIRST = "first"
    LAST = "last"


Hook = tuple[str, Order, HookFunction]
"""A name that `Adapter.place` accepts, when the function runs there, and the function."""


class AttachedHooks:
    """Hooks on a model that survive `reset_hooks()` and are removed by `remove()`.

    Args:
        adapter: adapter of the model.
        hooks: hooks whose functions take the activation and return its replacement, or None to keep
            it. At q, k, v and z they must return what they keep for gradients, since bridges pass
            views that nothing else reads. Bind hook point names by closure: the name that a hook
            receives differs between kinds of model.

    Raises:
        ValueError: the model lacks a hook point; nothing is attached then.
    """

    def __init__(self, adapter: Adapter, hooks: Sequence[Hook]) -> None:
        # Look up all places before attaching anything.
        places = [adapter.place(name) for name, _, _ in hooks]
        self._attached: list[tuple[HookPoint, LensHandle]] = []
        self._handles: list[RemovableHandle] = []
        try:
            self._attach_all(places, hooks)
        except BaseException:
            self.remove()
            raise

    def _attach_all(self, places: Sequence[Any], hooks: Sequence[Hook]) -> None:
        for place, (name, order, function) in zip(places, hooks, strict=True):
            if isinstance(place, Viewed):
                place, function = place.point, place.view(function)
            if isinstance(place, HookPoint):
                self._attach(place, name, order, function)
            else:
                self._handles += place(function)
        OWN.update(self.ids)

    def _attach(self, point: HookPoint, name: str, order: Order, function: HookFunction) -> None:
        def run(value: Tensor, *, hook: HookPoint) -> Tensor | None:
            if not (isinstance(value, Tensor) and value.is_floating_point()):  # some are tuples
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"expected activations at {name}, a tensor of floating-point numbers; the "
                    f"value there is of type {kind}. Choose another hook point"
                )
            return function(value)

        point.add_hook(run, is_permanent=True)  # type: ignore[bad-argument-type]
        handle = point.fwd_hooks[-1]
        self._attached.append((point, handle))
        # Pre-hooks run before the point's hooks are listed, so moving our entry there takes effect
        # in the same call. The last one to move is outermost: the earliest FIRST hook, the latest
        # LAST hook.
        ordering = point.register_forward_pre_hook(
            partial(_take_place, handle, order), prepend=order is Order.FIRST
        )
        self._handles.append(ordering)

    @property
    def ids(self) -> set[int]:
        """The ids by which torch knows these hooks."""
        return {handle.hook.id for _, handle in self._attached} | {h.id for h in self._handles}

    @property
    def in_place(self) -> bool:
        """Whether every hook is still registered (permanent hooks may have been reset)."""
        return bool(self._attached) and all(
            handle.hook.id in point._forward_hooks for point, handle in self._attached
        )

    def remove(self) -> None:
        """Remove these hooks only. Calling it again has no effect."""
        OWN.difference_update(self.ids)
        for point, handle in self._attached:
            handle.hook.remove()
            if handle in point.fwd_hooks:
                point.fwd_hooks.remove(handle)
        for handle in self._handles:
            handle.remove()
        self._attached, self._handles = [], []


def _take_place(handle: LensHandle, order: Order, point: HookPoint, _args: object) -> None:
    """Move a hook before or after all others of its point."""
    if handle.hook.id in point._forward_hooks:
        point._forward_hooks.move_to_end(handle.hook.id, last=order is Order.LAST)  # type: ignore[attr-defined]


def stand_in(module: nn.Module, make: Callable[[Forward], Forward]) -> Callable[[], None]:
    """Replace a module's `forward` by a function made from it, until the function is removed.

    Args:
        module: module that is called.
        make: takes the current `forward` and returns the function to run in its place.

    Returns:
        A function that restores the module's `forward`.
    """
    before = module.__dict__.get("forward")

    def remove() -> None:
        module.__dict__.pop("forward", None)
        if before is not None:
            module.__dict__["forward"] = before

    module.__dict__["forward"] = make(module.forward)  # bridges set attributes on what they wrap
    return remove


@scope
def own_forwards(model: nn.Module) -> Iterator[None]:
    """Inside the block, every module runs its class's own `forward`."""
    replaced = {
        module: module.__dict__["forward"]
        for module in model.modules()
        if "forward" in module.__dict__
    }
    try:
        for module in replaced:
            del module.__dict__["forward"]
        yield
    finally:
        for module, forward in replaced.items():
            module.__dict__["forward"] = forward


@scope
def attached(adapter: Adapter, hooks: Sequence[Hook]) -> Iterator[AttachedHooks]:
    """Attach hooks for the duration of a ``with`` block, and remove them even if it raises."""
    with modes.in_use(adapter.model):
        handles = AttachedHooks(adapter, hooks)
        try:
            yield handles
        finally:
            handles.remove()


@scope
def hooks_on(
    hooks: Sequence[tuple[nn.Module, Callable[..., Any]]], *, with_kwargs: bool = False
) -> Iterator[None]:
    """Inside the block, torch calls these functions after these modules."""
    with ExitStack() as handles:
        for module, hook in hooks:
            handle = module.register_forward_hook(hook, with_kwargs=with_kwargs)
            handles.enter_context(handle)
        yield


def hooks_besides(adapter: Adapter, known: Set[int]) -> frozenset[int]:
    """The ids of hooks on a model besides known ones and those of TransformerLens and transformers.

    Hooks of transformers record attentions and hidden states, and stay on a model once it has
    returned these.
    """
    found, seen, left = set[int](), set[int](), [adapter.core]
    while left:  # three times as fast as `modules()`, which matters in every pass
        module = left.pop()
        if id(module) not in seen:
            seen.add(id(module))
            for hooks in filter(None, (module._forward_hooks, module._forward_pre_hooks)):
                found.update(key for key, hook in hooks.items() if not _observes(hook))
            left += filter(None, module._modules.values())
    for block in adapter.model.blocks:
        found.difference_update(handle.id for handle in getattr(block, "_capture_hook_handles", ()))
    return frozenset(found - known)


def gate_hooks(adapter: Adapter) -> Set[int]:
    """The ids of the hooks of a `SparseTransformer` that wraps the model."""
    core: Any = adapter.core
    return getattr(core, "_sparse_tl_wrapped", frozenset())


def _observes(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith(("transformers.", modes.__name__))


@scope
def without_user_hooks(model: HookedModel) -> Iterator[None]:
    """Inside the block, hook points run only hooks attached in it; others are restored after it."""
    kept = [
        (point, point._forward_hooks, point._forward_pre_hooks)
        for point in model.hook_dict.values()
    ]
    try:
        for point, forward, before in kept:
            point._forward_hooks, point._forward_pre_hooks = type(forward)(), type(before)()
        yield
    finally:
        for point, forward, before in kept:
            point._forward_hooks, point._forward_pre_hooks = forward, before
