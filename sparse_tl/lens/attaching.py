"""Hooks that stay until they are taken off, run in a stated order, and leave nothing behind.

TransformerLens runs the hooks of a point in the order of registration. A gate needs more: it must
read the scores *after* every edit by a user's hooks, and must write the pattern *before* any of
them reads it. `Order` says which; it holds whatever is registered before or after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial

from torch import Tensor
from transformer_lens.hook_points import HookPoint, LensHandle

from sparse_tl.lens.points import HookedModel, hook_point

HookFunction = Callable[[Tensor], Tensor | None]


class Order(Enum):
    """When a hook runs among all hooks of its point."""

    FIRST = "first"
    LAST = "last"


class AttachedHooks:
    """Hooks on a model that survive `reset_hooks()` and come off with `remove()`, exactly once.

    Args:
        model: the model that is hooked.
        hooks: (hook point, order, function); the function takes the activation and returns its
            replacement, or None to leave it. Names are bound by closure: what a hook is told
            about its own name differs between kinds of model.

    Raises:
        ValueError: the model lacks a hook point; nothing is attached then.
    """

    def __init__(
        self, model: HookedModel, hooks: Sequence[tuple[str, Order, HookFunction]]
    ) -> None:
        # All of them are looked up before anything is attached.
        points = [hook_point(model, name) for name, _, _ in hooks]
        self._attached: list[tuple[HookPoint, LensHandle, Callable[[], None]]] = [
            self._attach(point, order, function)
            for point, (_, order, function) in zip(points, hooks, strict=True)
        ]

    @staticmethod
    def _attach(
        point: HookPoint, order: Order, function: HookFunction
    ) -> tuple[HookPoint, LensHandle, Callable[[], None]]:
        point.add_hook(lambda tensor, *, hook: function(tensor), is_permanent=True)
        handle = point.fwd_hooks[-1]
        # Pre-hooks run before the hooks of the point are listed, so moving our own entry there
        # settles its place for that very call.
        ordering = point.register_forward_pre_hook(partial(_take_place, handle, order))
        return point, handle, ordering.remove

    @property
    def in_place(self) -> bool:
        """Whether every hook is still registered (somebody may have reset permanent hooks)."""
        return bool(self._attached) and all(
            handle.hook.id in point._forward_hooks for point, handle, _ in self._attached
        )

    def remove(self) -> None:
        """Take the hooks off; hooks of others stay. Calling it again does nothing."""
        for point, handle, remove_ordering in self._attached:
            handle.hook.remove()
            if handle in point.fwd_hooks:
                point.fwd_hooks.remove(handle)
            remove_ordering()
        self._attached = []


def _take_place(handle: LensHandle, order: Order, point: HookPoint, _args: object) -> None:
    """Move a hook before or behind all others of its point."""
    if handle.hook.id in point._forward_hooks:
        point._forward_hooks.move_to_end(handle.hook.id, last=order is Order.LAST)  # type: ignore[attr-defined]


@contextmanager
def attached(
    model: HookedModel, hooks: Sequence[tuple[str, Order, HookFunction]]
) -> Iterator[AttachedHooks]:
    """Hooks for the length of a ``with`` block; they come off also after an exception."""
    handles = AttachedHooks(model, hooks)
    try:
        yield handles
    finally:
        handles.remove()
