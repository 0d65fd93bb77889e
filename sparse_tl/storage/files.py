"""Reading and writing of JSON, tensors and tables, and checks of folders; nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparse_tl.calls.scopes import scope

if TYPE_CHECKING:
    import pandas as pd


@scope
def beside(path: Path) -> Iterator[Path]:
    """A temporary path of the same name, in a hidden folder beside `path` that is removed again.

    Raises:
        OSError: something could not be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            yield Path(folder) / path.name
    except (OSError, SafetensorError) as error:
        raise OSError(f"cannot write {path}: {error}") from error


@scope
def atomic_file(path: str | Path) -> Iterator[Path]:
    """A temporary path that replaces `path` if the block ends without an exception."""
    path = Path(path)
    with beside(path) as temporary:
        yield temporary
        os.replace(temporary, path)


@scope
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """A temporary folder that replaces `path` if the block ends without an exception.

    If `path` is a link, its target is replaced.
    """
    path = Path(path).resolve()
    with beside(path) as temporary:
        temporary.mkdir()
        yield temporary
        earlier = temporary.with_name(f"{path.name}.earlier")
        try:
            if path.is_dir():  # a folder with files cannot be replaced in one step
                os.replace(path, earlier)
            os.replace(temporary, path)
        except BaseException:
            if earlier.exists() and not path.exists():
                os.replace(earlier, path)
            raise


def check_replaceable(folder: str | Path, marker: str, *others: str) -> None:
    """Check that rewriting a folder deletes nothing but an earlier folder of its kind.

    Args:
        folder: folder that will be replaced.
        marker: file that every folder of this kind has.
        others: patterns of the names of further files in such a folder.

    Raises:
        ValueError: the folder holds something but no marker, or files with other names.
    """
    folder = Path(folder)
    ours, entries = (folder / marker).exists(), list[Path]()
    if ours:
        entries = [path for path in folder.rglob("*") if not path.is_dir()]
    elif folder.is_dir():
        entries = [*folder.iterdir()]
    known = (marker, *others, "SHA256SUMS")  # checksums, in folders of version 0.2
    unknown = sorted(
        str(path.relative_to(folder))
        for path in entries
        if not (ours or path.name.startswith("."))
        or not any(fnmatch(path.name, pattern) for pattern in known)
    )
    if unknown:
        raise ValueError(
            f"expected an output folder that is empty, or holds nothing but an earlier {marker} "
            f"and the files written with it; {folder} holds {unknown[:5]}, which would be deleted. "
            "Choose another folder."
        )


def write_json(path: str | Path, content: Any, *, indent: int | None = 2) -> None:
    """Write JSON atomically; refuses NaN and infinity, which JSON lacks."""
    text = json.dumps(content, indent=indent, allow_nan=False)
    with atomic_file(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: str | Path) -> Any:
    """Read JSON.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not valid JSON; the message names it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except FileNotFoundError:
        raise
    except (ValueError, RecursionError, OSError) as error:  # syntax, encoding, numbers; nesting
        raise ValueError(f"expected valid JSON in {path}; {error}") from error


def _finite(text: str) -> float:
    """A JSON number, which can be neither NaN nor infinite."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a JSON number")
    return value


def write_tensors(
    path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file atomically."""
    # safetensors refuses shared or strided memory; every tensor is saved separately.
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    with atomic_file(path) as temporary:
        save_file(separate, temporary, metadata)


def write_csv(path: str | Path, table: pd.DataFrame) -> None:
    """Write a table without its index, atomically."""
    with atomic_file(path) as temporary:
        table.to_csv(temporary, index=False)


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read a safetensors file onto the CPU.

    Raises:
        ValueError: the file is truncated or not safetensors; the message names it.
    """
    with tensor_file(path):
        return load_file(path)


def read_metadata(path: str | Path) -> dict[str, str]:
    """Read the metadata of a safetensors file.

    Raises:
        ValueError: the file is truncated or not safetensors; the message names it.
    """
    with tensor_file(path), safe_open(path, "pt") as file:
        return file.metadata() or {}


@scope
def tensor_file(path: str | Path) -> Iterator[None]:
    """Name the file if the block cannot read it as safetensors.

    Raises:
        ValueError: the file is truncated, missing or not safetensors.
    """
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ValueError(f"expected a safetensors file at {path}; {error!s:.200}") from error


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A short hash of tensors: the start of the SHA-256 of their names and bytes."""
    sha256 = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        sha256.update(flat.numpy().data)
    return sha256.hexdigest()[:12]


def check_writable(folder: str | Path) -> Path:
    """Create a folder and test writing to it, so that a long run does not fail at its end.

    Raises:
        ValueError: the folder cannot be created or written to.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"expected a writable folder; got {folder}: {error.strerror}. "
            "Choose another output folder."
        ) from error
    return folder
