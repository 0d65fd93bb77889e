"""Files and folders that appear completely or not at all, even if the process or machine dies.

Each is written under a temporary name beside it, synced to the disk, and then renamed. One thread
of one process at a time writes to a path, so anything under its temporary name was left by a killed
process.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from sparse_tl.calls.scopes import scope
from sparse_tl.storage.locks import held

_ATTEMPTS = 50
"""Number of attempts to read a folder that another process keeps replacing."""
_TEMPORARY = re.compile(r"\..+\.(unfinished(\.[^.]*)?|previous|lock)")
_writing: dict[str, object] = {}
"""The paths that threads of this process are writing to, each with its writer."""
Value = TypeVar("Value")


@scope
def atomic_file(path: str | Path) -> Iterator[Path]:
    """A temporary path that replaces `path` if the block ends without an exception.

    Raises:
        OSError: the file cannot be written; `path` is left as it was.
        ValueError: another process or thread is writing to `path`.
    """
    path = Path(path)
    if _in_unfinished(path):
        yield path
        return
    with _unfinished(path) as temporary:
        yield temporary
        _finish(temporary)
        os.replace(temporary, path)
        _sync(path.parent)


@scope
def atomic_folder(path: str | Path, *, keep: bool = False) -> Iterator[Path]:
    """A temporary folder that replaces `path` if the block ends without an exception.

    A folder cannot be replaced in one step: the old one is moved aside first, and
    `recover_folder` restores it if the process dies in between.

    Args:
        path: the folder; if it is a link, its target is replaced.
        keep: whether to keep the folder's other files; each new file is then moved in on its own.

    Raises:
        OSError: the folder cannot be written; `path` is left as it was.
        ValueError: `path` is a file, or another process or thread is writing to it.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_dir():
        raise ValueError(f"expected a folder, or an unused name; {path} is a file")
    if _in_unfinished(path):
        path.mkdir(exist_ok=True)
        yield path
        return
    with _unfinished(path) as temporary:
        temporary.mkdir()
        inode = temporary.stat().st_ino
        yield temporary
        if not temporary.exists() or temporary.stat().st_ino != inode:
            raise OSError("it was removed in the meantime")
        for name in _finish(temporary):
            if keep:
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(temporary / name, path / name)
        if not keep:
            _swap(temporary, path)
        _sync(path.parent)


@scope
def _unfinished(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` at which nothing exists before and after the block."""
    # Keep the suffix, which some writers look at.
    temporary = path.with_name(f".{path.name}.unfinished{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with held(path):  # excludes other processes
            writing, place = object(), os.path.abspath(path)
            if _writing.setdefault(place, writing) is not writing:  # atomic, for threads
                raise ValueError(
                    f"expected one writer of {path} at a time; another thread is writing to it. "
                    "Wait until that ends, or choose another place."
                )
            try:
                _remove(temporary)
                yield temporary
            finally:
                _remove(temporary)
                del _writing[place]
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"cannot write {path}: {error}. No incomplete file was left, and earlier content is "
            "unchanged."
        ) from error


def _in_unfinished(path: Path) -> bool:
    """Whether a path is, or is in, an unfinished folder, which appears as a whole."""
    return any(map(is_temporary, (path, *path.parents)))


def _finish(temporary: Path) -> list[Path]:
    """Sync what will appear; return its files, relative to it."""
    umask = os.umask(0)
    os.umask(umask)
    entries = [temporary, *temporary.rglob("*")]
    for entry in entries:
        # safetensors creates private files; results should be as readable as any other new file.
        entry.chmod((0o777 if entry.is_dir() else 0o666) & ~umask)
        _sync(entry)
    return [entry.relative_to(temporary) for entry in entries if entry.is_file()]


def _swap(temporary: Path, path: Path) -> None:
    """Replace a folder with another."""
    aside = _aside(path)
    while True:
        if path.exists():
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)
        try:
            os.replace(temporary, path)
            break
        except OSError:
            if not path.exists():  # otherwise a reader restored it in between
                raise
    shutil.rmtree(aside, ignore_errors=True)


def recover_folder(path: str | Path) -> bool:
    """Restore a folder that a killed `atomic_folder` moved aside; return whether `path` exists."""
    path = Path(os.path.realpath(path))  # unlike `resolve`, follows broken links too
    if not path.exists() and _aside(path).exists():
        os.replace(_aside(path), path)
    return path.exists()


def read_steadily(folder: Path, read: Callable[[], Value]) -> Value:
    """The result of reading a folder; reads again if the folder was replaced in the meantime."""
    for _ in range(_ATTEMPTS):
        before = _version(folder)
        try:
            content = read()
        except (OSError, ValueError):
            if _version(folder) == before:
                raise
        else:
            if _version(folder) == before:
                return content
    raise ValueError(f"expected {folder} to stay unchanged while it is read; it keeps changing")


def _version(folder: Path) -> tuple[int, int] | None:
    try:
        stat = folder.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_ctime_ns  # the inodes of removed folders are reused


def is_temporary(path: Path) -> bool:
    """Whether a path is an unfinished write, a lock, or a folder that was moved aside."""
    return bool(_TEMPORARY.fullmatch(path.name))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Write a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without fsync
            raise
    finally:
        os.close(handle)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")
