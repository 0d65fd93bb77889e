"""Dtypes and devices by name, and the fields of `tl_config.json` that describe an architecture.

A folder may be untrusted. TransformerLens's own configuration also names tokenizers to fetch, code
to trust, devices and seeds; none of these are read from a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparse_tl.backend.core.points import Model
from sparse_tl.storage.files import read_json

CONFIG_FILE = "tl_config.json"
DTYPES = ("float32", "float64", "float16", "bfloat16")

_REQUIRED = ("n_layers", "n_ctx", "d_model", "d_head")
_DESCRIBES = (
    "n_layers n_ctx d_model d_head n_heads n_key_value_heads d_mlp d_vocab d_vocab_out rotary_dim "
    "window_size num_experts experts_per_token train_seq_length NTK_original_ctx_len "
    "yarn_original_max_position_embeddings eps attn_scale clip_qkv attn_scores_soft_cap "
    "output_logits_soft_cap rotary_base rotary_base_local rotary_scaling_factor "
    "NTK_by_parts_low_freq_factor NTK_by_parts_high_freq_factor NTK_by_parts_factor yarn_factor "
    "yarn_attention_factor yarn_beta_fast yarn_beta_slow attn_only gated_mlp final_rms "
    "parallel_attn_mlp post_embedding_ln use_attn_scale use_qk_norm "
    "use_normalization_before_and_after use_local_attn use_logn_attn use_attention_sinks "
    "scale_attn_by_inverse_layer_idx ungroup_grouped_query_attention rotary_adjacent_pairs "
    "use_NTK_by_parts_rope use_dynamic_ntk_rope use_yarn_rope yarn_truncate yarn_global_attn_only "
    "norm_topk_prob tie_word_embeddings default_prepend_bos tokenizer_prepends_bos "
    "use_attn_result use_split_qkv_input use_hook_mlp_in use_attn_in use_hook_tokens model_name "
    "original_architecture act_fn dtype normalization_type positional_embedding_type "
    "attention_dir attn_types"
)
# A file may also name these, which do not affect what the model computes.
_IGNORED = (
    "seed device n_devices init_mode initializer_range uses_rms_norm layer_norm_folding "
    "from_checkpoint checkpoint_index checkpoint_label_type checkpoint_value load_in_4bit "
    "quantization_method trust_remote_code"
)
_FIELDS = frozenset(_DESCRIBES.split())


def dtype_named(name: Any) -> torch.dtype:
    """The torch dtype with this name, with or without ``torch.``.

    Raises:
        ValueError: the name is not in `DTYPES`.
    """
    plain = name.removeprefix("torch.") if isinstance(name, str) else name
    if plain not in DTYPES:
        raise ValueError(f"{name!r:.200} is not the name of a torch dtype; choose one of {DTYPES}")
    return getattr(torch, plain)


def model_config(model: Model) -> dict[str, Any]:
    """The model's architecture as JSON-serialisable fields."""
    kept: dict[str, Any] = {}
    for name, value in model.cfg.to_dict().items():
        # None is TransformerLens's default, except for normalisation, where it means no norm.
        if name not in _FIELDS or (value is None and name != "normalization_type"):
            continue
        if isinstance(value, torch.dtype):
            kept[name] = str(value).removeprefix("torch.")
        else:
            kept[name] = value.item() if isinstance(value, np.generic) else value
    return kept


def read_architecture(file: Path) -> dict[str, Any]:
    """The fields of a `tl_config.json` that describe the architecture.

    Raises:
        ValueError: a field is unknown or missing.
    """
    config = read_json(file)
    fields = {name: value for name, value in config.items() if name not in _IGNORED.split()}
    unknown, missing = fields.keys() - _FIELDS, set(_REQUIRED) - fields.keys()
    if unknown or missing:
        raise ValueError(
            f"{file} does not describe an architecture: unknown fields {sorted(unknown)[:5]}, "
            f"missing {sorted(missing)}"
        )
    return fields
