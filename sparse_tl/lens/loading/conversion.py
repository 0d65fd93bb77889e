"""Convert a HookedTransformer's configuration and weights to a plain `transformers` model.

Needed to load HookedTransformer folders where TransformerLens no longer has that class. Three
families exactly cover what most of them compute: GPT-2 (learned positions, LayerNorm), GPT-NeoX
(rotary positions, LayerNorm) and Llama (rotary positions, RMS norms, a gated MLP). Everything else
is refused: a nearly equal model would silently give wrong numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sparse_tl.lens.loading.families import FAMILIES, Named

# Features that no family has, with the value of each field in a model without the feature.
_ABSENT: dict[str, Any] = {
    "attn_only": False,
    "attention_dir": "causal",
    "post_embedding_ln": False,
    "use_attn_scale": True,
    "use_qk_norm": False,
    "use_local_attn": False,
    "use_logn_attn": False,
    "use_attention_sinks": False,
    "use_normalization_before_and_after": False,
    "use_NTK_by_parts_rope": False,
    "use_dynamic_ntk_rope": False,
    "use_yarn_rope": False,
    "scale_attn_by_inverse_layer_idx": False,
    "rotary_scaling_factor": 1.0,
    "attn_scores_soft_cap": -1.0,
    "output_logits_soft_cap": -1.0,
    "clip_qkv": None,
    "num_experts": None,
}
_THEIRS = {
    "gpt2": {
        "positional_embedding_type": "standard",
        "normalization_type": "LN",
        "gated_mlp": False,
        "parallel_attn_mlp": False,
        "final_rms": False,
    },
    "gpt_neox": {
        "positional_embedding_type": "rotary",
        "normalization_type": "LN",
        "gated_mlp": False,
        "final_rms": False,
    },
    "llama": {
        "positional_embedding_type": "rotary",
        "normalization_type": "RMS",
        "gated_mlp": True,
        "parallel_attn_mlp": False,
    },
}
_ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu")


def as_transformers(fields: dict[str, Any], weights: dict[str, Tensor]) -> PreTrainedModel:
    """The model defined by fields of `HookedTransformerConfig` and weights.

    Raises:
        ValueError: no family covers the architecture exactly, or the weights do not fit it.
    """
    said = _completed(fields)
    family = _family(said)
    named = Named(said, weights)
    config, converted = FAMILIES[family](said, named)
    named.check_read()
    with torch.random.fork_rng(devices=[]):  # its initial random weights are discarded
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(
                family,
                vocab_size=said["d_vocab"],
                num_hidden_layers=said["n_layers"],
                hidden_size=said["d_model"],
                num_attention_heads=said["n_heads"],
                max_position_embeddings=said["n_ctx"],
                tie_word_embeddings=False,
                bos_token_id=None,
                eos_token_id=None,
                **config,
            ),
            attn_implementation="eager",
            dtype=said["dtype"],
        )
    model.load_state_dict(converted, strict=True)
    return model.eval()


def _completed(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, completed with TransformerLens's defaults."""
    said = {**_ABSENT, "gated_mlp": False, "parallel_attn_mlp": False, "final_rms": False, **fields}
    said["dtype"] = getattr(torch, str(said.get("dtype", "float32")))
    # Norms without weights equal norms with weights of one.
    said["normalization_type"] = str(said.get("normalization_type", "LN")).removesuffix("Pre")
    for name, value in {
        "positional_embedding_type": "standard",
        "n_heads": said["d_model"] // said["d_head"],
        "d_mlp": 4 * said["d_model"],
        "eps": 1e-5,
        "attn_scale": math.sqrt(said["d_head"]),
        "rotary_dim": said["d_head"],
        "rotary_base": 10000,
        "rotary_adjacent_pairs": False,
        "d_vocab_out": said.get("d_vocab"),
    }.items():
        said.setdefault(name, value)
    said.setdefault("n_key_value_heads", said["n_heads"])
    return said


def _family(said: dict[str, Any]) -> str:
    """The family that covers these fields exactly."""
    wanted = _ABSENT | {"d_vocab_out": said.get("d_vocab")}
    strange = {name: said[name] for name, value in wanted.items() if said[name] != value}
    if said.get("act_fn") not in _ACTIVATIONS:
        strange["act_fn"] = said.get("act_fn")
    if not math.isclose(said["attn_scale"], math.sqrt(said["d_head"])):
        strange["attn_scale"] = said["attn_scale"]
    if "local" in said.get("attn_types", ()):
        strange["attn_types"] = said["attn_types"]
    heads = said["n_heads"], said["d_head"], said["n_key_value_heads"]
    for family, own in _THEIRS.items():
        whole = heads[0] * heads[1] == said["d_model"] and heads[0] == heads[2]
        fits = whole if family != "llama" else said["d_model"] % heads[0] == 0
        if not strange and fits and all(said[name] == value for name, value in own.items()):
            return family
    names = sorted(set().union(*_THEIRS.values()))
    reason = strange or {name: said[name] for name in (*names, "n_heads", "d_head", "d_model")}
    raise ValueError(
        "expected an architecture that GPT-2, GPT-NeoX or Llama can represent, since this version "
        f"of transformer-lens has no HookedTransformer (3.9 has); got {reason}"
    )
