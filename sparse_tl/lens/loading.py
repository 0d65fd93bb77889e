"""Models from a configuration, a hub name, a local Hugging Face folder or one of our own folders.

One of our own folders holds ``tl_config.json``, ``model.safetensors`` in HookedTransformer's
names and, where the model has one, its tokenizer's files. Weights are loaded as they are: no
folding, no centring, so that the model can be trained on. Nothing that a folder says is run.
"""

# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub
import torch

with suppress(ImportError):  # what is here needs TransformerLens 3
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.loading_from_pretrained import (
        NEED_REMOTE_CODE_MODELS,
        get_official_model_name,
    )

from sparse_tl.files import read_tensors, write_json, write_tensors
from sparse_tl.lens.architecture import CONFIG_FILE, dtype_named, model_config, read_architecture
from sparse_tl.lens.hugging_face import has_tokenizer, read_model, read_tokenizer
from sparse_tl.lens.points import Model

WEIGHTS_FILE = "model.safetensors"
GATES_FILE = "gates.json"  # what a SparseTransformer's folder has beside its model
_BUFFERS = ("mask", "IGNORE", "rotary_sin", "rotary_cos")
# TransformerLens unpickles what these authors published, with all that a pickle can do.
_PICKLED = ("NeelNanda/", "ArthurConmy/", "Baidicoot/")
_DATA = ["*.json", "*.txt", "*.safetensors"]
_PATIENCE = 5.0  # seconds until the hub counts as out of reach


def build_model(
    config: dict[str, Any], *, tokenizer: Any = None, device: str | None = None
) -> Model:
    """A HookedTransformer from a plain dictionary; its weights are random unless told otherwise.

    Args:
        config: fields of `HookedTransformerConfig`; ``dtype`` may be a name such as "float32".
        tokenizer: a Hugging Face tokenizer.
        device: where the model goes; a GPU if there is one when left out.

    Raises:
        ValueError: an unknown field or dtype, or fields that make no model together.
    """
    fields = dict(config)
    if isinstance(fields.get("dtype"), str):
        fields["dtype"] = dtype_named(fields["dtype"])
    if device is not None:
        fields["device"] = device
    try:
        return _hooked(HookedTransformerConfig.from_dict(fields), tokenizer)
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"expected fields of HookedTransformerConfig; {error}") from error


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
    """Load a model without processing its weights, and without running anything that it brings.

    Args:
        source: one of our own folders, a local Hugging Face folder, or a name on the hub.
        device: where the model goes; a GPU if there is one when left out.
        dtype: of the weights, for Hugging Face sources; our own folders keep theirs.

    Raises:
        ValueError: a folder that holds no model or a sparse one, weights that do not fit their
            configuration or are pickled, a name that TransformerLens does not know, or a hub that
            cannot be reached.
    """
    folder = Path(source)
    if (folder / GATES_FILE).exists():
        raise ValueError(
            f"expected a dense model in {folder}; its {GATES_FILE} makes it a sparse one, which "
            "SparseTransformer.from_pretrained loads with its gates"
        )
    if (folder / CONFIG_FILE).is_file():
        return load_own_folder(folder, device=device)
    if (folder / "config.json").is_file():
        return _unprocessed(*read_model(folder, dtype_named(dtype), device))
    if folder.is_dir():
        raise ValueError(
            f"expected {CONFIG_FILE} (one of our own folders) or config.json (a Hugging Face "
            f"folder) in {folder}; found {sorted(p.name for p in folder.iterdir())[:10]}"
        )
    return _from_hub(str(source), dtype_named(dtype), device)


def load_own_folder(folder: Path, *, device: str | None = None) -> Model:
    """Load what `save_model` wrote, whatever else is in the folder.

    Raises:
        ValueError: a field that does not describe an architecture, or weights that do not fit.
    """
    config = read_architecture(folder / CONFIG_FILE)
    weights_file = folder / WEIGHTS_FILE
    if not weights_file.is_file():
        raise ValueError(f"expected the weights in {weights_file}; there is no such file")
    model = build_model({**config, "init_weights": False}, device=device)
    if has_tokenizer(folder):
        adds_bos = config.get("tokenizer_prepends_bos", True)
        _set_tokenizer(model, read_tokenizer(folder, adds_bos=adds_bos))
    _load_weights(model, read_tensors(weights_file), weights_file)
    return model


def _hooked(cfg: HookedTransformerConfig, tokenizer: Any = None) -> Model:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="HookedTransformer is deprecated")
        return HookedTransformer(cfg, tokenizer=tokenizer)


def _set_tokenizer(model: Model, tokenizer: Any) -> None:
    """Give a model its tokenizer as it is.

    TransformerLens reads one that has a BOS token but does not add it a second time: from a path,
    with all that its files say, and so that it adds the token. That would run code that they name,
    and cost prompts of a model that never had a BOS their last token where they fill the context.
    """
    bos = tokenizer.bos_token
    if not tokenizer.init_kwargs.get("add_bos_token"):
        tokenizer.bos_token = None
    model.set_tokenizer(tokenizer)
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


def _unprocessed(
    cfg: HookedTransformerConfig, weights: dict[str, torch.Tensor], tokenizer: Any
) -> Model:
    """The model with exactly these weights."""
    model = _hooked(cfg)
    if tokenizer is not None:
        _set_tokenizer(model, tokenizer)
    model.load_and_process_state_dict(
        weights,
        fold_ln=False,
        center_writing_weights=False,
        center_unembed=False,
        fold_value_biases=False,
    )
    return model


def _from_hub(name: str, dtype: torch.dtype, device: str | None) -> Model:
    official = _official_name(name)
    _check_reachable(official)
    if official.startswith(NEED_REMOTE_CODE_MODELS):
        # TransformerLens would run the code that is published with it: take none but its data.
        folder = huggingface_hub.snapshot_download(official, allow_patterns=_DATA)
        cfg, weights, tokenizer = read_model(Path(folder), dtype, device)
        cfg.model_name = official.rpartition("/")[2]
        return _unprocessed(cfg, weights, tokenizer)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="HookedTransformer")
            return HookedTransformer.from_pretrained_no_processing(
                name, device=device, dtype=dtype, trust_remote_code=False
            )
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a model of the hub by the name {name}; {error}") from error


def _official_name(name: str) -> str:
    """The hub's name for a model that TransformerLens knows, and can load without unpickling."""
    try:
        official = get_official_model_name(name)
    except ValueError as error:
        # TransformerLens lists every model that it knows; the first sentence says what is wrong.
        reason = str(error).partition(" Valid official model names")[0]
        raise ValueError(
            f"expected a folder, or the name of a model on the hub; {name} is no folder, and "
            f"loading it by name failed: {reason}"
        ) from error
    if official.startswith(_PICKLED):
        raise ValueError(
            f"expected a model that is published as safetensors; {official} is a pickle, which can "
            "run code. Where you trust it, load it with HookedTransformer.from_pretrained and give "
            "that model, or save it with save_model."
        )
    return official


def _check_reachable(official: str) -> None:
    """One request without retries: transformers would try for half a minute, file by file."""
    if isinstance(huggingface_hub.try_to_load_from_cache(official, "config.json"), str):
        return
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=_PATIENCE)
    except Exception as error:  # of whatever library huggingface_hub speaks with
        raise ValueError(
            f"expected a folder, or a name on a hub that can be reached; {official} is not on this "
            f"machine, and {huggingface_hub.constants.ENDPOINT} does not answer ({error})"
        ) from error
