"""Training with less memory: activations within a layer are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.checkpoint import checkpoint
from transformers import Cache

from sparse_tl.arguments import checked
from sparse_tl.lens.adapting import adapt
from sparse_tl.lens.attaching import Forward, stand_in
from sparse_tl.lens.points import HookedModel
from sparse_tl.scopes import scope


@checked
@scope
def checkpointed_activations(model: HookedModel) -> Iterator[None]:
    """Inside the block, a training pass keeps only the input of each layer.

    Everything else is recomputed in the backward pass, with the same gate noise: about a third more
    time, for the activations of one layer instead of all. Gradients do not change. Key-value caches
    are off, since a layer that runs twice would fill them twice.

    Args:
        model: model to train, under gates or not.

    Reference: Chen et al., arXiv 1604.06174; `torch.utils.checkpoint`.
    """
    with ExitStack() as removed:
        for block in adapt(model).model.blocks:
            removed.callback(stand_in(block, _run_twice))
        yield


@scope
def all_activations(model: HookedModel) -> Iterator[None]:
    """Inside the block, passes keep everything, even within `checkpointed_activations`."""
    with ExitStack() as removed:
        for block in adapt(model).model.blocks:
            removed.callback(stand_in(block, _run_once))
        yield


def _run_once(forward: Forward) -> Forward:
    return _run_once(_twice[forward]) if forward in _twice else forward


_twice: WeakKeyDictionary[Forward, Forward] = WeakKeyDictionary()
"""For functions that run a layer twice, what they run."""


def _run_twice(forward: Forward) -> Forward:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kwargs = {name: _unless_cache(value) for name, value in kwargs.items()}
        return checkpoint(forward, *map(_unless_cache, args), use_reentrant=False, **kwargs)

    _twice[run] = forward
    return run


def _unless_cache(value: Any) -> Any:
    return None if isinstance(value, Cache) else value
