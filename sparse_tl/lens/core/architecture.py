"""The contents of `tl_config.json`: fields that describe an architecture, with their types.

A folder may be untrusted. TransformerLens's own configuration also names tokenizers to fetch, code
to trust, devices and seeds; none of these are read from a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparse_tl.lens.core.points import Model
from sparse_tl.storage.files import read_json

CONFIG_FILE = "tl_config.json"
DTYPES = ("float32", "float64", "float16", "bfloat16")
HALVES = (torch.float16, torch.bfloat16)

_INTEGERS = (
    "n_layers n_ctx d_model d_head n_heads n_key_value_heads d_mlp d_vocab d_vocab_out rotary_dim "
    "window_size num_experts experts_per_token train_seq_length NTK_original_ctx_len "
    "yarn_original_max_position_embeddings"
)
_NUMBERS = (
    "eps attn_scale clip_qkv attn_scores_soft_cap output_logits_soft_cap rotary_base "
    "rotary_base_local rotary_scaling_factor NTK_by_parts_low_freq_factor "
    "NTK_by_parts_high_freq_factor NTK_by_parts_factor yarn_factor yarn_attention_factor "
    "yarn_beta_fast yarn_beta_slow"
)
_BOOLEANS = (
    "attn_only gated_mlp final_rms parallel_attn_mlp post_embedding_ln use_attn_scale use_qk_norm "
    "use_normalization_before_and_after use_local_attn use_logn_attn use_attention_sinks "
    "scale_attn_by_inverse_layer_idx ungroup_grouped_query_attention rotary_adjacent_pairs "
    "use_NTK_by_parts_rope use_dynamic_ntk_rope use_yarn_rope yarn_truncate yarn_global_attn_only "
    "norm_topk_prob tie_word_embeddings default_prepend_bos tokenizer_prepends_bos "
    "use_attn_result use_split_qkv_input use_hook_mlp_in use_attn_in use_hook_tokens"
)
_STRINGS = "model_name original_architecture act_fn"
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "dtype": DTYPES,
    "normalization_type": (None, "LN", "LNPre", "RMS", "RMSPre"),
    "positional_embedding_type": ("standard", "rotary", "shortformer", "alibi"),
    "attention_dir": ("causal", "bidirectional"),
}
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        _INTEGERS.split(), (lambda v: type(v) is int and v > 0, "a whole number from 1")
    ),
    **dict.fromkeys(
        _NUMBERS.split(), (lambda v: type(v) in (int, float) and math.isfinite(v), "a number")
    ),
    **dict.fromkeys(
        ("eps", "rotary_base"),
        (lambda v: type(v) in (int, float) and 0 < v < math.inf, "a number above 0"),
    ),
    **dict.fromkeys(_BOOLEANS.split(), (lambda v: type(v) is bool, "true or false")),
    **dict.fromkeys(_STRINGS.split(), (lambda v: type(v) is str, "a string")),
    **{name: (known.__contains__, f"one of {known}") for name, known in _CHOICES.items()},
    "attn_types": (
        lambda v: type(v) is list and all(kind in ("global", "local") for kind in v),
        "a list of 'global' and 'local'",
    ),
}
"""For each field, a test of its value and a description."""
_REQUIRED = ("n_layers", "n_ctx", "d_model", "d_head")
# Found in folders of earlier versions; they do not affect what the model computes.
_IGNORED = (
    "seed device n_devices init_mode initializer_range uses_rms_norm layer_norm_folding "
    "from_checkpoint checkpoint_index checkpoint_label_type checkpoint_value load_in_4bit "
    "quantization_method trust_remote_code"
)


def dtype_named(name: Any) -> torch.dtype:
    """The torch dtype with this name, with or without ``torch.``.

    Raises:
        ValueError: the name is not in `DTYPES`.
    """
    plain = name.removeprefix("torch.") if isinstance(name, str) else name
    if plain not in DTYPES:
        raise ValueError(f"expected the name of a torch dtype, one of {DTYPES}; got {name!r:.200}")
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
        ValueError: a field is unknown, missing, or has a value of the wrong type.
    """
    config = read_json(file)
    if not isinstance(config, dict):
        raise ValueError(f"expected a JSON object in {file}; got a {type(config).__name__}")
    fields = {name: value for name, value in config.items() if name not in _IGNORED.split()}
    for name, value in fields.items():
        fits, kind = _FIELDS.get(name, (None, ""))
        if fits is None or not fits(value):
            said = f"{kind} as {name}" if fits else "only fields that describe the architecture"
            raise ValueError(f"expected {said} in {file}; got {name:.60} = {str(value)[:60]!r}")
    missing = [name for name in _REQUIRED if name not in fields]
    if missing:
        raise ValueError(f"expected all fields of an architecture in {file}; it lacks {missing}")
    if "n_heads" not in fields and fields["d_model"] % fields["d_head"]:
        raise ValueError(
            f"expected n_heads in {file}, or a d_head that divides d_model; got d_model = "
            f"{fields['d_model']} and d_head = {fields['d_head']}"
        )
    return fields
