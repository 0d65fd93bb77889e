"""Tiny random models of architectures that are refused, in part or whole."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from architectures import CONTEXT, D_MODEL, N_HEADS, VOCABULARY

from sparse_tl.backend import boot

_SIZES: dict[str, Any] = {
    "hidden_size": D_MODEL,
    "num_hidden_layers": 2,
    "num_attention_heads": N_HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
}
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": (
        "OPTConfig",
        {
            "hidden_size": D_MODEL,
            "num_hidden_layers": 2,
            "ffn_dim": 48,
            "num_attention_heads": N_HEADS,
            "max_position_embeddings": CONTEXT,
            "word_embed_proj_dim": D_MODEL,
            "pad_token_id": 0,
        },
    ),
    "gptj": (
        "GPTJConfig",
        {
            "n_embd": D_MODEL,
            "n_layer": 2,
            "n_head": N_HEADS,
            "n_positions": CONTEXT,
            "rotary_dim": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            "hidden_size": D_MODEL,
            "num_layers": 2,
            "attention_types": [[["global", "local"], 1]],
            "num_heads": N_HEADS,
            "max_position_embeddings": CONTEXT,
            "intermediate_size": 48,
            "window_size": 4,
        },
    ),
    "bloom": ("BloomConfig", {"hidden_size": D_MODEL, "n_layer": 2, "n_head": N_HEADS}),
    "phi": ("PhiConfig", _SIZES),
    "cohere": ("CohereConfig", _SIZES),
}


def odd(name: str) -> Any:
    kind, fields = ODD[name]
    config = getattr(transformers, kind)(vocab_size=VOCABULARY, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        )
    return boot(model.eval(), name=name)


def native() -> Any:
    """A bridge around TransformerLens's own model, not one of transformers."""
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    sizes = {"d_model": D_MODEL, "d_head": D_MODEL // N_HEADS, "n_heads": N_HEADS, "n_layers": 2}
    config = TransformerBridgeConfig(
        **sizes, n_ctx=CONTEXT, d_vocab=VOCABULARY, d_mlp=48, act_fn="relu"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TransformerBridge.boot_native(config)
