"""Hooks that stay until they are taken off, run in a stated order, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint, LensHandle

from sparse_tl.lens.places import HookFunction
from sparse_tl.lens.points import HookedModel

if TYPE_CHECKING:
    from sparse_tl.lens.adapter import Adapter


class Order(Enum):
    """When a hook runs among all hooks of its point, whatever is registered before or after.

    Of several that are to be first, or last, the one that was attached earlier runs earlier.

    A gate must read the scores after every edit by a user's hooks, and must write the pattern
    before any of them reads it.
    """

    FIRST = "first"
    LAST = "last"


class AttachedHooks:
    """Hooks on a model that survive `reset_hooks()` and come off with `remove()`, exactly once.

    Args:
        adapter: of the model that is hooked.
        hooks: (hook point, order, function), by the names that `Adapter.place` knows. The function
            takes the activation and returns its replacement, or None to leave it. At q, k, v and z
            it returns what it keeps where gradients are wanted there: bridges show views that
            nothing else reads. Names are bound by closure: what a hook is told about its own name
            differs between kinds of model.

    Raises:
        ValueError: the model lacks a hook point; nothing is attached then.
    """

    def __init__(self, adapter: Adapter, hooks: Sequence[tuple[str, Order, HookFunction]]) -> None:
        # All of them are looked up before anything is attached.
        places = [adapter.place(name) for name, _, _ in hooks]
        self._attached: list[tuple[HookPoint, LensHandle]] = []
        self._handles: list[RemovableHandle] = []
        for place, (_, order, function) in zip(places, hooks, strict=True):
            if isinstance(place, HookPoint):
                self._attach(place, order, function)
            else:
                self._handles += place.attach(function)

    def _attach(self, point: HookPoint, order: Order, function: HookFunction) -> None:
        point.add_hook(lambda tensor, *, hook: function(tensor), is_permanent=True)
        handle = point.fwd_hooks[-1]
        self._attached.append((point, handle))
        # Pre-hooks run before the hooks of the point are listed, so moving our own entry there
        # settles its place for that very call.
        # Whoever moves last stands outermost: the earliest of the first, the latest of the last.
        ordering = point.register_forward_pre_hook(
            partial(_take_place, handle, order), prepend=order is Order.FIRST
        )
        self._handles.append(ordering)

    @property
    def in_place(self) -> bool:
        """Whether every hook is still registered (somebody may have reset permanent hooks)."""
        return bool(self._attached) and all(
            handle.hook.id in point._forward_hooks for point, handle in self._attached
        )

    def remove(self) -> None:
        """Take the hooks off; hooks of others stay. Calling it again does nothing."""
        for point, handle in self._attached:
            handle.hook.remove()
            if handle in point.fwd_hooks:
                point.fwd_hooks.remove(handle)
        for handle in self._handles:
            handle.remove()
        self._attached, self._handles = [], []


def _take_place(handle: LensHandle, order: Order, point: HookPoint, _args: object) -> None:
    """Move a hook before or behind all others of its point."""
    if handle.hook.id in point._forward_hooks:
        point._forward_hooks.move_to_end(handle.hook.id, last=order is Order.LAST)  # type: ignore[attr-defined]


@contextmanager
def attached(adapter: Adapter, hooks: Sequence[tuple[str, Order, HookFunction]]) -> Iterator[None]:
    """Hooks for the length of a ``with`` block; they come off also after an exception."""
    handles = AttachedHooks(adapter, hooks)
    try:
        yield
    finally:
        handles.remove()


@contextmanager
def others_off(model: HookedModel) -> Iterator[None]:
    """Inside the block only hooks that are attached there run; the others are back after it."""
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
