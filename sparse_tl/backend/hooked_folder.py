"""HookedTransformers, built from configuration fields or stored as a folder.

A folder holds ``tl_config.json``, ``model.safetensors`` with HookedTransformer's names and, if the
model has a tokenizer, the tokenizer's files. Weights are loaded without folding or centring, so
that the model can be trained further. A folder may be untrusted: TransformerLens's configuration
also names tokenizers to fetch, code to trust, devices and seeds, none of which are read.

If TransformerLens has no HookedTransformer, the folder loads as a bridge around the GPT-2 with the
same weights, since HookedTransformer's defaults describe a GPT-2. Any other setting is refused: a
nearly equal model would silently give wrong numbers.
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
from transformers import GPT2Config, GPT2LMHeadModel
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
            plain = _as_gpt2(config, weights)
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


# ---- as GPT-2 ------------------------------------------------------------------------------------

_OF_GPT2: dict[str, Any] = {
    "attention_dir": "causal",
    "attn_only": False,
    "attn_scores_soft_cap": -1.0,
    "clip_qkv": None,
    "final_rms": False,
    "gated_mlp": False,
    "normalization_type": "LN",
    "num_experts": None,
    "output_logits_soft_cap": -1.0,
    "parallel_attn_mlp": False,
    "positional_embedding_type": "standard",
    "post_embedding_ln": False,
    "scale_attn_by_inverse_layer_idx": False,
    "use_attention_sinks": False,
    "use_attn_scale": True,
    "use_local_attn": False,
    "use_logn_attn": False,
    "use_normalization_before_and_after": False,
    "use_qk_norm": False,
}
"""The values that choose GPT-2 among HookedTransformers, which are TransformerLens's defaults."""


def _as_gpt2(fields: dict[str, Any], weights: dict[str, Tensor]) -> GPT2LMHeadModel:
    """The GPT-2 defined by fields of `HookedTransformerConfig` and weights."""
    d_model, d_head, d_vocab = (fields[name] for name in ("d_model", "d_head", "d_vocab"))
    n_heads = d_model // d_head
    wanted = {
        **_OF_GPT2,
        "act_fn": fields["act_fn"] if fields["act_fn"] in ACT2FN else None,
        "attn_scale": math.sqrt(d_head),
        "d_vocab_out": d_vocab,
        "n_heads": n_heads,
        "n_key_value_heads": n_heads,
    }
    # Norms without weights equal norms with weights of one.
    norms = str(fields.get("normalization_type", "LN")).removesuffix("Pre")
    said = {**fields, "normalization_type": norms}
    strange = {name: said[name] for name, value in wanted.items() if said.get(name, value) != value}
    if strange:
        raise ValueError(
            "this version of transformer-lens has no HookedTransformer (3.9 has), and the GPT-2 of "
            f"transformers cannot represent {strange}"
        )
    config = GPT2Config(
        vocab_size=d_vocab,
        n_layer=fields["n_layers"],
        n_embd=d_model,
        n_head=n_heads,
        n_positions=fields["n_ctx"],
        n_inner=fields.get("d_mlp"),
        activation_function=fields["act_fn"],
        layer_norm_epsilon=fields.get("eps", 1e-5),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):  # its initial random weights are discarded
        model = GPT2LMHeadModel(config).to(dtype_named(fields.get("dtype", "float32")))
    model.load_state_dict(_by_name_in_gpt2(weights, fields["n_layers"], n_heads, d_head))
    return model.eval()


def _by_name_in_gpt2(
    weights: dict[str, Tensor], n_layers: int, n_heads: int, d_head: int
) -> dict[str, Tensor]:
    left, sizes = dict(weights), {"head": n_heads, "d_head": d_head}
    found = {"wte.weight": left.pop("embed.W_E"), "wpe.weight": left.pop("pos_embed.W_pos")}

    def take_norm(ours: str, theirs: str) -> None:
        plain = torch.ones(n_heads * d_head)
        found[f"{theirs}.weight"] = left.pop(f"{ours}.w", plain)
        found[f"{theirs}.bias"] = left.pop(f"{ours}.b", 0 * plain)

    for layer in range(n_layers):
        ours, theirs = f"blocks.{layer}", f"h.{layer}"
        weight = torch.stack([left.pop(f"{ours}.attn.W_{slot}") for slot in "QKV"])
        bias = torch.stack([left.pop(f"{ours}.attn.b_{slot}") for slot in "QKV"])
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
    found = {f"transformer.{name}": tensor for name, tensor in found.items()}
    norm, shift = found["transformer.ln_f.weight"], found["transformer.ln_f.bias"]
    unembedding, bias = left.pop("unembed.W_U"), left.pop("unembed.b_U")
    if left:
        raise ValueError(f"GPT-2 has no place for the weights {sorted(left)[:5]}")
    if bias.any():
        # LayerNorm's standardised x sums to 0, so adding a constant to a column of the unembedding
        # changes nothing. With the norm's weight w and bias b set to 1, the logits are (x + 1) A,
        # which equals x (w W_U) + (b W_U + b_U) for
        # A = w W_U - mean(w W_U) + (b W_U + b_U) / d_model.
        scaled = norm.double()[:, None] * unembedding.double()
        constant = shift.double() @ unembedding.double() + bias.double()
        joint = scaled - scaled.mean(dim=0) + constant / len(unembedding)
        found |= dict.fromkeys(
            ("transformer.ln_f.weight", "transformer.ln_f.bias"), torch.ones_like(norm)
        )
        unembedding = joint.to(unembedding.dtype)
    return {**found, "lm_head.weight": unembedding.T}
