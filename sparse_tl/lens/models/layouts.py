"""Find the normalisations before and after attention and MLP in the blocks of a bridge.

Names do not tell which is which: the norms after OLMo-2's attention and MLP are ``ln1`` and ``ln2``
in some versions of TransformerLens, ``ln1_post`` and ``ln2_post`` in others. A pass over one token
does: a norm whose input is the very tensor that attention returned comes after attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge

from sparse_tl.calls.scopes import autograd
from sparse_tl.lens.core.attaching import hooks_on, without_user_hooks
from sparse_tl.lens.models.bridge_passes import stopped

_NORMS = ("ln1", "ln2", "ln1_post", "ln2_post")
Call = tuple[str, Tensor, Tensor]


@dataclass(frozen=True)
class BlockNorms:
    """The names of a block's normalisations by their position; None if absent.

    The norm before attention may be the same as the norm before the MLP.
    """

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


_found: WeakKeyDictionary[nn.Module, list[BlockNorms]] = WeakKeyDictionary()


def block_norms(model: TransformerBridge) -> list[BlockNorms]:
    """The normalisations of all blocks, determined when a model is first seen."""
    if model not in _found:
        _found[model] = [_block_norms(calls) for calls in _calls(model)]
    return _found[model]


@autograd(False)
def _calls(model: TransformerBridge) -> list[list[Call]]:
    """Inputs and outputs of the parts of each block, in execution order."""
    calls: list[list[Call]] = [[] for _ in model.blocks]

    def note(to: list[Call], name: str, _part: Any, args: Any, kwargs: Any, output: Any) -> None:
        given = args[0] if args else kwargs["hidden_states"]
        to.append((name, given, output[0] if isinstance(output, tuple) else output))

    hooks = [
        (part, partial(note, to, name))
        for block, to in zip(model.blocks, calls, strict=True)
        for name in ("attn", "mlp", *_NORMS)
        if isinstance(part := getattr(block, name, None), nn.Module)
    ]
    with without_user_hooks(model), hooks_on(hooks, with_kwargs=True), stopped(model):
        model(torch.zeros(1, 1, dtype=torch.long, device=model.embed.W_E.device))
    return calls


def _block_norms(calls: list[Call]) -> BlockNorms:
    given = {name: value for name, value, _ in calls}
    written = {name: value for name, _, value in calls}
    found: dict[str, str] = {}
    for name in filter(given.__contains__, _NORMS):
        if given.get("attn") is written[name]:
            found["before_attention"] = name
        if given.get("mlp") is written[name]:
            found["before_mlp"] = name
        elif given[name] is written.get("attn"):
            found["after_attention"] = name
        elif given[name] is written.get("mlp"):
            found["after_mlp"] = name
    return BlockNorms(**found)
