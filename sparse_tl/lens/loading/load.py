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

import torch
from transformers import PreTrainedModel

from sparse_tl.calls.arguments import checked
from sparse_tl.data.prompts import prepends_bos
from sparse_tl.lens.core.architecture import CONFIG_FILE, dtype_named
from sparse_tl.lens.core.devices import checked_device
from sparse_tl.lens.core.points import HookedTransformer, Model, TransformerBridge
from sparse_tl.lens.loading.booting import boot
from sparse_tl.lens.loading.gguf_file import find_gguf, read_header
from sparse_tl.lens.loading.hooked_folder import check_hooked, load_hooked, save_hooked
from sparse_tl.lens.loading.hub import fetch
from sparse_tl.lens.loading.hugging_face import OWN_FIELDS, quietly, read_config, read_model
from sparse_tl.lens.loading.plain import plain_model
from sparse_tl.parallel import ranks, shards
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
    `save_model` gives the saved model; where TransformerLens has no HookedTransformer, that becomes
    a bridge too.

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
    if not isinstance(source, (str, Path)):
        _check_unset("a model object, which is used as it is", **placed)
        return _with_bos_setting(_of_object(source, tokenizer, prepend_bos), prepend_bos)
    folder, name = Path(source).expanduser(), None
    if not folder.is_dir() and find_gguf(folder) is None:
        _placed(device, device_map)  # check arguments before downloading
        _dtype(dtype)
        folder, name = fetch(str(source))
    if (folder / GATES_FILE).exists():
        raise ValueError(
            f"expected a dense model in {folder}; its {GATES_FILE} makes it a sparse one, which "
            "SparseTransformer.from_pretrained loads with its gates"
        )
    return _with_bos_setting(load_folder(folder, name, tokenizer, **placed), prepend_bos)


def _with_bos_setting(model: Model, prepend_bos: bool | None) -> Model:
    """The model, set to start prompts with BOS or not; unchanged if `prepend_bos` is None."""
    if prepend_bos is not None:
        model.cfg.default_prepend_bos = prepends_bos(model, prepend_bos)
    return model


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
    number = _dtype(dtype)
    if (folder / CONFIG_FILE).is_file():
        _check_unset("a folder of a HookedTransformer", tokenizer=tokenizer, device_map=device_map)
        model = load_hooked(folder, device=checked_device(device), dtype=number)
    else:
        source, place = _source_in(folder), _placed(device, device_map)
        model = _of_hugging_face(source, name or _named(source), tokenizer, number, place)
    _check_finite(model, folder)
    return model


def _check_finite(model: torch.nn.Module, folder: Path) -> None:
    for name, parameter in model.named_parameters():
        # Minimum and maximum need no extra memory; one NaN makes both NaN.
        ends = parameter.detach().flatten().aminmax() if parameter.numel() else ()
        if not all(bool(end.isfinite()) for end in ends):
            raise ValueError(
                f"expected finite weights in {folder}; {name} has NaN or infinity. The model was "
                "damaged, or its training diverged."
            )


def check_folder(folder: str | Path) -> None:
    """Check that a folder can hold a model, without reading its weights.

    Raises:
        ValueError: as in `load_model`, except for errors in the weights' values.
    """
    folder = Path(folder)
    if (folder / CONFIG_FILE).is_file():
        check_hooked(folder)
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
        f"expected {CONFIG_FILE} (a HookedTransformer that save_model wrote), config.json (a "
        f"Hugging Face folder) or a GGUF file in {folder}; found "
        f"{sorted(path.name for path in folder.iterdir())[:10]}"
    )


def _named(source: Path) -> str:
    return source.resolve().name if source.is_dir() else source.stem


@checked
def save_model(model: Model, folder: str | Path) -> None:
    """Write configuration, weights and tokenizer to a folder; its other files stay as they are.

    A bridge is saved as a Hugging Face folder, which transformers can read too. Of several ranks,
    only the first writes; all have to call this if the weights are sharded.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    if not ranks.is_first():
        if isinstance(model, TransformerBridge) and shards.has_sharded_weights(model):
            plain_model(model)
        return
    folder = Path(folder).resolve()
    with quietly():
        plain = model if isinstance(model, HookedTransformer) else plain_model(model)
    _check_finite(plain, folder)
    with beside(folder / "model") as temporary:  # on the same disk, wherever the folder is
        temporary.mkdir()
        if isinstance(model, HookedTransformer):
            save_hooked(model, temporary)
        else:
            _save_bridge(model, plain, temporary)
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


def _save_bridge(model: TransformerBridge, plain: Any, folder: Path) -> None:
    with quietly():
        plain.save_pretrained(folder)
    own = {
        "model_name": model.cfg.model_name,
        "default_prepend_bos": bool(model.cfg.default_prepend_bos),
    }
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, OWN_FIELDS: own})


def _of_object(source: Any, tokenizer: Any, prepend_bos: bool | None) -> Model:
    if isinstance(source, Model):
        given = {"tokenizer": tokenizer, "prepend_bos": prepend_bos}
        _check_unset("a model of TransformerLens, which has its own", **given)
        return source
    if isinstance(source, PreTrainedModel):
        return boot(source, tokenizer, name=_name_of(source))
    raise TypeError(
        "expected a name, a folder, a causal language model of transformers, a TransformerBridge "
        f"or a HookedTransformer; got a {type(source).__name__}"
    )


def _name_of(model: PreTrainedModel) -> str:
    """The last part of the path that a model was loaded from, or else its model family."""
    return Path(model.config.name_or_path or "").name or model.config.model_type


def _of_hugging_face(
    source: Path,
    name: str,
    tokenizer: Any,
    dtype: torch.dtype | None,
    device_map: str | dict[str, Any],
) -> Model:
    model, tokenizer, own = read_model(source, tokenizer, dtype=dtype, device_map=device_map)
    try:
        bridge = boot(model, tokenizer, name=own.get("model_name", name))
    except ValueError as error:
        raise ValueError(f"cannot load {source}: {error}") from error
    placed: Any = getattr(model, "hf_device_map", {})
    devices = set(placed.values())
    if len(devices) > 1:
        bridge.cfg.n_devices = len(devices)
    if "default_prepend_bos" in own:
        bridge.cfg.default_prepend_bos = own["default_prepend_bos"]
    return bridge


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    return None if dtype is None else dtype_named(str(dtype))


def _placed(
    device: str | torch.device | None, device_map: str | Mapping[str, Any] | None
) -> str | dict[str, Any]:
    """The device map of a model."""
    if device_map is None:
        return {"": checked_device(device)}
    if device is not None:
        raise ValueError("expected either `device` or `device_map`; got both")
    return device_map if isinstance(device_map, str) else dict(device_map)


def _check_unset(source: str, **settings: Any) -> None:
    given = [name for name, value in settings.items() if value is not None]
    if given:
        raise ValueError(f"expected no {' and no '.join(given)} for {source}")
