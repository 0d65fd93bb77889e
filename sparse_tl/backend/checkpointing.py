"""Training with less memory: the backward pass recomputes the activations within each layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from itertools import chain, repeat
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import Cache, DynamicCache

from sparse_tl.backend.core.numerics import HALVES
from sparse_tl.backend.core.places import Forward, stand_in
from sparse_tl.backend.core.points import HookedModel
from sparse_tl.backend.models import adapt
from sparse_tl.calls.arguments import checked


@checked
@contextmanager
def checkpointed_activations(model: HookedModel) -> Iterator[None]:
    """Inside the block, a training pass keeps only the input of each layer.

    The backward pass recomputes everything else, with the same gate noise: a step takes about a
    third more time, and holds the activations of one layer instead of all. Gradients do not change.
    No key-value cache outlives a layer, since a layer that runs twice would fill it twice.

    Args:
        model: model to train, under gates or not.

    Reference: Chen et al., arXiv 1604.06174; `torch.utils.checkpoint`.
    """
    with ExitStack() as removed:
        adapter = adapt(model)
        for block in adapter.model.blocks:
            removed.callback(stand_in(block, partial(_run_twice, adapter.core)))
        yield


@contextmanager
def all_activations(model: HookedModel) -> Iterator[None]:
    """Inside the block, passes keep all activations, even within `checkpointed_activations`."""
    with ExitStack() as removed:
        for block in adapt(model).model.blocks:
            removed.callback(stand_in(block, _run_once))
        yield


def _run_once(forward: Forward) -> Forward:
    return _run_once(_twice[forward]) if forward in _twice else forward


_twice: WeakKeyDictionary[Forward, Forward] = WeakKeyDictionary()
"""Each layer's original `forward`, by the function that runs it twice."""


def _run_twice(core: Any, forward: Forward) -> Forward:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        gates_as_now = getattr(core, "_sparse_tl_again", lambda: nullcontext)()
        runs = chain([nullcontext], repeat(gates_as_now))

        def in_turn(*args: Any, **kwargs: Any) -> Any:
            with next(runs)():
                return once(*args, **kwargs)

        return checkpoint(in_turn, *args, use_reentrant=False, **kwargs)

    def once(*args: Any, **kwargs: Any) -> Any:
        # Some half-precision models only run with a cache: see `BridgeAdapter._final`.
        half = any(isinstance(x, Tensor) and x.dtype in HALVES for x in args)
        cache = DynamicCache() if half else None
        given = {name: _with(cache, value) for name, value in kwargs.items()}
        return forward(*(_with(cache, value) for value in args), **given)

    _twice[run] = forward
    return run


def _with(cache: Cache | None, value: Any) -> Any:
    """`cache` if the value is a cache, otherwise the value."""
    return cache if isinstance(value, Cache) else value
