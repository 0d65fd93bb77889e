"""HookedTransformers, built from configuration fields or stored as a folder.

A folder holds ``tl_config.json``, ``model.safetensors`` with HookedTransformer's names and, if the
model has a tokenizer, the tokenizer's files. Weights are loaded without folding or centring, so
that the model can be trained further. If TransformerLens has no HookedTransformer, the folder loads
as a bridge around the equivalent model of `transformers`.

That model is of one of three families, which exactly cover what most HookedTransformers compute:
GPT-2 (learned positions, LayerNorm), GPT-NeoX (rotary positions, LayerNorm) and Llama (rotary
positions, RMS norms, a gated MLP). Everything else is refused: a nearly equal model would silently
give wrong numbers.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sparse_tl.backend.core.architecture import (
    CONFIG_FILE,
    dtype_named,
    model_config,
    read_architecture,
)
from sparse_tl.backend.core.points import HookedTransformer, Model
from sparse_tl.backend.loading.bridges import boot
from sparse_tl.backend.loading.hugging_face import check_tokenizer, has_tokenizer, read_tokenizer
from sparse_tl.storage.files import read_tensors, write_json, write_tensors

try:
    from transformer_lens import HookedTransformerConfig
except ImportError:  # removed in version 4
    HookedTransformerConfig = None

WEIGHTS_FILE = "model.safetensors"
_BUFFERS = ("mask", "IGNORE", "rotary_sin", "rotary_cos")


def build_model(
    config: dict[str, Any], *, tokenizer: Any = None, device: str | None = None
) -> HookedTransformer:
    """Build a HookedTransformer from configuration fields, by default with random weights.

    Args:
        config: fields of `HookedTransformerConfig`; ``dtype`` may be a name such as "float32".
        tokenizer: a Hugging Face tokenizer.
        device: device of the model; a GPU by default if there is one.

    Raises:
        ValueError: a dtype is unknown, or this version of TransformerLens has no HookedTransformer.
    """
    if HookedTransformerConfig is None:
        raise ValueError("transformer-lens 3.9 builds HookedTransformers; later versions have none")
    fields = dict(config)
    if isinstance(fields.get("dtype"), str):
        fields["dtype"] = dtype_named(fields["dtype"])
    if device is not None:
        fields["device"] = device
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="HookedTransformer is deprecated")
        made = HookedTransformerConfig.from_dict(fields)  # type: ignore[missing-attribute]
        return HookedTransformer(made, tokenizer=tokenizer)


def save_hooked(model: HookedTransformer, folder: Path) -> None:
    """Write configuration and weights to an existing folder."""
    write_json(folder / CONFIG_FILE, model_config(model))
    weights = {name: tensor for name, tensor in model.state_dict().items() if not _is_buffer(name)}
    write_tensors(folder / WEIGHTS_FILE, weights)


def _is_buffer(name: str) -> bool:
    return name.rpartition(".")[2] in _BUFFERS


def load_hooked(folder: Path, *, device: str, dtype: torch.dtype | None = None) -> Model:
    """Load the model from a folder that `save_hooked` wrote, ignoring other files."""
    config, file = read_architecture(folder / CONFIG_FILE), folder / WEIGHTS_FILE
    weights = read_tensors(file)
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    tokenizer = None
    if has_tokenizer(folder):
        tokenizer = read_tokenizer(folder, adds_bos=config.get("tokenizer_prepends_bos", True))
        check_tokenizer(tokenizer, config.get("d_vocab", len(tokenizer)))
    if HookedTransformerConfig is None:
        try:
            plain: Any = _as_transformers(config, weights)
        except ValueError as error:
            raise ValueError(f"cannot load {folder}: {error}") from error
        bridge = boot(plain.to(device), tokenizer, name=config.get("model_name", folder.name))
        bridge.cfg.default_prepend_bos = config.get("default_prepend_bos", True)
        return bridge
    model = build_model({**config, "init_weights": False}, device=device)
    if tokenizer is not None:
        _set_tokenizer(model, tokenizer)
    outcome = model.load_state_dict(weights, strict=False)
    missing = [name for name in outcome.missing_keys if not _is_buffer(name)]
    if missing or outcome.unexpected_keys:
        raise ValueError(
            f"the weights in {file} do not fit their {CONFIG_FILE}: missing {missing[:5]}, "
            f"unexpected {outcome.unexpected_keys[:5]!s:.200}"
        )
    return model


def _set_tokenizer(model: HookedTransformer, tokenizer: Any) -> None:
    """Give a model its tokenizer unchanged.

    TransformerLens reloads tokenizers that have a BOS token but do not add it, from their path and
    with all settings in their files, so that BOS is added. That would run code named in the files,
    and a model trained without BOS would lose the last token of prompts that fill its context.
    """
    bos = tokenizer.bos_token
    if not tokenizer.init_kwargs.get("add_bos_token"):
        tokenizer.bos_token = None
    model.set_tokenizer(tokenizer)
    tokenizer.bos_token = bos


# ---- the equivalent model of transformers --------------------------------------------------------

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
_SLOTS, _BIASES = "attn.W_Q attn.W_K attn.W_V", "attn.b_Q attn.b_K attn.b_V"
_BLOCKS = {
    "gpt2": {
        "ln_1.weight": ("ln1.w", "m -> m"),
        "ln_1.bias": ("ln1.b", "m -> m"),
        "attn.c_attn.weight": (_SLOTS, "s h m e -> m (s h e)"),
        "attn.c_attn.bias": (_BIASES, "s h e -> (s h e)"),
        "attn.c_proj.weight": ("attn.W_O", "h e m -> (h e) m"),
        "attn.c_proj.bias": ("attn.b_O", "m -> m"),
        "ln_2.weight": ("ln2.w", "m -> m"),
        "ln_2.bias": ("ln2.b", "m -> m"),
        "mlp.c_fc.weight": ("mlp.W_in", "m f -> m f"),
        "mlp.c_fc.bias": ("mlp.b_in", "f -> f"),
        "mlp.c_proj.weight": ("mlp.W_out", "f m -> f m"),
        "mlp.c_proj.bias": ("mlp.b_out", "m -> m"),
    },
    "gpt_neox": {
        "input_layernorm.weight": ("ln1.w", "m -> m"),
        "input_layernorm.bias": ("ln1.b", "m -> m"),
        "attention.query_key_value.weight": (_SLOTS, "s h m e -> (h s e) m"),
        "attention.query_key_value.bias": (_BIASES, "s h e -> (h s e)"),
        "attention.dense.weight": ("attn.W_O", "h e m -> m (h e)"),
        "attention.dense.bias": ("attn.b_O", "m -> m"),
        "post_attention_layernorm.weight": ("ln2.w", "m -> m"),
        "post_attention_layernorm.bias": ("ln2.b", "m -> m"),
        "mlp.dense_h_to_4h.weight": ("mlp.W_in", "m f -> f m"),
        "mlp.dense_h_to_4h.bias": ("mlp.b_in", "f -> f"),
        "mlp.dense_4h_to_h.weight": ("mlp.W_out", "f m -> m f"),
        "mlp.dense_4h_to_h.bias": ("mlp.b_out", "m -> m"),
    },
    "llama": {
        "input_layernorm.weight": ("ln1.w", "m -> m"),
        "self_attn.q_proj.weight": ("attn.W_Q", "h m e -> (h e) m"),
        "self_attn.q_proj.bias": ("attn.b_Q", "h e -> (h e)"),
        "self_attn.k_proj.weight": ("attn.W_K", "g m e -> (g e) m"),
        "self_attn.k_proj.bias": ("attn.b_K", "g e -> (g e)"),
        "self_attn.v_proj.weight": ("attn.W_V", "g m e -> (g e) m"),
        "self_attn.v_proj.bias": ("attn.b_V", "g e -> (g e)"),
        "self_attn.o_proj.weight": ("attn.W_O", "h e m -> m (h e)"),
        "self_attn.o_proj.bias": ("attn.b_O", "m -> m"),
        "post_attention_layernorm.weight": ("ln2.w", "m -> m"),
        "mlp.up_proj.weight": ("mlp.W_in", "m f -> f m"),
        "mlp.gate_proj.weight": ("mlp.W_gate", "m f -> f m"),
        "mlp.down_proj.weight": ("mlp.W_out", "f m -> m f"),
        "mlp.down_proj.bias": ("mlp.b_out", "m -> m"),
    },
}
"""By name in each family, the HookedTransformer weights of a block and how their axes are arranged:
s slot (q, k, v), h head, g key-value head, m d_model, e d_head, f d_mlp, v d_vocab, p n_ctx."""
_AROUND = {
    "gpt2": ("transformer.wte", "transformer.h", "transformer.ln_f"),
    "gpt_neox": ("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm"),
    "llama": ("model.embed_tokens", "model.layers", "model.norm"),
}
"""Names of the embedding, the blocks and the final norm."""
_SIZES = {
    "h": "n_heads",
    "g": "n_key_value_heads",
    "m": "d_model",
    "e": "d_head",
    "f": "d_mlp",
    "v": "d_vocab",
    "p": "n_ctx",
}


def _as_transformers(fields: dict[str, Any], weights: dict[str, Tensor]) -> PreTrainedModel:
    """The model defined by fields of `HookedTransformerConfig` and weights."""
    said = _completed(fields)
    family = _family(said)
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
                **_config(family, said),
            ),
            attn_implementation="eager",
            dtype=said["dtype"],
        )
    model.load_state_dict(_converted(family, said, weights), strict=True)
    return model.eval()


def _completed(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, completed with TransformerLens's defaults."""
    said = {**_ABSENT, "gated_mlp": False, "parallel_attn_mlp": False, "final_rms": False, **fields}
    said["dtype"] = getattr(torch, str(said.get("dtype", "float32")))
    # Norms without weights equal norms with weights of one.
    said["normalization_type"] = str(said.get("normalization_type", "LN")).removesuffix("Pre")
    defaults = {
        "positional_embedding_type": "standard",
        "n_heads": said["d_model"] // said["d_head"],
        "d_mlp": 4 * said["d_model"],
        "eps": 1e-5,
        "attn_scale": math.sqrt(said["d_head"]),
        "rotary_dim": said["d_head"],
        "rotary_base": 10000,
        "rotary_adjacent_pairs": False,
        "d_vocab_out": said.get("d_vocab"),
    }
    said = defaults | said
    return {"n_key_value_heads": said["n_heads"], **said}


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
        "this version of transformer-lens has no HookedTransformer (3.9 has), and neither GPT-2 "
        f"nor GPT-NeoX nor Llama can represent {reason}"
    )


def _config(family: str, said: dict[str, Any]) -> dict[str, Any]:
    """What only this family's configuration has."""
    if family == "gpt2":
        return {
            "n_inner": said["d_mlp"],
            "activation_function": said["act_fn"],
            "layer_norm_epsilon": said["eps"],
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        }
    rope = {"rope_type": "default", "rope_theta": float(said["rotary_base"])}
    config = {"intermediate_size": said["d_mlp"], "hidden_act": said["act_fn"]}
    if family == "gpt_neox":
        rope["partial_rotary_factor"] = said["rotary_dim"] / said["d_head"]
        return {
            **config,
            "layer_norm_eps": said["eps"],
            "use_parallel_residual": said["parallel_attn_mlp"],
            "rope_parameters": rope,
        }
    if said["rotary_dim"] != said["d_head"]:
        raise ValueError(f"Llama rotates whole heads, not {said['rotary_dim']} of their dimensions")
    return {
        **config,
        "rms_norm_eps": said["eps"],
        "num_key_value_heads": said["n_key_value_heads"],
        "head_dim": said["d_head"],
        "rope_parameters": rope,
        "attention_bias": True,
        "mlp_bias": True,
    }


def _converted(family: str, said: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights by the family's names."""
    unread = set(weights)

    def named(names: str, pattern: str) -> Tensor:
        """Weights with their axes arranged; missing biases are zeros, missing norm weights ones."""
        axes = pattern.partition(" ->")[0].removeprefix("s ").split()
        shape = tuple(said[_SIZES[axis]] for axis in axes)
        found = []
        for name in names.split():
            parent, _, leaf = name.rpartition(".")
            grouped = f"{parent}._{leaf}"  # k and v with fewer heads than queries
            name = grouped if grouped in weights else name
            unread.discard(name)
            default = torch.full(shape, float(leaf == "w")) if leaf[0] in "wb" else None
            tensor = weights.get(name, default)
            if tensor is None or tuple(tensor.shape) != shape:
                got = None if tensor is None else tuple(tensor.shape)
                raise ValueError(f"{name} has the shape {got}, where the fields say {shape}")
            found.append(_in_halves(tensor, leaf, said))
        return rearrange(torch.stack(found) if len(found) > 1 else found[0], pattern)

    embedding, blocks, norm = _AROUND[family]
    converted = {f"{embedding}.weight": named("embed.W_E", "v m -> v m")}
    if family == "gpt2":
        converted["transformer.wpe.weight"] = named("pos_embed.W_pos", "p m -> p m")
    for layer in range(said["n_layers"]):
        for theirs, (ours, pattern) in _BLOCKS[family].items():
            names = " ".join(f"blocks.{layer}.{name}" for name in ours.split())
            converted[f"{blocks}.{layer}.{theirs}"] = named(names, pattern)
        if family == "llama":
            # HookedTransformer adds b_in after the product of both, not to the output of W_in.
            inner, mlp = named(f"blocks.{layer}.mlp.b_in", "f -> f"), f"{blocks}.{layer}.mlp"
            moved = converted[f"{mlp}.down_proj.weight"] @ inner
            converted[f"{mlp}.down_proj.bias"] = converted[f"{mlp}.down_proj.bias"] + moved
            for part in ("up", "gate"):
                converted[f"{mlp}.{part}_proj.bias"] = torch.zeros_like(inner)
    weight, unembedding = named("ln_final.w", "m -> m"), named("unembed.W_U", "m v -> m v")
    bias = named("unembed.b_U", "v -> v")
    if family != "llama":
        shift = named("ln_final.b", "m -> m")
        weight, unembedding, shift = _absorbed(weight, unembedding, shift, bias)
        converted[f"{norm}.bias"] = shift
    elif bias.any():
        raise ValueError("Llama's RMS norms have no place for the bias b_U of the unembedding")
    converted |= {f"{norm}.weight": weight, "lm_head.weight": unembedding.T}
    if unread:
        raise ValueError(f"this architecture has no place for the weights {sorted(unread)[:5]}")
    return converted


def _in_halves(tensor: Tensor, leaf: str, said: dict[str, Any]) -> Tensor:
    """Queries and keys in the order of `transformers`, on which the scores do not depend.

    Pairs rotated together may be (0, 1), (2, 3), .. in HookedTransformer; in transformers they are
    (0, n/2), (1, n/2+1), ..
    """
    rotary = said["positional_embedding_type"] == "rotary" and said["rotary_adjacent_pairs"]
    if not rotary or leaf not in ("W_Q", "W_K", "b_Q", "b_K"):
        return tensor
    turned, rest = tensor[..., : said["rotary_dim"]], tensor[..., said["rotary_dim"] :]
    return torch.cat([turned[..., ::2], turned[..., 1::2], rest], dim=-1)


def _absorbed(
    norm: Tensor, unembedding: Tensor, shift: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The final LayerNorm's weight, an unembedding without a bias, and the LayerNorm's bias.

    A bias b_U is absorbed into both. LayerNorm's standardised x sums to 0, so adding a constant to
    a column of the unembedding changes nothing. With the norm's weight and bias set to 1, the
    logits are ``(x + 1) A``, which equals ``x (w W_U) + (b W_U + b_U)`` for
    ``A = w W_U - mean(w W_U) + (b W_U + b_U) / d_model``.
    """
    if not bias.any():
        return norm, unembedding, shift
    scaled = norm.double()[:, None] * unembedding.double()
    constant = shift.double() @ unembedding.double() + bias.double()
    joint = scaled - scaled.mean(dim=0) + constant / len(unembedding)
    return torch.ones_like(norm), joint.to(unembedding.dtype), torch.ones_like(norm)
