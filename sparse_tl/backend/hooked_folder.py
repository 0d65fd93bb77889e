"""HookedTransformers, built from configuration fields or stored as a folder.

A folder holds ``tl_config.json``, ``model.safetensors`` with HookedTransformer's names and, if the
model has a tokenizer, the tokenizer's files. Weights are loaded without folding or centring, so
that the model can be trained further. A folder may be untrusted: TransformerLens's configuration
also names tokenizers to fetch, code to trust, devices and seeds, none of which are read.

If TransformerLens has no HookedTransformer, the folder loads as a bridge around the equivalent
model of `transformers`. That model is of one of three families, which exactly cover what most
HookedTransformers compute: GPT-2 (learned positions, LayerNorm), GPT-NeoX (rotary positions,
LayerNorm) and Llama (rotary positions, RMS norms, a gated MLP). Everything else is refused: a
nearly equal model would silently give wrong numbers.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sparse_tl.backend.bridges import boot
from sparse_tl.backend.devices import dtype_named
from sparse_tl.backend.hook_points import HookedTransformer, Model
from sparse_tl.backend.hugging_face import check_tokenizer, has_tokenizer, read_tokenizer
from sparse_tl.storage.files import read_json, read_tensors, write_json, write_tensors

try:
    from transformer_lens import HookedTransformerConfig
except ImportError:  # removed in version 4
    HookedTransformerConfig = None

CONFIG_FILE, WEIGHTS_FILE = "tl_config.json", "model.safetensors"
_BUFFERS = ("mask", "IGNORE", "rotary_sin", "rotary_cos")
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
    """The fields of a `tl_config.json` that describe the architecture."""
    config = read_json(file)
    fields = {name: value for name, value in config.items() if name not in _IGNORED.split()}
    unknown, missing = fields.keys() - _FIELDS, set(_REQUIRED) - fields.keys()
    if unknown or missing:
        raise ValueError(
            f"{file} does not describe an architecture: unknown fields {sorted(unknown)[:5]}, "
            f"missing {sorted(missing)}"
        )
    return fields


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
_ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu")
_FAMILIES = ("gpt2", "gpt_neox", "llama")
"""The columns of the following tables."""
_NEEDED = {
    "positional_embedding_type": ("standard", "rotary", "rotary"),
    "normalization_type": ("LN", "LN", "RMS"),
    "gated_mlp": (False, False, True),
    "parallel_attn_mlp": (False, None, False),
    "final_rms": (False, False, None),
}
"""The value of a field; None where any will do."""
_CONFIG = {
    "d_mlp": ("n_inner", "intermediate_size", "intermediate_size"),
    "act_fn": ("activation_function", "hidden_act", "hidden_act"),
    "eps": ("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps"),
    "parallel_attn_mlp": (None, "use_parallel_residual", None),
    "n_key_value_heads": (None, None, "num_key_value_heads"),
    "d_head": (None, None, "head_dim"),
}
"""The name of a field."""
_PARTS = {
    "embed": ("transformer.wte", "gpt_neox.embed_in", "model.embed_tokens"),
    "blocks": ("transformer.h", "gpt_neox.layers", "model.layers"),
    "ln_final": ("transformer.ln_f", "gpt_neox.final_layer_norm", "model.norm"),
    "ln1": ("ln_1", "input_layernorm", "input_layernorm"),
    "QKV": ("attn.c_attn", "attention.query_key_value", None),
    "Q": (None, None, "self_attn.q_proj"),
    "K": (None, None, "self_attn.k_proj"),
    "V": (None, None, "self_attn.v_proj"),
    "O": ("attn.c_proj", "attention.dense", "self_attn.o_proj"),
    "ln2": ("ln_2", "post_attention_layernorm", "post_attention_layernorm"),
    "in": ("mlp.c_fc", "mlp.dense_h_to_4h", "mlp.up_proj"),
    "gate": (None, None, "mlp.gate_proj"),
    "out": ("mlp.c_proj", "mlp.dense_4h_to_h", "mlp.down_proj"),
}
"""The name of a part of the model, or of a block."""
_SIZES = {
    "head": "n_heads",
    "group": "n_key_value_heads",
    "d_model": "d_model",
    "d_head": "d_head",
    "d_mlp": "d_mlp",
    "vocab": "d_vocab",
    "pos": "n_ctx",
}
"""The field with the size of each axis."""


def _as_transformers(fields: dict[str, Any], weights: dict[str, Tensor]) -> PreTrainedModel:
    """The model defined by fields of `HookedTransformerConfig` and weights."""
    said = _completed(fields)
    name = _family(said)
    names = _column(_CONFIG, name)
    config: dict[str, Any] = {theirs: said[field] for field, theirs in names.items()}
    if name == "gpt2":
        config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    else:
        rope = {"rope_type": "default", "rope_theta": float(said["rotary_base"])}
        if name == "gpt_neox":
            rope["partial_rotary_factor"] = said["rotary_dim"] / said["d_head"]
        else:
            config |= {"attention_bias": True, "mlp_bias": True}
        config["rope_parameters"] = rope
    with torch.random.fork_rng(devices=[]):  # its initial random weights are discarded
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(
                name,
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
            dtype=dtype_named(said["dtype"]),
        )
    model.load_state_dict(_converted(name, said, weights), strict=True)
    return model.eval()


def _completed(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, completed with TransformerLens's defaults."""
    n_heads = fields["d_model"] // fields["d_head"]
    defaults = {
        **_ABSENT,
        **dict.fromkeys(("gated_mlp", "parallel_attn_mlp", "final_rms"), False),
        "dtype": "float32",
        "normalization_type": "LN",
        "positional_embedding_type": "standard",
        "n_heads": n_heads,
        "n_key_value_heads": fields.get("n_heads", n_heads),
        "d_mlp": 4 * fields["d_model"],
        "d_vocab_out": fields.get("d_vocab"),
        "eps": 1e-5,
        "attn_scale": math.sqrt(fields["d_head"]),
        "rotary_dim": fields["d_head"],
        "rotary_base": 10000,
        "rotary_adjacent_pairs": False,
    }
    said = defaults | fields
    # Norms without weights equal norms with weights of one.
    return {**said, "normalization_type": str(said["normalization_type"]).removesuffix("Pre")}


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
    n_heads, d_head, d_model = said["n_heads"], said["d_head"], said["d_model"]
    for name in _FAMILIES:
        fits = n_heads * d_head == d_model and n_heads == said["n_key_value_heads"]
        if name == "llama":
            fits = d_model % n_heads == 0 and said["rotary_dim"] == d_head
        alike = all(said[field] == value for field, value in _column(_NEEDED, name).items())
        if fits and alike and not strange:
            return name
    shown = (*sorted(_NEEDED), "n_heads", "d_head", "d_model", "rotary_dim")
    reason = strange or {field: said[field] for field in shown}
    raise ValueError(
        "this version of transformer-lens has no HookedTransformer (3.9 has), and neither GPT-2 "
        f"nor GPT-NeoX nor Llama can represent {reason}"
    )


def _column(table: dict[str, tuple[Any, ...]], family: str) -> dict[str, Any]:
    """What a table says of one family."""
    column = {row: values[_FAMILIES.index(family)] for row, values in table.items()}
    return {row: value for row, value in column.items() if value is not None}


def _converted(name: str, said: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights by the family's names."""
    unread, parts, is_llama = set(weights), _column(_PARTS, name), name == "llama"

    def read(where: str, axes: str) -> Tensor:
        """A weight; missing biases are zeros, and missing weights of norms ones."""
        shape = tuple(said[_SIZES[axis]] for axis in axes.split())
        parent, _, leaf = where.rpartition(".")
        grouped = f"{parent}._{leaf}"  # k and v with fewer heads than queries
        where = grouped if grouped in weights else where
        unread.discard(where)
        default = torch.full(shape, float(leaf == "w")) if leaf[0] in "wb" else None
        tensor = weights.get(where, default)
        if tensor is None or tuple(tensor.shape) != shape:
            got = None if tensor is None else tuple(tensor.shape)
            raise ValueError(f"{where} has the shape {got}, where the fields say {shape}")
        return tensor

    def norm(where: str) -> list[Tensor]:
        return [read(f"{where}.{leaf}", "d_model") for leaf in ("w" if is_llama else "wb")]

    def slot(where: str, letter: str) -> list[Tensor]:
        """Weight ``[head, d_head, d_model]`` and bias ``[head, d_head]`` of q, k or v."""
        heads = "head" if letter == "Q" else "group"
        found = [
            read(f"{where}.W_{letter}", f"{heads} d_model d_head"),
            read(f"{where}.b_{letter}", f"{heads} d_head"),
        ]
        if letter != "V":
            found = [_in_halves(tensor, said) for tensor in found]
        return [found[0].transpose(1, 2), found[1]]

    converted = {f"{parts['embed']}.weight": read("embed.W_E", "vocab d_model")}
    if name == "gpt2":
        converted["transformer.wpe.weight"] = read("pos_embed.W_pos", "pos d_model")
    for layer in range(said["n_layers"]):
        at, mlp = f"blocks.{layer}.attn", f"blocks.{layer}.mlp"
        slots = {letter: slot(at, letter) for letter in "QKV"}
        inner, outer = read(f"{mlp}.b_in", "d_mlp"), read(f"{mlp}.b_out", "d_model")
        into = {"in": read(f"{mlp}.W_in", "d_model d_mlp").T}
        out = read(f"{mlp}.W_out", "d_mlp d_model").T
        if is_llama:
            # HookedTransformer adds b_in after the product of both, not to the output of W_in.
            inner, outer = torch.zeros_like(inner), outer + out @ inner
            into["gate"] = read(f"{mlp}.W_gate", "d_model d_mlp").T
        else:  # one matrix for all three, in GPT-NeoX head by head
            by_kind, axis = zip(*slots.values(), strict=True), int(name == "gpt_neox")
            slots = {"QKV": [torch.stack(some, dim=axis).flatten(0, 1) for some in by_kind]}
        heads = read(f"{at}.W_O", "head d_head d_model").flatten(0, 1).T
        made = {
            "ln1": norm(f"blocks.{layer}.ln1"),
            **{part: [tensor.flatten(0, 1) for tensor in some] for part, some in slots.items()},
            "O": [heads, read(f"{at}.b_O", "d_model")],
            "ln2": norm(f"blocks.{layer}.ln2"),
            **{part: [weight, inner] for part, weight in into.items()},
            "out": [out, outer],
        }
        for part, tensors in made.items():
            for kind, tensor in zip(("weight", "bias"), tensors, strict=False):
                theirs = f"{parts['blocks']}.{layer}.{parts[part]}.{kind}"
                converted[theirs] = tensor.T if name == "gpt2" and tensor.ndim == 2 else tensor
    unembedding, bias = read("unembed.W_U", "d_model vocab"), read("unembed.b_U", "vocab")
    final = norm("ln_final")
    if not is_llama:
        final[0], unembedding, final[1] = _absorbed(final[0], unembedding, final[1], bias)
        converted[f"{parts['ln_final']}.bias"] = final[1]
    elif bias.any():
        raise ValueError("Llama's RMS norms have no place for the bias b_U of the unembedding")
    converted |= {f"{parts['ln_final']}.weight": final[0], "lm_head.weight": unembedding.T}
    if unread:
        raise ValueError(f"this architecture has no place for the weights {sorted(unread)[:5]}")
    return converted


def _in_halves(tensor: Tensor, said: dict[str, Any]) -> Tensor:
    """Queries and keys in the order of `transformers`, on which the scores do not depend.

    Pairs rotated together may be (0, 1), (2, 3), .. in HookedTransformer; in transformers they are
    (0, n/2), (1, n/2+1), ..
    """
    if not (said["positional_embedding_type"] == "rotary" and said["rotary_adjacent_pairs"]):
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
