"""Load models from a hub name, a folder, a GGUF file or an object; save models.

Names, Hugging Face folders and GGUF files give a TransformerBridge with every version of
TransformerLens, so that one code path covers all architectures and gives the same tokens
everywhere. A bridge is saved as a Hugging Face folder, which transformers can read too; for a
HookedTransformer see `hooked_folder`. No code from a folder is ever run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from transformer_lens.supported_models import MODEL_ALIASES
from transformers import PreTrainedModel

from sparse_tl.arguments import checked
from sparse_tl.backend.bridges import boot, plain_model
from sparse_tl.backend.devices import checked_device, dtype_named, has_sharded_weights, processes
from sparse_tl.backend.hook_points import HookedTransformer, Model, TransformerBridge
from sparse_tl.backend.hooked_folder import CONFIG_FILE, load_hooked, save_hooked
from sparse_tl.backend.hugging_face import (
    OWN_FIELDS,
    find_gguf,
    quietly,
    read_config,
    read_header,
    read_model,
)
from sparse_tl.data.prompts import prepends_bos
from sparse_tl.storage.files import beside, complete, read_json, write_json

GATES_FILE = "gates.json"  # marks a SparseTransformer's folder
MODEL_FILES = (
    *(CONFIG_FILE, "config.json", "generation_config.json", "model.safetensors"),
    *("model.safetensors.index.json", "model-*-of-*.safetensors", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "additional_chat_templates", "tekken.json", "bpe.codes"),
)
"""Names, or patterns of names, of what `save_model` writes."""
_DATA = ["*.json", "*.txt", "*.yaml", "*.safetensors", "chat_template.jinja"]
_REST = ["*/*", "consolidated*"]  # other formats of the same weights


@checked
def load_model(
    source: str | Path | Model | PreTrainedModel,
    *,
    tokenizer: Any = None,
    prepend_bos: bool | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: str | Mapping[str, Any] | None = None,
) -> Model:
    """Load a model as it is: weights are not processed, and no code that comes with it is run.

    A name, Hugging Face folder or GGUF file gives a TransformerBridge. A folder written by
    `save_model` gives the saved model; where TransformerLens has no HookedTransformer, one becomes
    a bridge around a GPT-2 or Llama, or is refused.

    Args:
        source: hub name, Hugging Face folder, or folder written by `save_model`; or a GGUF file or
            folder with one, whose weights are dequantised; or a causal language model of
            `transformers`, which is turned into a bridge in place; or a TransformerLens model,
            which is returned unchanged.
        tokenizer: tokenizer of a model of `transformers`, or one to replace that of a name, a
            Hugging Face folder or a GGUF file.
        prepend_bos: whether prompts start with the BOS token, everywhere in this package and in
            ``model.to_tokens``. By default as saved by this package, or else as the tokenizer
            does. It can be read and set as ``model.cfg.default_prepend_bos``.
        device: device of the model; a GPU by default if there is one.
        dtype: dtype of the weights, such as "bfloat16"; by default float32 for names, Hugging Face
            folders and GGUF files, and the saved dtype for folders written by `save_model`.
        device_map: placement of each part, as in `transformers`, instead of `device`; for names,
            Hugging Face folders and GGUF files.

    Raises:
        ImportError: a package that is needed to read GGUF files is missing or too old.
        TypeError: the object is not a model.
        ValueError: the folder holds no model or a sparse one, a GGUF file is damaged, weights do
            not fit their configuration or are pickled, TransformerLens does not support the model
            class, the tokenizer lacks the requested BOS token, the hub does not have the name, the
            hub cannot be reached, or the device cannot be used.
    """
    placed: dict[str, Any] = {"device": device, "dtype": dtype, "device_map": device_map}
    if isinstance(source, (str, Path)):
        folder, name = Path(source).expanduser(), None
        if not folder.is_dir() and find_gguf(folder) is None:
            if dtype is not None:
                dtype_named(str(dtype))  # before a download
            folder, name = fetch(str(source))
        if (folder / GATES_FILE).exists():
            raise ValueError(
                f"{folder} holds a sparse model ({GATES_FILE}): SparseTransformer.from_pretrained "
                "loads it with its gates"
            )
        model = load_folder(folder, name, tokenizer, **placed)
    else:
        _check_unset("a model object, which is used as it is", **placed)
        if isinstance(source, Model):
            given = {"tokenizer": tokenizer, "prepend_bos": prepend_bos}
            _check_unset("a model of TransformerLens, which has its own", **given)
            return source
        path = source.config.name_or_path or ""
        model = boot(source, tokenizer, name=Path(path).name or source.config.model_type)
    if prepend_bos is not None:
        model.cfg.default_prepend_bos = prepends_bos(model, prepend_bos)
    return model


def fetch(name: str) -> tuple[Path, str]:
    """Download a hub repository, or take it from the cache; return its folder and its name.

    Only configuration, weights and tokenizer are downloaded, as data; no code.
    """
    aliases = {
        alias.lower(): official for official, known in MODEL_ALIASES.items() for alias in known
    }
    official = aliases.get(name.lower(), name)
    try:
        folder = huggingface_hub.snapshot_download(
            official, allow_patterns=_DATA, ignore_patterns=_REST
        )
    except Exception as error:  # of any underlying library
        if "/" in official or official in MODEL_ALIASES:
            advice = (
                "Where there is no network, give the folder of a copy (elsewhere: hf download "
                f"{official})"
            )
        else:
            advice = "load_language_model knows models by short names, such as 'smollm2'"
        raise ValueError(
            f"{name} is neither a folder nor a model that {huggingface_hub.constants.ENDPOINT} "
            f"gives: {str(error).strip()[:500]} {advice}"
        ) from error
    return Path(folder), official.rpartition("/")[2]


def load_folder(
    folder: Path,
    name: str | None = None,
    tokenizer: Any = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: str | Mapping[str, Any] | None = None,
) -> Model:
    """Load the dense model in a folder or GGUF file, ignoring other files; see `load_model`.

    The model's name is the saved one, or else `name`, or else that of the folder or file.
    """
    number = None if dtype is None else dtype_named(str(dtype))
    if device is not None and device_map is not None:
        raise ValueError("give `device` or `device_map`, not both")
    if (folder / CONFIG_FILE).is_file():
        _check_unset("a folder of a HookedTransformer", tokenizer=tokenizer, device_map=device_map)
        model = load_hooked(folder, device=checked_device(device), dtype=number)
    else:
        source, place = _source_in(folder), device_map or {"": checked_device(device)}
        place = place if isinstance(place, str) else dict(place)
        plain, tokenizer, own = read_model(source, tokenizer, dtype=number, device_map=place)
        name = name or (source.resolve().name if source.is_dir() else source.stem)
        try:
            model = boot(plain, tokenizer, name=str(own.get("model_name", name)))
        except ValueError as error:
            raise ValueError(f"cannot load {source}: {error}") from error
        placed: Any = getattr(plain, "hf_device_map", {})
        if (n_devices := len(set(placed.values()))) > 1:
            model.cfg.n_devices = n_devices
        if "default_prepend_bos" in own:
            model.cfg.default_prepend_bos = bool(own["default_prepend_bos"])
    _check_finite(model, folder)
    return model


def _check_finite(model: torch.nn.Module, folder: Path) -> None:
    for name, parameter in model.named_parameters():
        # Minimum and maximum need no extra memory; one NaN makes both NaN.
        ends = parameter.detach().flatten().aminmax() if parameter.numel() else ()
        if not all(bool(end.isfinite()) for end in ends):
            raise ValueError(
                f"{name} has NaN or infinity, in the model of {folder}: it was damaged, or its "
                "training diverged"
            )


def check_folder(folder: str | Path) -> None:
    """Check that a folder can hold a model, without reading its weights; see `load_model`."""
    folder = Path(folder)
    if (folder / CONFIG_FILE).is_file():
        read_json(folder / CONFIG_FILE)
    elif (source := _source_in(folder)).is_dir():
        read_config(source)
    else:
        read_header(source)


def _source_in(folder: Path) -> Path:
    """What transformers reads: the folder itself, or the GGUF file that it is or has."""
    if (folder / "config.json").is_file():
        return folder
    if (file := find_gguf(folder)) is not None:
        return file
    raise ValueError(
        f"there is no model in {folder}: neither config.json (a Hugging Face folder) nor "
        f"{CONFIG_FILE} (a HookedTransformer that save_model wrote) nor a GGUF file"
    )


@checked
def save_model(model: Model, folder: str | Path) -> None:
    """Write configuration, weights and tokenizer to a folder; its other files stay as they are.

    A bridge is saved as a Hugging Face folder, which transformers can read too. Of several
    processes, only the first writes; all have to call this if the weights are sharded.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    if not processes().is_main_process:
        if isinstance(model, TransformerBridge) and has_sharded_weights(model):
            plain_model(model)
        return
    folder = Path(folder).resolve()
    plain = model if isinstance(model, HookedTransformer) else plain_model(model)
    _check_finite(plain, folder)
    with beside(folder / "model") as temporary:  # on the same disk, wherever the folder is
        temporary.mkdir()
        if isinstance(model, HookedTransformer):
            save_hooked(model, temporary)
        else:
            with quietly():
                plain.save_pretrained(temporary)
            own = {
                "model_name": model.cfg.model_name,
                "default_prepend_bos": bool(model.cfg.default_prepend_bos),
            }
            config = read_json(temporary / "config.json")
            write_json(temporary / "config.json", {**config, OWN_FIELDS: own})
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(temporary)
        complete(temporary)
        configs = (CONFIG_FILE, "config.json")  # without one, nobody reads half a model
        weights = folder.glob("model*.safetensors*")  # one file is read before any parts
        for earlier in [*(folder / config for config in configs), *weights]:
            earlier.unlink(missing_ok=True)
        for file in sorted(temporary.rglob("*"), key=lambda file: file.name in configs):
            if file.is_file():
                place = folder / file.relative_to(temporary)
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, place)


def _check_unset(source: str, **settings: Any) -> None:
    given = [name for name, value in settings.items() if value is not None]
    if given:
        raise ValueError(f"{' and '.join(given)} cannot be chosen for {source}")
