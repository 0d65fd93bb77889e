"""Models from a configuration, a hub name, a local Hugging Face folder or one of our own folders.

One of our own folders holds ``tl_config.json``, ``model.safetensors`` in HookedTransformer's
names and, where the model has one, its tokenizer's files. Weights are loaded as they are: no
folding, no centring, so that the model can be trained on.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformer_lens import HookedTransformer, HookedTransformerConfig

from sparse_tl.files import read_json, read_tensors, write_json, write_tensors
from sparse_tl.lens.points import Model

CONFIG_FILE = "tl_config.json"
WEIGHTS_FILE = "model.safetensors"
_BUFFERS = ("mask", "IGNORE", "rotary_sin", "rotary_cos")


def build_model(
    config: dict[str, Any], *, tokenizer: Any = None, device: str | None = None
) -> Model:
    """A HookedTransformer from a plain dictionary; its weights are random unless told otherwise.

    Args:
        config: fields of `HookedTransformerConfig`; ``dtype`` may be a name such as "float32".
        tokenizer: a Hugging Face tokenizer.
        device: where the model goes; a GPU if there is one when left out.

    Raises:
        ValueError: an unknown field or dtype.
    """
    fields = dict(config)
    if isinstance(fields.get("dtype"), str):
        name = fields["dtype"].removeprefix("torch.")
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"expected the name of a torch dtype as `dtype`; got {name!r}")
        fields["dtype"] = dtype
    if device is not None:
        fields["device"] = device
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="HookedTransformer is deprecated")
        try:
            cfg = HookedTransformerConfig.from_dict(fields)
        except TypeError as error:
            raise ValueError(f"expected fields of HookedTransformerConfig; {error}") from error
        return HookedTransformer(cfg, tokenizer=tokenizer)


def model_config(model: Model) -> dict[str, Any]:
    """The model's configuration as JSON can hold it, without device and seed."""
    kept: dict[str, Any] = {}
    for name, value in model.cfg.to_dict().items():
        # Fields that follow from others or belong to one machine or run stay out.
        if value is None or name in {
            "device",
            "seed",
            "n_params",
            "tokenizer_name",
            "init_weights",
        }:
            continue
        if isinstance(value, torch.dtype):
            kept[name] = str(value).removeprefix("torch.")
        elif hasattr(value, "item"):  # numpy scalars
            kept[name] = value.item()
        else:
            kept[name] = value
    return json.loads(json.dumps(kept))


def save_model(model: Model, folder: str | Path) -> None:
    """Write configuration, weights and tokenizer into an existing folder."""
    folder = Path(folder)
    write_json(folder / CONFIG_FILE, model_config(model))
    weights = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.endswith(tuple(f".{buffer}" for buffer in _BUFFERS))
    }
    write_tensors(folder / WEIGHTS_FILE, weights)
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(folder)


def load_model(source: str | Path, *, device: str | None = None, dtype: str = "float32") -> Model:
    """Load a model without processing its weights.

    Args:
        source: one of our own folders, a local Hugging Face folder, or a name on the hub.
        device: where the model goes; a GPU if there is one when left out.
        dtype: of the weights, for Hugging Face sources; our own folders keep theirs.

    Raises:
        ValueError: a folder that holds no model, weights that do not fit their configuration,
            or a name that TransformerLens does not know.
    """
    folder = Path(source)
    if (folder / CONFIG_FILE).exists():
        return _load_own_folder(folder, device)
    if (folder / "config.json").exists():
        return _load_hugging_face_folder(folder, device, dtype)
    if folder.is_dir():
        raise ValueError(
            f"expected {CONFIG_FILE} (one of our own folders) or config.json (a Hugging Face "
            f"folder) in {folder}; found {sorted(p.name for p in folder.iterdir())[:10]}"
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="HookedTransformer")
            return HookedTransformer.from_pretrained_no_processing(
                str(source), device=device, dtype=getattr(torch, dtype)
            )
    except (OSError, ValueError) as error:
        # TransformerLens lists every model that it knows; the first sentence says what is wrong.
        reason = str(error).partition(" Valid official model names")[0]
        raise ValueError(
            f"expected a folder, or the name of a model on the hub; {source} is no folder, and "
            f"loading it by name failed: {reason}"
        ) from error


def _load_own_folder(folder: Path, device: str | None) -> Model:
    config = read_json(folder / CONFIG_FILE)
    if not isinstance(config, dict):
        raise ValueError(f"expected a JSON object in {folder / CONFIG_FILE}")
    config.pop("seed", None)  # building must not reseed the caller's generators
    tokenizer = None
    if (folder / "tokenizer.json").exists():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    model = build_model({**config, "init_weights": False}, device=device)
    if tokenizer is not None:
        _set_tokenizer(model, tokenizer, prepends_bos=config.get("tokenizer_prepends_bos", True))
    weights_file = folder / WEIGHTS_FILE
    if not weights_file.exists():
        raise ValueError(f"expected the weights in {weights_file}; there is no such file")
    _load_weights(model, read_tensors(weights_file), weights_file)
    return model


def _set_tokenizer(model: Model, tokenizer: Any, *, prepends_bos: bool) -> None:
    """Give a model its saved tokenizer without letting TransformerLens change what it does.

    It makes every tokenizer that has a BOS token prepend it, which would cost prompts of a model
    that never had one their last token wherever they fill the context.
    """
    bos = tokenizer.bos_token
    if not prepends_bos:
        tokenizer.bos_token = None
    model.set_tokenizer(tokenizer)
    tokenizer = model.tokenizer
    assert tokenizer is not None
    tokenizer.bos_token = bos


def _load_weights(model: Model, weights: dict[str, torch.Tensor], origin: Path) -> None:
    """Fill the model; buffers may be absent, anything else that does not fit is refused."""
    try:
        outcome = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise ValueError(
            f"expected the weights in {origin} to fit their {CONFIG_FILE}; {error}"
        ) from error
    missing = [name for name in outcome.missing_keys if name.rsplit(".", 1)[-1] not in _BUFFERS]
    if missing or outcome.unexpected_keys:
        raise ValueError(
            f"expected the weights in {origin} to fit their {CONFIG_FILE}; missing "
            f"{missing[:5]}, unexpected {outcome.unexpected_keys[:5]}"
        )


def _load_hugging_face_folder(folder: Path, device: str | None, dtype: str) -> Model:
    from transformer_lens.loading_from_pretrained import (
        get_pretrained_model_config,
        get_pretrained_state_dict,
    )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch_dtype = getattr(torch, dtype)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch_dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ValueError(f"expected a Hugging Face model in {folder}; {error}") from error
    hf_model, outcome = loaded
    if outcome["missing_keys"]:
        # transformers fills them with random numbers and only warns.
        raise ValueError(
            f"expected all weights of the model in {folder}; missing "
            f"{sorted(outcome['missing_keys'])[:5]}"
        )
    has_tokenizer = any((folder / name).exists() for name in ("tokenizer.json", "vocab.json"))
    with tempfile.TemporaryDirectory(prefix="model-") as neutral:
        # TransformerLens guesses the architecture from the *path* when it contains the name of a
        # family ("llama", "gemma"): show it the folder under a name that says nothing.
        alias = Path(neutral) / "model"
        alias.mkdir()
        for file in folder.resolve().iterdir():
            (alias / file.name).symlink_to(file)
        config = read_json(folder / "config.json")
        if "n_positions" in config and "n_ctx" not in config:
            # transformers 5 no longer writes GPT-2's n_ctx, which TransformerLens asks for.
            (alias / "config.json").unlink()
            write_json(alias / "config.json", {**config, "n_ctx": config["n_positions"]})
        tokenizer = (
            AutoTokenizer.from_pretrained(str(alias), local_files_only=True)
            if has_tokenizer
            else None
        )
        cfg = get_pretrained_model_config(str(alias), dtype=torch_dtype, device=device)
        cfg.tokenizer_name = None
        cfg.model_name = folder.resolve().name
        weights = get_pretrained_state_dict(str(alias), cfg, hf_model, dtype=torch_dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="HookedTransformer is deprecated")
        model = HookedTransformer(cfg, tokenizer=tokenizer)
    model.load_and_process_state_dict(
        weights,
        fold_ln=False,
        center_writing_weights=False,
        center_unembed=False,
        fold_value_biases=False,
    )
    return model
