"""Passes of a TransformerBridge that start at a layer or end before the final norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.exceptions import StopAtLayerException
from transformer_lens.model_bridge.generalized_components.mpt_alibi_attention import (
    MPTALiBiAttentionBridge,
)

from sparse_tl.calls.scopes import scope
from sparse_tl.lens.core.architecture import HALVES
from sparse_tl.lens.core.attaching import Forward, stand_in
from sparse_tl.lens.core.devices import is_sharded
from sparse_tl.lens.core.masks import AttentionMask
from sparse_tl.lens.core.norms import ClosedForm, Norm
from sparse_tl.lens.core.places import HookFunction, Place, read_call
from sparse_tl.lens.core.shortcuts import hooked


def cached_columns(kwargs: dict[str, Any]) -> Int[Tensor, ""]:
    """The number of columns in the key-value cache."""
    # Can exceed the keys of a layer with a sliding window, which are the last of these columns.
    cache = kwargs.get("past_key_values")
    return torch.tensor(0 if cache is None else int(cache.get_seq_length()))


def mask_place(attention: nn.Module, causal: bool) -> Place:
    """The place of a layer's mask: at the call of attention, or once it has made its own mask."""
    read = partial(_mask, attention, causal)
    own: Any = getattr(attention, "hook_dsa_mask", None)
    if own is None:
        return partial(read_call, [attention], read)

    def attach(function: HookFunction) -> list[RemovableHandle]:
        called: dict[str, AttentionMask] = {}

        def add(_module: nn.Module, _args: Any, chosen: Float[Tensor, "prompt query key"]) -> None:
            mask = called.pop("mask")
            both = chosen[:, None] if mask.given is None else mask.given + chosen[:, None]
            function(AttentionMask(mask.causal, given=both))

        handles = read_call([attention], read, partial(called.__setitem__, "mask"))
        return [*handles, own.register_forward_hook(add)]

    return attach


def _mask(attention: nn.Module, causal: bool, kwargs: dict[str, Any]) -> AttentionMask:
    """The mask that attention applies when it is called with these arguments."""
    given = kwargs.get("attention_mask")
    if given is None:
        return AttentionMask(causal)
    if isinstance(attention, MPTALiBiAttentionBridge):
        given = ~given  # MPT's masks are true where a pair is masked
    # A mask of four axes includes the causal order, windows and chunks; attention adds nothing.
    return AttentionMask(causal and given.ndim < 4, given=given)


def check_left_padded(output: Tensor, model: str) -> None:
    """Refuse the NaN that some float64 models return for prompts padded on the left.

    Raises:
        ValueError: the output has a NaN.
    """
    if output.isnan().any():
        raise ValueError(
            f"expected prompts of one length, or padded on the right; {model!r} in float64 "
            "returns NaN for prompts that are padded on the left: transformers computes softmax "
            "in float32, where the scores of padding are infinite"
        )


@scope
def plain_norms(norms: Mapping[Any, Norm]) -> Iterator[None]:
    """Inside the block, norms run as they do in the wrapped model.

    A bridge also computes values for the hook points in a norm; it still does if one is hooked.
    Under frozen weights, gradients of RMS norms are computed in closed form.
    """
    with ExitStack() as removed:
        for module, norm in norms.items():
            native = getattr(module, "use_native_layernorm_autograd", False)
            if native and not any(map(hooked, module.children())):
                run = partial(_native, module.original_component, norm)
                removed.callback(stand_in(module, run))
        yield


def _native(module: nn.Module, norm: Norm, _forward: Forward) -> Forward:
    # A sharded weight is whole only while its module runs.
    plain = not any(w.requires_grad or is_sharded(w) for w in module.parameters())

    def run(hidden_states: Tensor, **_: Any) -> Tensor:
        exact = norm.kind == "rms" and hidden_states.dtype not in HALVES
        if exact and hidden_states.requires_grad and plain:
            return ClosedForm.apply(hidden_states, norm, module)
        return module(hidden_states).to(hidden_states.dtype)

    return run


@scope
def stopped(model: TransformerBridge) -> Iterator[None]:
    """Inside the block, calls of the model return the input of the final normalisation."""

    def stop(_module: nn.Module, args: tuple[Any, ...]) -> None:
        raise StopAtLayerException(args[0])

    with model.ln_final.register_forward_pre_hook(stop):
        yield


@scope
def skipped(model: TransformerBridge, n_layers: int) -> Iterator[None]:
    """Inside the block, the first layers return their input unchanged.

    The wrapped model still builds masks and position embeddings, and numbers its layers from 0.
    """

    def hand_on(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return hidden_states

    with ExitStack() as removed:
        for block in model.blocks[:n_layers]:
            removed.callback(stand_in(block, lambda _: hand_on))
        yield
