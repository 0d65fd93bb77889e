"""Models from a hub name, a Hugging Face folder, a folder of ours, or an object; and their saving.

Names and Hugging Face folders give a TransformerBridge with every version of TransformerLens: one
way to read them, which knows more architectures and gives the same tokens everywhere. A bridge is
saved as a Hugging Face folder, which transformers reads, too; a HookedTransformer as
`hooked_folder` says. Nothing that a folder says is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformer_lens.utilities.devices import get_device

from sparse_tl.files import read_json, write_json
from sparse_tl.lens.architecture import CONFIG_FILE, dtype_named
from sparse_tl.lens.booting import boot
from sparse_tl.lens.hooked_folder import check_hooked, load_hooked, save_hooked
from sparse_tl.lens.hub import fetch
from sparse_tl.lens.hugging_face import OWN_FIELDS, check_files, quietly, read_model
from sparse_tl.lens.plain import plain_model
from sparse_tl.lens.points import HookedTransformer, Model, TransformerBridge

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GATES_FILE = "gates.json"  # what a SparseTransformer's folder has beside its model


def load_model(
    source: str | Path | Model | PreTrainedModel,
    *,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: str | Mapping[str, Any] | None = None,
) -> Model:
    """Load a model without processing its weights, and without running anything that it brings.

    A name and a Hugging Face folder give a TransformerBridge. A folder of ours gives what was saved
    in it; a HookedTransformer becomes a bridge where TransformerLens has no such class any more.

    Args:
        source: a name on the hub, a local Hugging Face folder, one of our own folders, a causal
            language model of `transformers`, which becomes a bridge in place, or a model of
            TransformerLens, which is returned as it is.
        tokenizer: of a model of `transformers`, or in place of the one that a name or a Hugging
            Face folder brings.
        device: where the model goes; a GPU if there is one when left out.
        dtype: of the weights, such as "bfloat16"; when left out, float32 for names and Hugging Face
            folders, and what it was saved in for our own.
        device_map: in place of `device`, where each part goes, as `transformers` understands it;
            for names and Hugging Face folders.

    Raises:
        TypeError: an object that is no model.
        ValueError: a folder that holds no model or a sparse one, weights that do not fit their
            configuration or are pickled, a class of models that TransformerLens does not know, a
            name that the hub does not, or a hub that cannot be reached.
    """
    if not isinstance(source, (str, Path)):
        placed = {"device": device, "dtype": dtype, "device_map": device_map}
        _check_unset("a model object, which is used as it is", **placed)
        return _of_object(source, tokenizer)
    folder, name = Path(source).expanduser(), None
    if not folder.is_dir():
        _placed(device, device_map)  # refused before anything is fetched
        _dtype(dtype)
        folder, name = fetch(str(source))
    if (folder / GATES_FILE).exists():
        raise ValueError(
            f"expected a dense model in {folder}; its {GATES_FILE} makes it a sparse one, which "
            "SparseTransformer.from_pretrained loads with its gates"
        )
    return load_folder(folder, name, tokenizer, device=device, dtype=dtype, device_map=device_map)


def load_folder(
    folder: Path,
    name: str | None = None,
    tokenizer: Any = None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: str | Mapping[str, Any] | None = None,
) -> Model:
    """The dense model in a folder, whatever else is in it; see `load_model`.

    Its name is the one that it was saved under, or else this one or the folder's.
    """
    number = _dtype(dtype)
    if (folder / CONFIG_FILE).is_file():
        _check_unset("a folder of a HookedTransformer", tokenizer=tokenizer, device_map=device_map)
        return load_hooked(folder, device=str(device or get_device()), dtype=number)
    if (folder / "config.json").is_file():
        place = _placed(device, device_map)
        return _of_hugging_face(folder, name or folder.resolve().name, tokenizer, number, place)
    raise _no_model(folder)


def check_folder(folder: str | Path) -> None:
    """Make sure that the files in a folder can be those of a model, without reading its weights.

    Raises:
        ValueError: as of `load_model`, for all but the values of weights.
    """
    folder = Path(folder)
    if (folder / CONFIG_FILE).is_file():
        check_hooked(folder)
    elif (folder / "config.json").is_file():
        check_files(folder)
    else:
        raise _no_model(folder)


def _no_model(folder: Path) -> ValueError:
    return ValueError(
        f"expected {CONFIG_FILE} (a HookedTransformer that save_model wrote) or config.json (a "
        f"Hugging Face folder) in {folder}; found {sorted(p.name for p in folder.iterdir())[:10]}"
    )


def save_model(model: Model, folder: str | Path) -> None:
    """Write configuration, weights and tokenizer into an existing folder.

    That of a bridge is a Hugging Face folder: transformers reads it, too.
    """
    folder = Path(folder)
    if isinstance(model, HookedTransformer):
        save_hooked(model, folder)
    else:
        _save_bridge(model, folder)
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(folder)


def _save_bridge(model: TransformerBridge, folder: Path) -> None:
    (folder / CONFIG_FILE).unlink(missing_ok=True)  # of another model that was here
    with quietly():
        plain_model(model).save_pretrained(folder)
    own = {
        "model_name": model.cfg.model_name,
        "default_prepend_bos": bool(model.cfg.default_prepend_bos),
    }
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, OWN_FIELDS: own})


def _of_object(source: Any, tokenizer: Any) -> Model:
    from transformers import PreTrainedModel

    if isinstance(source, Model):
        _check_unset("a model of TransformerLens, which has its own", tokenizer=tokenizer)
        return source
    if isinstance(source, PreTrainedModel):
        return boot(source, tokenizer, name=_name_of(source))
    raise TypeError(
        "expected a name, a folder, a causal language model of transformers, a TransformerBridge "
        f"or a HookedTransformer; got a {type(source).__name__}"
    )


def _name_of(model: PreTrainedModel) -> str:
    """The last part of what it was loaded from; its family where it was made here."""
    return Path(model.config.name_or_path or "").name or model.config.model_type


def _of_hugging_face(
    folder: Path,
    name: str,
    tokenizer: Any,
    dtype: torch.dtype | None,
    device_map: str | dict[str, Any],
) -> Model:
    model, found, own = read_model(folder, dtype=dtype, device_map=device_map)
    try:
        bridge = boot(
            model, found if tokenizer is None else tokenizer, name=own.get("model_name", name)
        )
    except ValueError as error:
        raise ValueError(f"cannot load {folder}: {error}") from error
    devices = set(getattr(model, "hf_device_map", {}).values())
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
    """Where each part of a model goes."""
    if device_map is None:
        return {"": str(device or get_device())}
    if device is not None:
        raise ValueError("expected either `device` or `device_map`; got both")
    return device_map if isinstance(device_map, str) else dict(device_map)


def _check_unset(source: str, **settings: Any) -> None:
    given = [name for name, value in settings.items() if value is not None]
    if given:
        raise ValueError(f"expected no {' and no '.join(given)} for {source}")
