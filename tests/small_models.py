"""A tiny random model of every architecture that TransformerLens's bridge knows.

Most follow from one table of sizes by the name of a field; `OVERRIDES` has what else an
architecture needs.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from architectures import D_MODEL, N_HEADS, randomise

VOCABULARY, CONTEXT = 61, 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "sliding_window": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_num_experts": 4,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # recurrent layers
    "state_size": 4,
    "mamba_d_state": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_chunk_size": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    # names of their own
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "query_pre_attn_scalar": 8,
    "n_inner": 48,
    "intermediate_size_mlp": 48,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    # encoders and decoders, images and sounds
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "image_size": 8,
    "patch_size": 4,
    "depth": 2,
    "out_hidden_size": 32,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "projector_hidden_size": 32,
    "conv_dim": [8, 8],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_codevectors_per_group": 4,
    "codevector_dim": 8,
    "proj_codevector_dim": 8,
}
_MIXED = ["linear_attention", "full_attention"]
_SECTIONS = {"text_config.rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
_LATENT = {"num_key_value_heads": 4, "head_dim": 4}
OVERRIDES: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "CodeGenForCausalLM": {"rotary_dim": 4},
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "Emu3ForConditionalGeneration": {
        "vocabulary_map": {"<image>": 3},
        "vq_config.base_channels": 32,
        "vq_config.codebook_size": 8,
        "vq_config.channel_multiplier": [1, 1],
        "vq_config.num_res_blocks": 1,
        "vq_config.attn_resolutions": [],
    },
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64},
    "Florence2ForConditionalGeneration": {
        "vision_config.depths": [1],
        "vision_config.patch_size": [7],
        "vision_config.patch_stride": [4],
        "vision_config.patch_padding": [3],
        "vision_config.patch_prenorm": [False],
        "vision_config.embed_dim": [32],
        "vision_config.num_heads": [4],
        "vision_config.num_groups": [4],
        "vision_config.projection_dim": 32,
    },
    "GPTJForCausalLM": {"rotary_dim": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "Glm4MoeLiteForCausalLM": _LATENT,
    "Glm4vForConditionalGeneration": _SECTIONS,
    "GlmMoeDsaForCausalLM": _LATENT,
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"]},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Mamba2ForCausalLM": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 4},
    "NemotronHForCausalLM": {"layers_block_type": ["mamba", "attention"]},
    "OlmoHybridForCausalLM": {"layer_types": _MIXED},
    "Qwen2_5_VLForConditionalGeneration": _SECTIONS,
    "Qwen3NextForCausalLM": {"layer_types": _MIXED},
    "Qwen3_5ForCausalLM": {"layer_types": _MIXED},
    "Qwen3_5MoeForCausalLM": {"layer_types": _MIXED},
    "Qwen3_5ForConditionalGeneration": {"text_config.layer_types": _MIXED},
    "Qwen3_5MoeForConditionalGeneration": {"text_config.layer_types": _MIXED},
    "RecurrentGemmaForCausalLM": {"block_types": ["recurrent", "attention"], "lru_width": 32},
    # transformers sets the embedding of the padding token to 0 when it loads the model.
    "YoutuForCausalLM": {**_LATENT, "pad_token_id": None},
    "Zamba2ForCausalLM": {"layers_block_type": ["mamba", "hybrid"]},
}


def small(default: Any) -> dict[str, Any]:
    """What sets a configuration to small sizes, and all configurations inside it."""
    kind = type(default)
    values = default.to_dict()
    known = {*values, *default.attribute_map}
    fields = {"model_type": default.model_type}
    for field, size in SIZES.items():
        if field in known and not isinstance(getattr(kind, field, None), property):
            lists = isinstance(values.get(field), (list, tuple))
            if lists == isinstance(size, list):
                fields[field] = size
    for part in kind.sub_configs:
        if getattr(default, part, None) is not None:
            fields[part] = small(getattr(default, part))
    return fields


def random_model(name: str, seed: int = 0) -> Any:
    """A model of transformers, in evaluation mode, with no norm at its trivial value."""
    architecture: Any = getattr(transformers, name)
    kind = architecture.config_class
    fields = small(kind())
    del fields["model_type"]
    for path, value in OVERRIDES.get(name, {}).items():
        *parents, field = path.split(".")
        inner = fields
        for parent in parents:
            inner = inner[parent]
        inner[field] = value
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with torch.device("meta"):
            size = sum(weight.numel() for weight in architecture(kind(**fields)).parameters())
        if size > 1e6:
            raise ValueError(f"expected a small model; {name} has {size:,} weights")
        model = architecture(kind(**fields))
        randomise(model)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    return model.eval()


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
