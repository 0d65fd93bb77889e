"""Tiny random models of transformers, of architectures that are supported.

Two layers or three, grouped-query attention where there is any, no norm weight or bias at its
trivial value, and a sliding window that is shorter than the prompts.
"""

from __future__ import annotations

from typing import Any

N_LAYERS, N_HEADS, D_MODEL, VOCABULARY, CONTEXT = 3, 4, 32, 61, 40
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": D_MODEL,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": N_HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
_GEMMA = {**_SIZES, "tie_word_embeddings": True, "head_dim": 8}
_LATENT = {
    **_SIZES,
    "num_key_value_heads": N_HEADS,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_positions": CONTEXT,
            "n_embd": D_MODEL,
            "n_layer": N_LAYERS,
            "n_head": N_HEADS,
            **_SPECIAL,
        },
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        {
            **{name: size for name, size in _SIZES.items() if name != "num_key_value_heads"},
            "rotary_pct": 0.25,
        },
    ),
    "llama": ("LlamaConfig", _SIZES),
    "qwen2": ("Qwen2Config", _SIZES),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 8}),
    "mistral": ("MistralConfig", {**_SIZES, "sliding_window": 4}),
    "mixtral": ("MixtralConfig", {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("Phi3Config", _SIZES),
    "olmo": ("OlmoConfig", _SIZES),
    "olmo2": ("Olmo2Config", _SIZES),
    "gemma": ("GemmaConfig", _GEMMA),
    "gemma2": (
        "Gemma2Config",
        {
            **_GEMMA,
            "query_pre_attn_scalar": 8,
            "sliding_window": 4,
            "final_logit_softcapping": 5.0,
            "attn_logit_softcapping": 10.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_GEMMA,
            "query_pre_attn_scalar": 8,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            **_SIZES,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ),
    "deepseek_v2": ("DeepseekV2Config", {**_LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3Config", {**_LATENT, "attention_bias": True}),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_SIZES,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
"""The class of each one's configuration, and its fields."""
LATENT = ("deepseek_v2", "deepseek_v3")
EXPERTS = ("mixtral", "gpt_oss", *LATENT)


def plain_transformer(name: str, dtype: str = "float32", seed: int = 0, **changed: Any) -> Any:
    """A model of transformers, in evaluation mode; fields of its configuration may be changed."""
    import torch
    import transformers

    kind, fields = ARCHITECTURES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = getattr(transformers, kind)(**{**fields, **changed})
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        )
        randomise(model)
    if name in EXPERTS and dtype == "float64":
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    return model.to(getattr(torch, dtype)).eval()


def randomise(model: Any) -> None:
    """Draw all weights anew, so that every part does something and no norm is trivial."""
    import torch

    with torch.no_grad():
        for where, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                embeds = "embed" in where or "wte" in where
                parameter.normal_(0, 0.5 if embeds else 1.2 / parameter.shape[-1] ** 0.5)


def hooked_transformer(
    name: str, dtype: str = "float32", fields: dict[str, Any] | None = None, **changed: Any
) -> Any:
    """A HookedTransformer with the weights of `plain_transformer`, read as TransformerLens does.

    `fields` of its configuration are given where TransformerLens knows an architecture only by the
    names of published models.
    """
    import tempfile

    import torch
    from tokenizers import Tokenizer, models
    from transformer_lens import (
        HookedTransformer,
        HookedTransformerConfig,
        loading_from_pretrained as loading,
    )
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    plain, kind = plain_transformer(name, dtype, **changed), getattr(torch, dtype)
    plain.config.n_ctx = CONTEXT  # it stands in GPT-2's own files
    words = Tokenizer(models.WordLevel({str(word): word for word in range(VOCABULARY)}, "0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", bos_token="1")
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if fields is None:
            cfg = loading.get_pretrained_model_config(folder, dtype=kind, device="cpu")
        else:
            cfg = HookedTransformerConfig.from_dict({**fields, "dtype": kind, "device": "cpu"})
            cfg.original_architecture = type(plain).__name__
        weights = loading.get_pretrained_state_dict(folder, cfg, plain, dtype=kind)
        cfg.tokenizer_name, cfg.model_name = None, name
        # Without a tokenizer its `generate` puts learned positions in wrong places.
        model = HookedTransformer(cfg, AutoTokenizer.from_pretrained(folder))
    processed = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
    model.load_and_process_state_dict(weights, **dict.fromkeys(processed, False))
    return model.to(kind)  # routers of experts are float32 whatever is asked for


def random_tokens(rows: int = 3, length: int = 9, seed: int = 0) -> Any:
    """Prompts without special tokens."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def random_pairs(n: int = 4) -> Any:
    """Prompt pairs of eight tokens that differ in two of them."""
    import torch

    from sparse_tl import PromptPairs

    clean = random_tokens(n, 8)
    corrupted = clean.clone()
    corrupted[:, [3, 6]] = random_tokens(n, 8, seed=1)[:, [3, 6]]
    good, bad = random_tokens(n, 2, seed=2).split(1, dim=1)
    return PromptPairs(clean, corrupted, good, bad, torch.full((n,), 7))


def off(found: Any, expected: Any) -> float:
    """The largest difference, of the largest entry."""
    return ((found - expected).abs().max() / (expected.abs().max() + 1e-30)).item()
