"""Wrap `transformers` models in a TransformerBridge."""

from __future__ import annotations

from typing import Any

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.sources import (
    build_bridge_from_module,
    detect_tokenizer_bos_eos,
)

from sparse_tl.lens.core.lora import has_adapters
from sparse_tl.lens.loading.fidelity import check_same, few_logits
from sparse_tl.lens.loading.hugging_face import check_tokenizer


def boot(model: Any, tokenizer: Any = None, *, name: str = "model") -> TransformerBridge:
    """Wrap a causal language model of `transformers` in a bridge, ready for analysis.

    The model itself gets the hooks; nothing is copied or downloaded. It is switched to evaluation
    mode and eager attention, since fused attention exposes no intermediate values.

    Args:
        model: model of `transformers`, of a class that TransformerLens supports.
        tokenizer: tokenizer of the model; prompts begin with BOS if it adds one by itself.
        name: name of the model in messages and figures.

    Raises:
        ValueError: TransformerLens cannot wrap the model, it is not a causal language model or
            already has a bridge or adapters, TransformerLens and transformers compute different
            logits, or the tokenizer belongs to another model.
    """
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"expected a causal language model; {kind} has an encoder and a decoder")
    if any(isinstance(module, GeneralizedComponent) for module in model.modules()):
        raise ValueError(
            f"expected a {kind} of transformers as it was loaded; this one has a TransformerBridge "
            "around it already. Use that bridge, or load the model again"
        )
    if has_adapters(model):
        raise ValueError(
            f"expected a {kind} without adapters of peft, which a bridge may not call; merge them "
            "first (merge_and_unload), and put new ones on the bridge: add_lora"
        )
    model.set_attn_implementation("eager")
    tokens, expected = few_logits(model.eval())
    try:
        with torch.random.fork_rng(devices=[]):  # initialises split parts at random
            bridge = build_bridge_from_module(model, kind, hf_config=model.config, model_name=name)
    except Exception as error:  # TransformerLens can raise anything
        raise ValueError(
            f"expected a model that TransformerLens can wrap; on a {kind} it fails with "
            f"{type(error).__name__}: {error}"
        ) from error
    if tokenizer is not None:
        check_tokenizer(tokenizer, bridge.cfg.d_vocab)
        pad = tokenizer.pad_token_id
        if pad is None or pad >= bridge.cfg.d_vocab:  # needed to pad texts of different lengths
            tokenizer.pad_token = tokenizer.eos_token
        bridge.tokenizer = tokenizer
        found = detect_tokenizer_bos_eos(tokenizer)
        bridge.cfg.tokenizer_prepends_bos, bridge.cfg.tokenizer_appends_eos = found
        # TransformerLens's default follows the architecture, and may differ from the tokenizer.
        bridge.cfg.default_prepend_bos = found[0]
    check_same(bridge.eval(), tokens, expected)
    return bridge


def check_alone(model: TransformerBridge) -> None:
    """Check that this bridge is the only one around its model of `transformers`.

    A bridge puts its components into the model. A later bridge replaces them and runs them inside
    its own components, so that hooks on the first bridge have no effect.

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
            "nothing. Load the model again, and build one bridge from it"
        )
