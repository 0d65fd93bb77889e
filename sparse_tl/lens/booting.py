"""Models of `transformers` under a TransformerBridge's hooks."""

from __future__ import annotations

from typing import Any

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.sources import (
    build_bridge_from_module,
    detect_tokenizer_bos_eos,
)

from sparse_tl.lens.fidelity import check_same, few_logits
from sparse_tl.lens.hugging_face import check_tokenizer


def boot(model: Any, tokenizer: Any = None, *, name: str = "model") -> TransformerBridge:
    """A bridge around a causal language model of `transformers`, ready to be analysed.

    The model itself gets the hooks; nothing is copied and nothing is fetched. It is in evaluation
    mode afterwards, and its attention is computed step by step, since hooks see nothing of a fused
    one.

    Args:
        model: of `transformers`; TransformerLens must know its class.
        tokenizer: its own.
        name: what it is called in messages and figures.

    Raises:
        ValueError: a class that TransformerLens does not know, no causal language model, one that
            has a bridge already or that TransformerLens computes otherwise than transformers, or a
            tokenizer of another model.
    """
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"expected a causal language model; {kind} has an encoder and a decoder")
    if any(isinstance(module, GeneralizedComponent) for module in model.modules()):
        raise ValueError(
            f"expected a {kind} of transformers as it was loaded; this one has a TransformerBridge "
            "around it already. Use that bridge, or load the model again"
        )
    model.set_attn_implementation("eager")
    tokens, expected = few_logits(model.eval())
    try:
        with torch.random.fork_rng(devices=[]):  # parts of joint projections are drawn at first
            bridge = build_bridge_from_module(model, kind, hf_config=model.config, model_name=name)
    except (KeyError, ValueError) as error:
        raise ValueError(f"expected a model that TransformerLens knows; {kind}: {error}") from error
    if tokenizer is not None:
        check_tokenizer(tokenizer, bridge.cfg.d_vocab)
        pad = tokenizer.pad_token_id
        if pad is None or pad >= bridge.cfg.d_vocab:  # texts of several lengths are padded
            tokenizer.pad_token = tokenizer.eos_token
        bridge.tokenizer = tokenizer
        found = detect_tokenizer_bos_eos(tokenizer)
        bridge.cfg.tokenizer_prepends_bos, bridge.cfg.tokenizer_appends_eos = found
    check_same(bridge.eval(), tokens, expected)
    return bridge


def check_alone(model: TransformerBridge) -> None:
    """Make sure that this bridge, and no other, is what its model of `transformers` runs.

    A bridge puts its parts into the model. One that is made later takes their place, and hooks on
    the first do nothing any more; it runs the first one's parts inside its own.

    Raises:
        ValueError: there is another bridge around the same model.
    """
    where: Any = model.adapter.component_mapping
    inside: Any = model.original_model.get_submodule(where["blocks"].name)
    first: Any = model.blocks[0]
    if inside[0] is not first or isinstance(first.original_component, GeneralizedComponent):
        raise ValueError(
            f"expected one TransformerBridge around a {type(model.original_model).__name__}; "
            f"{model.cfg.model_name!r} shares it with another one, and hooks on the earlier one do "
            "nothing. Load the model again, and make one bridge of it"
        )
