"""Atomic writing of files and folders; nothing is ever unpickled."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparse_tl.scopes import scope

if TYPE_CHECKING:
    import pandas as pd


@scope
def atomic_file(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path` that replaces it if the block ends without an exception."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp creates private files; results should be as readable as any other new file.
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@scope
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """A temporary folder beside `path` that replaces it if the block ends without an exception.

    A folder cannot be replaced in one step: the old one is moved aside first, and
    `recover_folder` restores it if the process dies in between.
    """
    path = Path(path).resolve()  # keep a link, replace its target
    if path.exists() and not path.is_dir():
        raise ValueError(f"expected a folder, or a name that is free; {path} is a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        aside = _aside(path)
        if path.exists():
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)
        os.replace(temporary, path)
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_replaceable(folder: str | Path, marker: str, *others: str) -> None:
    """Check that rewriting a folder deletes nothing but an earlier folder of its kind.

    Args:
        folder: folder that will be replaced as a whole.
        marker: file that every folder of this kind has.
        others: further files of such a folder.

    Raises:
        ValueError: the folder holds files but no marker, or files with other names.
    """
    folder = Path(folder)
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    strange = [name for name in found if marker not in found or name not in (marker, *others)]
    if strange:
        raise ValueError(
            f"expected an empty folder, or one with nothing but an earlier {marker}, to write to; "
            f"{folder} holds {strange[:5]}, which would be deleted. Choose another folder."
        )


def recover_folder(path: str | Path) -> bool:
    """Restore a folder that a killed `atomic_folder` moved aside; return whether `path` exists."""
    path = Path(path).resolve()
    if not path.exists() and _aside(path).exists():
        os.replace(_aside(path), path)
    return path.exists()


def write_json(path: str | Path, content: Any, *, indent: int | None = 2) -> None:
    """Write JSON atomically; refuses NaN and infinity, which JSON lacks."""
    text = json.dumps(content, indent=indent, allow_nan=False)
    with atomic_file(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: str | Path) -> Any:
    """Read JSON.

    Raises:
        ValueError: the file is not valid JSON; the message names it.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bytes, syntax, numbers too long; nesting
        raise ValueError(f"expected valid JSON in {path}; {error}") from error


def write_tensors(path: str | Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file atomically."""
    # safetensors refuses shared or strided memory; every tensor is saved separately.
    whole: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        whole[name] = tensor.clone() if place in taken else tensor
        taken.add(place)
    with atomic_file(path) as temporary:
        save_file(whole, temporary)


def write_csv(path: str | Path, table: pd.DataFrame) -> None:
    """Write a table without its index, atomically."""
    with atomic_file(path) as temporary:
        table.to_csv(temporary, index=False)


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read a safetensors file onto the CPU.

    Raises:
        ValueError: the file is truncated or not safetensors; the message names it.
    """
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"expected a safetensors file at {path}; {error}") from error


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A short hash of tensors: the start of the SHA-256 of their names and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        found.update(flat.numpy().data)
    return found.hexdigest()[:12]


def check_writable(folder: str | Path) -> Path:
    """Create a folder and test writing to it, so that a long run does not fail at its end.

    Raises:
        ValueError: the folder cannot be created or written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"expected a folder that can be written; got {folder}: {error.strerror}. "
            "Choose another output folder."
        ) from error
    return folder


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
