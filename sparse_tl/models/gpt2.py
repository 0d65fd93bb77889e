"""The built-in models are small GPT-2s, supported by all current TransformerLens versions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from sparse_tl.lens import Model, boot, checked_device

_SPECIAL = ("bos", "eos", "pad")
_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def build_gpt2(
    architecture: Mapping[str, Any],
    tokenizer: Any,
    *,
    name: str,
    seed: int = 0,
    device: str | None = None,
) -> Model:
    """A GPT-2 with random weights, untied unembedding and no dropout.

    Args:
        architecture: fields of `transformers.GPT2Config`.
        tokenizer: tokenizer of the model, or None.
        name: name of the model.
        seed: random seed for the weights.
        device: device of the model; a GPU by default if there is one.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    fields: dict[str, Any] = {
        **architecture,
        **{f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id", None) for kind in _SPECIAL},
        **dict.fromkeys(_DROPOUT, 0.0),
        # GPT-2's own 0.02 suits its width: a model of width 128 learns more slowly from it.
        "initializer_range": 0.8 / math.sqrt(architecture["n_embd"]),
    }
    config = GPT2Config(**fields, tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = GPT2LMHeadModel(config)
    return boot(model.to(checked_device(device)), tokenizer, name=name)
