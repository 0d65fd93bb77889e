"""Passes of a TransformerBridge that start at a layer or end before the final norm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.exceptions import StopAtLayerException

from sparse_tl.lens.attaching import stand_in
from sparse_tl.scopes import scope


def cached_columns(kwargs: dict[str, Any]) -> int:
    # Can exceed the keys of a layer with a sliding window, which are the last of these columns.
    cache = kwargs.get("past_key_values")
    return 0 if cache is None else int(cache.get_seq_length())


@scope
def stopped(model: TransformerBridge) -> Iterator[None]:
    """Inside the block a call returns the input of the final normalisation."""

    def stop(_module: nn.Module, args: tuple[Any, ...]) -> None:
        raise StopAtLayerException(args[0])

    with model.ln_final.register_forward_pre_hook(stop):
        yield


@scope
def entered(model: TransformerBridge, layer: int, residual: Tensor | None) -> Iterator[None]:
    """Inside the block a call with a residual stream starts at a layer; one with tokens at 0.

    Skipped layers pass their input on. The wrapped model builds masks and position embeddings as
    usual and numbers its layers from 0. What it does to given embeddings (GPT-2's positions,
    Gemma's factor) is discarded at the first layer that is run.
    """
    if residual is None:
        yield
        return

    def hand_on(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return hidden_states

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (residual, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": residual}

    with ExitStack() as removed:
        for block in model.blocks[:layer]:
            removed.callback(stand_in(block, lambda _: hand_on))
        handle = model.blocks[layer].register_forward_pre_hook(enter, with_kwargs=True)
        removed.enter_context(handle)
        yield
