"""Hooks that run in a defined order and leave no trace, and passes that record by them.

Hooks, modes and gates sit on the model itself, so the passes of two threads would take part in one
another. A model that another thread uses is refused. Waiting would be no better: two threads gain
nothing on one model, and a thread that waits for a pool of others inside a block would wait for
ever. Analyses use models in evaluation mode, since dropout would be mistaken for an effect.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from enum import Enum
from functools import partial, wraps
from threading import RLock, get_ident
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint, LensHandle

from sparse_tl.backend.attention import AttentionMask
from sparse_tl.backend.hook_points import EMBEDDED, HookedModel, HookFunction, Model, Viewed, hooked
from sparse_tl.backend.interface import Adapter
from sparse_tl.backend.numerics import excess
from sparse_tl.contexts import autograd

P = ParamSpec("P")
Value = TypeVar("Value")

OWN: set[int] = set()
"""The ids of all hooks that this package has attached and not yet removed."""


class Order(Enum):
    """When a hook runs relative to all other hooks of its point, whatever is registered later.

    Of several with the same order, those attached earlier run earlier. Gates must read scores after
    all edits by user hooks, and must write patterns before any user hook reads them.
    """

    FIRST = "first"
    LAST = "last"


Hook = tuple[str, Order, HookFunction]
"""A name that `Adapter.place` accepts, when the function runs there, and the function."""


class AttachedHooks:
    """Hooks on a model that survive `reset_hooks()` and are removed by `remove()`.

    Their functions take the activation and return its replacement, or None to keep it. At q, k, v
    and z they must return what they keep for gradients, since bridges pass views that nothing else
    reads.
    """

    def __init__(self, adapter: Adapter, hooks: Sequence[Hook]) -> None:
        places = [adapter.place(name) for name, _, _ in hooks]  # all, before any is attached
        self._attached: list[tuple[HookPoint, LensHandle]] = []
        self._handles: list[RemovableHandle] = []
        for place, (_, order, function) in zip(places, hooks, strict=True):
            if isinstance(place, Viewed):
                place, function = place.point, place.view(function)
            if isinstance(place, HookPoint):
                self._attach(place, order, function)
            else:
                self._handles += place(function)
        OWN.update(self.ids)

    def _attach(self, point: HookPoint, order: Order, function: HookFunction) -> None:
        def run(value: Any, *, hook: HookPoint) -> Tensor | None:
            return function(value)

        def take_place(_point: nn.Module, _args: object) -> None:
            if handle.hook.id in point._forward_hooks:
                point._forward_hooks.move_to_end(handle.hook.id, last=order is Order.LAST)  # type: ignore[attr-defined]

        point.add_hook(run, is_permanent=True)  # type: ignore[bad-argument-type]
        handle = point.fwd_hooks[-1]
        self._attached.append((point, handle))
        # Pre-hooks run before the point's hooks are listed, so moving our entry there takes effect
        # in the same call. The last one to move is outermost: the earliest FIRST hook, the latest
        # LAST hook.
        self._handles.append(
            point.register_forward_pre_hook(take_place, prepend=order is Order.FIRST)
        )

    @property
    def ids(self) -> set[int]:
        """The ids by which torch knows these hooks."""
        return {handle.hook.id for _, handle in self._attached} | {h.id for h in self._handles}

    @property
    def in_place(self) -> bool:
        """Whether every hook is still registered (permanent hooks may have been reset)."""
        return all(handle.hook.id in point._forward_hooks for point, handle in self._attached)

    def remove(self) -> None:
        """Remove these hooks only."""
        OWN.difference_update(self.ids)
        for point, handle in self._attached:
            handle.hook.remove()
            if handle in point.fwd_hooks:
                point.fwd_hooks.remove(handle)
        for handle in self._handles:
            handle.remove()


@contextmanager
def attached(adapter: Adapter, hooks: Sequence[Hook]) -> Iterator[AttachedHooks]:
    """Attach hooks for the duration of a ``with`` block, and remove them even if it raises."""
    with in_use(adapter.model):
        handles = AttachedHooks(adapter, hooks)
        try:
            yield handles
        finally:
            handles.remove()


def hooks_besides(adapter: Adapter, known: Set[int]) -> frozenset[int]:
    """The ids of hooks on a model besides known ones and those of TransformerLens and transformers.

    Hooks of transformers record attentions and hidden states, and stay on a model once it has
    returned these.
    """
    others = ("transformers.", f"{__name__}.in_use.")
    found = {
        key
        for module in adapter.core.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for key, hook in hooks.items()
        if not _named(hook).startswith(others)
    }
    for block in adapter.model.blocks:
        found.difference_update(handle.id for handle in getattr(block, "_capture_hook_handles", ()))
    return frozenset(found - known)


def _named(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"


def gate_hooks(adapter: Adapter) -> Set[int]:
    """The ids of the hooks of a `SparseTransformer` that wraps the model."""
    core: Any = adapter.core
    return getattr(core, "_sparse_tl_wrapped", frozenset())


@contextmanager
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


@runtime_checkable
class Activations(Protocol):
    """Values by hook point name: a dictionary, or TransformerLens's cache."""

    def __getitem__(self, name: str, /) -> Tensor: ...

    def __iter__(self) -> Iterator[str]: ...

    def keys(self) -> Iterable[str]: ...


def record(
    adapter: Adapter,
    tokens: Int[Tensor, "batch pos"],
    names: Sequence[str],
    *,
    first: Sequence[str] = (),
    replaced: Activations | None = None,
    differentiable: bool = False,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    copies: int = 1,
) -> tuple[dict[str, Tensor], Float[Tensor, "rows pos d_model"]]:
    """Activations at some hook points, and the final residual stream.

    Those in `first` are recorded, or replaced, before other hooks at the same point run; all others
    after them. If `differentiable`, the autograd graph is kept from the replaced values or the
    input node on; these are leaves, so weights may be frozen and nothing earlier needs a gradient.
    """
    kept: dict[str, Tensor] = {}
    changed = {} if replaced is None else {name: replaced[name] for name in replaced}

    def keep(name: str, value: Tensor) -> Tensor:
        value = changed.get(name, value)
        if differentiable and (name in changed or name == EMBEDDED):
            value = value.detach().requires_grad_()
        kept[name] = value
        # Returned even if unchanged: some models pass a view that nothing else reads.
        return value.clone() if name in edited else value

    every = dict.fromkeys([*names, *changed, *([EMBEDDED] if differentiable else [])])
    places = {name: adapter.place(name) for name in first}
    # Hooks may edit in place.
    edited = {name for name, at in places.items() if isinstance(at, nn.Module) and hooked(at)}
    hooks: list[Hook] = [
        (name, Order.FIRST if name in places else Order.LAST, partial(keep, name)) for name in every
    ]
    with attached(adapter, hooks), autograd(differentiable):
        final = adapter.final(tokens, copies=copies, attention_mask=attention_mask)
    check_fired(adapter, names, kept)
    return kept, final


def check_fired(adapter: Adapter, names: Sequence[str], kept: Container[str]) -> None:
    """Raise a ValueError if a hook point has not fired in a pass."""
    silent = [name for name in names if name not in kept]
    if silent:
        raise ValueError(
            f"{silent[0]} never fires in {adapter.name!r}, which computes it by other means: its "
            "parts cannot be told apart"
        )


def mask_hooks(adapter: Adapter, masks: dict[int, AttentionMask]) -> list[Hook]:
    """Hooks that store the mask of every layer's attention in a dictionary, by layer."""
    return [
        (f"blocks.{layer}.attn.mask", Order.FIRST, partial(masks.__setitem__, layer))
        for layer in range(adapter.n_layers)
    ]


@torch.no_grad()
def source_outputs(
    adapter: Adapter, values: Activations
) -> Float[Tensor, "source batch pos d_model"]:
    """Each source's contribution to the residual stream, in the graph's order.

    Biases of ``W_O`` belong to no head and cancel in differences; so do biases of MLPs.
    """
    graph = adapter.graph
    embedded = values[EMBEDDED]
    batch, pos, d_model = embedded.shape
    out = embedded.new_empty(len(graph.sources), batch, pos, d_model)
    out[0] = embedded
    for layer in range(adapter.n_layers):
        first = graph.source_index(f"a{layer}.h0")
        z = values[adapter.heads_point(layer)].to(out.dtype)
        adapter.heads_written(layer, z, out=out[first : first + graph.n_heads])
        if graph.has_mlps:
            out[graph.source_index(f"m{layer}")] = values[f"blocks.{layer}.hook_mlp_out"]
    return out


_enters: WeakKeyDictionary[Model, bool] = WeakKeyDictionary()


@torch.no_grad()
def enters(adapter: Adapter) -> bool:
    """Whether a pass from a later layer on ends like a full pass; tested once per model.

    A layer that needs more from earlier ones than the residual stream, such as their choice of
    keys, cannot be entered this way.
    """
    model = adapter.model
    if model not in _enters:
        last = f"blocks.{adapter.n_layers - 1}.entering"
        tokens = torch.arange(min(3, adapter.n_ctx, adapter.d_vocab), device=adapter.device)[None]
        with without_user_hooks(model):
            kept, final = record(adapter, tokens, [last])
            try:
                found = adapter.final(kept[last], from_layer=adapter.n_layers - 1)
                size = final.abs().amax(dim=-1, keepdim=True)
                _enters[model] = excess(adapter.dtype, final, found, size) is None
            except Exception:  # a layer that lacks an input may raise anything
                _enters[model] = False
    return _enters[model]


# ---- by one thread at a time, in evaluation mode -------------------------------------------------

_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_evaluated: list[nn.Module] = []
"""Models that are in evaluation mode until a block ends."""


def _core(model: Any) -> nn.Module:
    """The module that all wrappers around the same model share."""
    inner = model.model if hasattr(model, "model_under_gates") else model
    return getattr(inner, "original_model", inner)


@contextmanager
def in_use(model: Any) -> Iterator[None]:
    """Inside the block, other threads cannot call a model, with this package or without it."""
    core, here = _core(model), get_ident()
    lock = _locks.setdefault(core, RLock())
    refusal = RuntimeError(
        "another thread is using this model, whose hooks would act in both. Call it from one "
        "thread at a time, or load it once for each thread"
    )

    def refuse_others(module: nn.Module, _args: Any) -> None:
        if module is core and get_ident() != here:  # a copy of the model is free
            raise refusal

    if not lock.acquire(blocking=False):
        raise refusal
    try:
        with core.register_forward_pre_hook(refuse_others, prepend=True):
            if _called_elsewhere(core, model):
                raise refusal
            yield
    finally:
        lock.release()


def _called_elsewhere(*modules: Any) -> bool:
    """Whether another thread is inside a call of one of these modules."""
    for thread, frame in sys._current_frames().items():
        while thread != get_ident() and frame is not None:
            named = frame.f_code.co_varnames[:1] == ("self",)
            if named and any(frame.f_locals.get("self") is module for module in modules):
                return True
            frame = frame.f_back
    return False


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Use a model in evaluation mode inside the block; then restore each of its modules' mode."""
    core = _core(model)
    with in_use(model):
        if any(core is held for held in _evaluated):
            yield
            return
        # A bridge does not list all modules of the model that it wraps, such as GPT-2's first
        # dropout; that model lists all modules of the bridge but the bridge itself.
        training = [module for module in (model, *core.modules()) if module.training]
        _evaluated.append(core)
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True
            _evaluated.remove(core)


def in_evaluation_mode(function: Callable[P, Value]) -> Callable[P, Value]:
    """Decorate an analysis to run its first argument, the model, in evaluation mode."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Value:
        with evaluation_mode(args[0] if args else kwargs["model"]):
            return function(*args, **kwargs)

    return run


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Inside the block, weights get no gradients, so passes keep nothing for them."""
    training = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in training:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in training:
            weight.requires_grad_(True)
