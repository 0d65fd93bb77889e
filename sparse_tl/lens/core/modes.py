"""Run models in evaluation mode for analyses: dropout would be mistaken for an effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import nn

from sparse_tl.calls.scopes import scope

P = ParamSpec("P")
Value = TypeVar("Value")

_held: list[nn.Module] = []
"""Models that are in evaluation mode until a block ends."""


@scope
def evaluation_mode(model: Any) -> Iterator[None]:
    """Run the block with a model in evaluation mode, then restore the mode of each of its modules.

    Args:
        model: a TransformerLens model, or a SparseTransformer around one.
    """
    core = getattr(model, "original_model", model)
    if any(core is held for held in _held):
        yield
        return
    # A bridge does not list all modules of the model that it wraps, such as GPT-2's first dropout;
    # that model lists all modules of the bridge but the bridge itself.
    training = [module for module in (model, *core.modules()) if module.training]
    _held.append(core)
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
        _held.remove(core)


def in_evaluation_mode(function: Callable[P, Value]) -> Callable[P, Value]:
    """Decorate an analysis to run its first argument, the model, in evaluation mode."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Value:
        with evaluation_mode(args[0] if args else kwargs["model"]):
            return function(*args, **kwargs)

    return run


@scope
def frozen(model: nn.Module) -> Iterator[None]:
    """Inside the block, weights get no gradients, so passes keep nothing for them.

    Args:
        model: the module that has the weights, such as `Adapter.core`.
    """
    training = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in training:
            weight.requires_grad_(False)
        yield
    finally:
        for weight in training:
            weight.requires_grad_(True)
