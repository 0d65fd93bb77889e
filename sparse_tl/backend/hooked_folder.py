"""HookedTransformers, built from configuration fields or stored as a folder.

A folder holds ``tl_config.json``, ``model.safetensors`` with HookedTransformer's names and, if the
model has a tokenizer, the tokenizer's files. Weights are loaded without folding or centring, so
that the model can be trained further. A folder may be untrusted: TransformerLens's configuration
also names tokenizers to fetch, code to trust, devices and seeds, none of which are read.

If TransformerLens has no HookedTransformer, the folder loads as a bridge around the equivalent
model of `transformers`: a GPT-2 (learned positions, LayerNorm), which is what HookedTransformer's
defaults describe, or a Llama (rotary positions, RMS norms, a gated MLP). Everything else is
refused: a nearly equal model would silently give wrong numbers.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel
from transformers.activations import ACT2FN

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
_NOT_ARCHITECTURE = {
    *("device", "n_devices", "seed", "init_mode", "init_weights", "initializer_range", "n_params"),
    *("tokenizer_name", "trust_remote_code", "load_in_4bit", "quantization_method"),
}
"""Fields that do not affect what a model computes; they are neither saved nor read."""


def build_model(config: dict[str, Any], *, device: str | None = None) -> HookedTransformer:
    """Build a HookedTransformer from configuration fields, by default with random weights.

    Args:
        config: fields of `HookedTransformerConfig`; ``dtype`` may be a name such as "float32".
        device: device of the model; a GPU by default if there is one.

    Raises:
        ValueError: a dtype or a field is unknown, or this version of TransformerLens has no
            HookedTransformer.
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
        try:
            made = HookedTransformerConfig.from_dict(fields)  # type: ignore[missing-attribute]
        except TypeError as error:  # a field is missing or unknown
            raise ValueError(f"the fields describe no HookedTransformer: {error}") from error
        return HookedTransformer(made)


def save_hooked(model: HookedTransformer, folder: Path) -> None:
    """Write configuration and weights to an existing folder."""
    write_json(folder / CONFIG_FILE, model_config(model))
    weights = {name: tensor for name, tensor in model.state_dict().items() if not _is_buffer(name)}
    write_tensors(folder / WEIGHTS_FILE, weights)


def _is_buffer(name: str) -> bool:
    return name.rpartition(".")[2] in _BUFFERS


def load_hooked(folder: Path, *, device: str, dtype: torch.dtype | None = None) -> Model:
    """Load the model from a folder that `save_hooked` wrote, ignoring other files."""
    config, file = read_json(folder / CONFIG_FILE), folder / WEIGHTS_FILE
    config = {name: value for name, value in config.items() if name not in _NOT_ARCHITECTURE}
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
        except (ValueError, KeyError, RuntimeError) as error:
            raise ValueError(f"cannot load {folder}: {type(error).__name__}: {error}") from error
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


def model_config(model: HookedTransformer) -> dict[str, Any]:
    """The model's architecture as JSON-serialisable fields."""
    kept: dict[str, Any] = {}
    for name, value in model.cfg.to_dict().items():
        # None is TransformerLens's default, except for normalisation, where it means no norm.
        if name in _NOT_ARCHITECTURE or (value is None and name != "normalization_type"):
            continue
        if isinstance(value, torch.dtype):
            kept[name] = str(value).removeprefix("torch.")
        else:
            kept[name] = value.item() if isinstance(value, np.generic) else value
    return kept


# ---- the equivalent model of transformers --------------------------------------------------------

_ABSENT: dict[str, Any] = {
    "attention_dir": "causal",
    "attn_only": False,
    "attn_scores_soft_cap": -1.0,
    "clip_qkv": None,
    "num_experts": None,
    "output_logits_soft_cap": -1.0,
    "parallel_attn_mlp": False,
    "post_embedding_ln": False,
    "rotary_scaling_factor": 1.0,
    "scale_attn_by_inverse_layer_idx": False,
    **dict.fromkeys(("use_NTK_by_parts_rope", "use_dynamic_ntk_rope", "use_yarn_rope"), False),
    "use_attention_sinks": False,
    "use_attn_scale": True,
    "use_local_attn": False,
    "use_logn_attn": False,
    "use_normalization_before_and_after": False,
    "use_qk_norm": False,
}
"""Features that neither GPT-2 nor Llama has: the value of each field without the feature."""


def _as_transformers(fields: dict[str, Any], weights: dict[str, Tensor]) -> PreTrainedModel:
    """The GPT-2 or Llama defined by fields of `HookedTransformerConfig` and weights."""
    d_model, d_head, d_vocab = (fields[name] for name in ("d_model", "d_head", "d_vocab"))
    is_llama = fields.get("positional_embedding_type") == "rotary"
    # Norms without weights equal norms with weights of one.
    norms = str(fields.get("normalization_type", "LN")).removesuffix("Pre")
    said: dict[str, Any] = {"n_heads": d_model // d_head, **fields, "normalization_type": norms}
    said = {"n_key_value_heads": said["n_heads"], **said}
    wanted = {
        **_ABSENT,
        "act_fn": said["act_fn"] if said["act_fn"] in ACT2FN else None,
        "attn_scale": math.sqrt(d_head),
        "d_vocab_out": d_vocab,
        "gated_mlp": is_llama,
    }
    if is_llama:
        wanted |= {"normalization_type": "RMS", "rotary_dim": d_head}
    else:
        wanted |= {"normalization_type": "LN", "positional_embedding_type": "standard"}
        wanted |= {"final_rms": False, "n_heads": d_model // d_head}
        wanted |= {"n_key_value_heads": d_model // d_head}
    strange = {name: said[name] for name, value in wanted.items() if said.get(name, value) != value}
    if strange:
        raise ValueError(
            "this version of transformer-lens has no HookedTransformer (3.9 has), and neither "
            f"GPT-2 nor Llama can represent {strange}"
        )
    sizes: dict[str, Any] = {
        "vocab_size": d_vocab,
        "num_hidden_layers": said["n_layers"],
        "hidden_size": d_model,
        "num_attention_heads": said["n_heads"],
        "max_position_embeddings": said["n_ctx"],
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
        "tie_word_embeddings": False,
    }
    eps, d_mlp, left = said.get("eps", 1e-5), said.get("d_mlp", 4 * d_model), dict(weights)
    if is_llama:
        theta = float(said.get("rotary_base", 10_000))
        config: Any = LlamaConfig(
            **sizes,
            num_key_value_heads=said["n_key_value_heads"],
            head_dim=d_head,
            intermediate_size=d_mlp,
            hidden_act=said["act_fn"],
            rms_norm_eps=eps,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
        )
    else:
        config = GPT2Config(
            **sizes,
            n_inner=d_mlp,
            activation_function=said["act_fn"],
            layer_norm_epsilon=eps,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    converted = (_llama if is_llama else _gpt2)(said, left)
    if left:
        raise ValueError(f"this architecture has no place for the weights {sorted(left)[:5]}")
    with torch.random.fork_rng(devices=[]):  # its initial random weights are discarded
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype_named(said.get("dtype", "float32"))
        )
    model.load_state_dict(converted, strict=True)
    return model.eval()


def _gpt2(said: dict[str, Any], left: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights by GPT-2's names; those that are left over stay in `left`."""
    found = {"wte.weight": left.pop("embed.W_E"), "wpe.weight": left.pop("pos_embed.W_pos")}
    sizes = {"head": said["n_heads"], "d_head": said["d_head"]}

    def take_norm(ours: str, theirs: str) -> None:
        plain = torch.ones(said["d_model"])
        found[f"{theirs}.weight"] = left.pop(f"{ours}.w", plain)
        found[f"{theirs}.bias"] = left.pop(f"{ours}.b", 0 * plain)

    for layer in range(said["n_layers"]):
        ours, theirs = f"blocks.{layer}", f"h.{layer}"
        weight, bias = (
            torch.stack([left.pop(f"{ours}.attn.{kind}_{slot}") for slot in "QKV"]) for kind in "Wb"
        )
        out = left.pop(f"{ours}.attn.W_O")
        found |= {
            f"{theirs}.attn.c_attn.weight": rearrange(
                weight, "slot head d_model d_head -> d_model (slot head d_head)", **sizes
            ),
            f"{theirs}.attn.c_attn.bias": rearrange(
                bias, "slot head d_head -> (slot head d_head)", **sizes
            ),
            f"{theirs}.attn.c_proj.weight": rearrange(
                out, "head d_head d_model -> (head d_head) d_model", **sizes
            ),
            f"{theirs}.attn.c_proj.bias": left.pop(f"{ours}.attn.b_O"),
            f"{theirs}.mlp.c_fc.weight": left.pop(f"{ours}.mlp.W_in"),
            f"{theirs}.mlp.c_fc.bias": left.pop(f"{ours}.mlp.b_in"),
            f"{theirs}.mlp.c_proj.weight": left.pop(f"{ours}.mlp.W_out"),
            f"{theirs}.mlp.c_proj.bias": left.pop(f"{ours}.mlp.b_out"),
        }
        take_norm(f"{ours}.ln1", f"{theirs}.ln_1")
        take_norm(f"{ours}.ln2", f"{theirs}.ln_2")
    take_norm("ln_final", "ln_f")
    norm, shift = found["ln_f.weight"], found["ln_f.bias"]
    unembedding, bias = left.pop("unembed.W_U"), left.pop("unembed.b_U")
    if bias.any():
        # LayerNorm's standardised x sums to 0, so adding a constant to a column of the unembedding
        # changes nothing. With the norm's weight w and bias b set to 1, the logits are (x + 1) A,
        # which equals x (w W_U) + (b W_U + b_U) for
        # A = w W_U - mean(w W_U) + (b W_U + b_U) / d_model.
        scaled = norm.double()[:, None] * unembedding.double()
        constant = shift.double() @ unembedding.double() + bias.double()
        joint = scaled - scaled.mean(dim=0) + constant / len(unembedding)
        unembedding = joint.to(unembedding.dtype)
        found |= dict.fromkeys(("ln_f.weight", "ln_f.bias"), torch.ones_like(norm))
    found = {f"transformer.{name}": tensor for name, tensor in found.items()}
    return {**found, "lm_head.weight": unembedding.T}


def _llama(said: dict[str, Any], left: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights by Llama's names; those that are left over stay in `left`."""
    found = {"model.embed_tokens.weight": left.pop("embed.W_E")}

    def take_norm(ours: str, theirs: str) -> None:
        found[f"{theirs}.weight"] = left.pop(f"{ours}.w", torch.ones(said["d_model"]))

    for layer in range(said["n_layers"]):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        for slot, heads in (("Q", "n_heads"), *((slot, "n_key_value_heads") for slot in "KV")):
            of_group = "_" * (f"{ours}.attn._W_{slot}" in left)  # fewer heads than queries
            weight, bias = (left.pop(f"{ours}.attn.{of_group}{kind}_{slot}") for kind in "Wb")
            if slot != "V" and said.get("rotary_adjacent_pairs"):
                # Pairs rotated together are (0, 1), (2, 3), ..; Llama's are (0, n/2), (1, n/2+1),
                # .. The scores do not depend on the order.
                weight, bias = (
                    torch.cat([w[..., ::2], w[..., 1::2]], dim=-1) for w in (weight, bias)
                )
            there, sizes = f"{theirs}.self_attn.{slot.lower()}_proj", {"head": said[heads]}
            found[f"{there}.weight"] = rearrange(
                weight, "head d_model d_head -> (head d_head) d_model", **sizes
            )
            found[f"{there}.bias"] = rearrange(bias, "head d_head -> (head d_head)", **sizes)
        out = left.pop(f"{ours}.attn.W_O")
        inner, outer = left.pop(f"{ours}.mlp.b_in"), left.pop(f"{ours}.mlp.W_out").T
        # HookedTransformer adds b_in after the product of both, not to the output of W_in.
        found |= {
            f"{theirs}.self_attn.o_proj.weight": rearrange(
                out, "head d_head d_model -> d_model (head d_head)", head=said["n_heads"]
            ),
            f"{theirs}.self_attn.o_proj.bias": left.pop(f"{ours}.attn.b_O"),
            f"{theirs}.mlp.gate_proj.weight": left.pop(f"{ours}.mlp.W_gate").T,
            f"{theirs}.mlp.gate_proj.bias": torch.zeros_like(inner),
            f"{theirs}.mlp.up_proj.weight": left.pop(f"{ours}.mlp.W_in").T,
            f"{theirs}.mlp.up_proj.bias": torch.zeros_like(inner),
            f"{theirs}.mlp.down_proj.weight": outer,
            f"{theirs}.mlp.down_proj.bias": left.pop(f"{ours}.mlp.b_out") + outer @ inner,
        }
        take_norm(f"{ours}.ln1", f"{theirs}.input_layernorm")
        take_norm(f"{ours}.ln2", f"{theirs}.post_attention_layernorm")
    take_norm("ln_final", "model.norm")
    if left.pop("unembed.b_U").any():
        raise ValueError("Llama's RMS norms have no place for the bias b_U of the unembedding")
    return {**found, "lm_head.weight": left.pop("unembed.W_U").T}
