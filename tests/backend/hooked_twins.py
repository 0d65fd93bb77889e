"""HookedTransformers (transformer-lens 3.9) with the weights of models of transformers."""

from __future__ import annotations

import tempfile
from typing import Any

_GEMMA = {
    "act_fn": "gelu_pytorch_tanh",
    "normalization_type": "RMS",
    "final_rms": True,
    "positional_embedding_type": "rotary",
    "gated_mlp": True,
}
_BY_HAND: dict[str, dict[str, Any]] = {
    "GemmaForCausalLM": _GEMMA,
    "OlmoForCausalLM": {
        "act_fn": "silu",
        "normalization_type": "LN",
        "positional_embedding_type": "rotary",
        "gated_mlp": True,
    },
}
"""What TransformerLens knows by the names of published models alone."""


def hooked_twin(plain: Any) -> Any:
    """The HookedTransformer that TransformerLens makes of such a model, its weights unprocessed."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.loading_from_pretrained import (
        get_pretrained_model_config,
        get_pretrained_state_dict,
    )

    config = plain.config
    config.architectures = [type(plain).__name__]
    if config.model_type == "gpt2":
        config.n_ctx = config.n_positions  # as older configurations said it
    with tempfile.TemporaryDirectory(prefix="twin") as folder:
        config.save_pretrained(folder)
        fields = _BY_HAND.get(type(plain).__name__)
        if fields is None:
            cfg = get_pretrained_model_config(folder, device="cpu", dtype=plain.dtype)
        else:
            cfg = HookedTransformerConfig.from_dict(
                _sizes(config) | fields | {"dtype": plain.dtype}
            )
            cfg.original_architecture = type(plain).__name__
        weights = get_pretrained_state_dict(folder, cfg, plain, dtype=plain.dtype)
    cfg.tokenizer_name = None
    model = HookedTransformer(cfg)
    model.load_and_process_state_dict(
        weights,
        fold_ln=False,
        center_writing_weights=False,
        center_unembed=False,
        fold_value_biases=False,
    )
    return model.requires_grad_()


def _sizes(config: Any) -> dict[str, Any]:
    d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    n_heads, n_kv_heads = config.num_attention_heads, config.num_key_value_heads
    return {
        "model_name": config.model_type,
        "n_layers": config.num_hidden_layers,
        "n_heads": n_heads,
        "n_key_value_heads": None if n_kv_heads == n_heads else n_kv_heads,
        "d_model": config.hidden_size,
        "d_head": d_head,
        "d_mlp": config.intermediate_size,
        "d_vocab": config.vocab_size,
        "n_ctx": config.max_position_embeddings,
        "rotary_dim": d_head,
        "eps": getattr(config, "rms_norm_eps", 1e-5),
        "device": "cpu",
        "init_weights": False,
    }
