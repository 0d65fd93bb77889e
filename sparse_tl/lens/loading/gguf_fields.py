"""Give a model the hyperparameters of its GGUF file, many of which transformers does not read.

Every field of the file's architecture is one of these:

1. Decided by the shapes of the weights, which are checked elsewhere, or without effect.
2. A number that the configuration has too. It is set; if the file lacks it, to llama.cpp's default.
3. Anything else, which is refused.

Reference: `load_hparams` and `load_arch_hparams` in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHAPES = """
context_length embedding_length block_count feed_forward_length vocab_size tensor_data_layout
use_parallel_residual attention.head_count_kv attention.key_length attention.value_length
expert_count expert_feed_forward_length expert_shared_feed_forward_length shortconv.l_cache
ssm.conv_kernel ssm.inner_size ssm.state_size ssm.time_step_rank
rope.scaling.original_context_length rope.scaling.finetuned
"""
"""Fields that the weights decide, or that only describe them or the training."""
_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "attention.head_count": (0,),  # of models without attention
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0, 1),
    "ssm.dt_b_c_rms": (False,),
}
_RMS, _LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_EPSILON = "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"
_ATTRIBUTES = {
    "attention.head_count": ("num_attention_heads", "n_head"),
    _RMS: _EPSILON,
    _LAYER: _EPSILON,
    "expert_used_count": ("num_experts_per_tok",),
}
"""Names of a field in transformers' configurations."""
_WINDOW, _CAP = "attention.sliding_window", "final_logit_softcapping"
_OF_MODEL: dict[str, dict[str, float | None]] = {
    "gemma2": {_WINDOW: 4096, _CAP: 30.0, "attn_logit_softcapping": 50.0},
    "gemma3_text": {_WINDOW: None, _CAP: 0.0, "rope.freq_base_swa": 10_000.0},
    "phi3": {_WINDOW: 0},
    "starcoder2": {_WINDOW: 0},
}
"""Fields of some models only, with llama.cpp's defaults; None is for what a file must have."""
_PARTLY_ROTARY = "nemotron", "phi3", "stablelm"
# Their attention is scaled by the width per head; that of the other Gemmas by the head's.
_LARGEST_GEMMAS = ("gemma2", 46), ("gemma3_text", 62)


def take_fields(fields: Mapping[str, Any], config: Any) -> None:
    """Set in the configuration that transformers made from a GGUF file what the file says.

    Raises:
        ValueError: a field is missing, or would be ignored although it may change the model.
    """
    start = f"{fields['general.architecture']}."
    said = {name.removeprefix(start): fields[name] for name in fields if name.startswith(start)}
    of_model, no_effect = _OF_MODEL.get(config.model_type, {}), dict(_NO_EFFECT)
    defaults = {**of_model, _RMS: said.get(_LAYER)}
    places = _places(config)
    if "attention.head_count" in places:
        width = config.hidden_size // config.num_attention_heads
        head = getattr(config, "head_dim", None) or width
        defaults["attention.head_count"] = None
        no_effect["rope.dimension_count"] = (head,)
        if "rope.freq_base" in places:
            defaults |= {"rope.freq_base": 10_000.0, "rope.dimension_count": head}
        if config.model_type in _PARTLY_ROTARY:
            share = said.get("rope.dimension_count", head) / head
            config.rope_parameters["partial_rotary_factor"] = share
            no_effect["rope.dimension_count"] = (int(head * share),)  # as transformers rounds it
        if hasattr(config, "query_pre_attn_scalar"):
            largest = (config.model_type, config.num_hidden_layers) in _LARGEST_GEMMAS
            config.query_pre_attn_scalar = width if largest else head
    taken: dict[tuple[int, str], Any] = {}
    for field, value in (defaults | said).items():
        quoted = f"{start + field!r:.80}"
        if value is None:
            raise ValueError(f"it lacks the field {quoted}")
        if field in places and isinstance(value, int | float):
            holder, name = places[field]
            holder[name] = (value or None) if field in of_model else value  # a window of 0 is none
            known = taken.setdefault((id(holder), name), value) == value
        else:
            known = field in _SHAPES.split() or value in no_effect.get(field, ())
        if not known:
            raise ValueError(
                f"transformers ignores its {quoted} = {value!r:.80}, so that it would be a "
                "different model from the file's"
            )


def _places(config: Any) -> dict[str, tuple[dict[str, Any], str]]:
    """The dictionary and key at which a configuration has a field."""
    own, kind = vars(config), type(config)
    # A configuration of transformers also keeps names that its model does not read.
    had = {field: [n for n in names if hasattr(kind, n)] for field, names in _ATTRIBUTES.items()}
    found = {field: (own, names[0]) for field, names in had.items() if names}
    found |= {
        field: (own, field.rpartition(".")[2]) for field in _OF_MODEL.get(config.model_type, ())
    }
    if rope := own.get("rope_parameters"):
        found["rope.freq_base"] = rope.get("full_attention", rope), "rope_theta"
        found["rope.freq_base_swa"] = rope.get("sliding_attention", rope), "rope_theta"
    return found
