"""Reading and writing of JSON, tensors and tables, and checks of folders; nothing is unpickled."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

if TYPE_CHECKING:
    import pandas as pd


_EARLIER = ".earlier"


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A temporary path of the same name, in a hidden folder beside `path` that is removed again.

    Raises:
        OSError: something could not be written.
    """
    folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        folder.mkdir(parents=True)
        yield folder / path.name
    except (OSError, SafetensorError) as error:
        raise OSError(f"cannot write {path}: {error}") from error
    finally:
        moved = folder / (path.name + _EARLIER)
        if path.exists() or not moved.exists():  # otherwise `recover_folder` needs it
            shutil.rmtree(folder, ignore_errors=True)


def complete(temporary: Path) -> None:
    """Write all files beside a temporary path to the disk, as readable as any other new file."""
    mode = temporary.parent.stat().st_mode & 0o666  # as the umask has it
    for file in temporary.parent.rglob("*"):
        if file.is_file():
            file.chmod(mode)  # safetensors makes private files
            with file.open("rb+") as written:
                try:
                    os.fsync(written.fileno())
                except OSError as error:
                    if error.errno != errno.EINVAL:  # a file system without it
                        raise


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """A temporary path that replaces `path` if the block ends without an exception."""
    path = Path(path)
    with beside(path) as temporary:
        yield temporary
        complete(temporary)
        os.replace(temporary, path)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """A temporary folder that replaces `path` if the block ends without an exception.

    A folder with files cannot be replaced in one step: the earlier one is moved aside first. If the
    process is killed in between, `recover_folder` puts the new one in its place. If `path` is a
    link, its target is replaced.
    """
    path = Path(path).resolve()
    with beside(path) as temporary:
        temporary.mkdir()
        yield temporary
        complete(temporary)
        earlier = temporary.with_name(path.name + _EARLIER)
        try:
            if path.is_dir():
                os.replace(path, earlier)
            os.replace(temporary, path)
        except BaseException:
            if earlier.exists() and not path.exists():
                os.replace(earlier, path)
            raise


def recover_folder(path: str | Path) -> bool:
    """Put the folder in place that a killed `atomic_folder` did not; return whether it exists."""
    path = Path(path).resolve()
    if not path.exists():
        for earlier in path.parent.glob(f".{escape(path.name)}.*/{escape(path.name)}{_EARLIER}"):
            if (new := earlier.with_name(path.name)).exists():
                os.replace(new, path)
                shutil.rmtree(earlier.parent, ignore_errors=True)
                break
    return path.exists()


def check_replaceable(folder: str | Path, marker: str, *others: str) -> None:
    """Check that rewriting a folder deletes nothing but an earlier folder of its kind.

    Such a folder has the file `marker`, and `others`: further files, or patterns of their names.

    Raises:
        ValueError: the folder holds something but no marker, or files with other names.
    """
    folder = Path(folder)
    names = sorted(path.name for path in folder.iterdir()) if recover_folder(folder) else []
    known = (marker, *others) if marker in names else ()
    if unknown := [name for name in names if not any(fnmatch(name, one) for one in known)]:
        raise ValueError(
            f"{folder} holds {unknown[:5]}, which would be deleted: no {marker} and files written "
            "with it. Choose another folder."
        )


def write_json(path: str | Path, content: Any, *, indent: int | None = 2) -> None:
    """Write JSON atomically; refuses NaN and infinity, which JSON lacks."""
    text = json.dumps(content, indent=indent, allow_nan=False)
    with atomic_file(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: str | Path) -> Any:
    """Read JSON, in which a number can be neither NaN nor infinite.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not valid JSON; the message names it.
    """
    text = Path(path).read_bytes()
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
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
    """Read a safetensors file onto the CPU; errors as in `tensor_file`."""
    with tensor_file(path):
        return load_file(path)


def read_metadata(path: str | Path) -> dict[str, str]:
    """Read the metadata of a safetensors file; errors as in `tensor_file`."""
    with tensor_file(path), safe_open(path, "pt") as file:
        return file.metadata() or {}


@contextmanager
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
            f"cannot write to {folder}: {error.strerror}. Choose another output folder."
        ) from error
    return folder


@contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Hold a lock on a file or folder, and remove what killed writes left of it.

    The lock is a hidden file beside `path`. One process can hold it several times. On disks without
    locks, nothing is locked.

    Raises:
        ValueError: another process holds it.
    """
    if path is None:
        yield
        return
    path = path.resolve()
    file = check_writable(path.parent) / f".{path.name}.lock"
    try:
        lock = FileLock(file, thread_local=False, is_singleton=True).acquire(blocking=False)
    except Timeout:
        raise ValueError(
            f"{path} is locked by another process, which writes to it. Wait until that ends, or "
            "choose another place."
        ) from None
    except (OSError, NotImplementedError):
        lock = nullcontext()
    with lock:
        recover_folder(path)
        for left in path.parent.glob(f".{escape(path.name)}.{'?' * 8}"):
            shutil.rmtree(left, ignore_errors=True)
        yield
