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
def skipped(model: TransformerBridge, n_layers: int) -> Iterator[None]:
    """Inside the block, the first layers pass their input on.

    The wrapped model builds masks and position embeddings as usual and numbers its layers from 0.
    """

    def hand_on(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return hidden_states

    with ExitStack() as removed:
        for block in model.blocks[:n_layers]:
            removed.callback(stand_in(block, lambda _: hand_on))
        yield
