"""HookedTransformers, built from configuration fields or stored as a folder.

A folder holds ``tl_config.json``, ``model.safetensors`` with HookedTransformer's names and, if the
model has a tokenizer, the tokenizer's files. Weights are loaded without folding or centring, so
that the model can be trained further. If TransformerLens has no HookedTransformer, the folder loads
as a bridge around the equivalent model of `transformers`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from sparse_tl.lens.core.architecture import (
    CONFIG_FILE,
    dtype_named,
    model_config,
    read_architecture,
)
from sparse_tl.lens.core.points import HookedTransformer, Model
from sparse_tl.lens.loading.bridges import boot
from sparse_tl.lens.loading.conversion import as_transformers
from sparse_tl.lens.loading.hugging_face import check_tokenizer, has_tokenizer, read_tokenizer
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
    """Load the model from a folder that `save_hooked` wrote, ignoring other files.

    Raises:
        ValueError: a field does not describe an architecture, weights do not fit, or this version
            of TransformerLens cannot represent the architecture.
    """
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
            plain: Any = as_transformers(config, weights)
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
