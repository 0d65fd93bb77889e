"""Files and folders that appear completely or not at all, even if the process or machine dies.

Each is written under a temporary name beside it, synced to the disk, and then renamed.
"""

from __future__ import annotations

import errno
import glob
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from rich.filesize import decimal
from safetensors import SafetensorError

from sparse_tl.scopes import scope

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "it would exceed the limit on file sizes (ulimit -f)",
    errno.EROFS: "its disk is read-only",
    errno.EIO: "its disk failed",
}
_GONE = "the folder around it was removed in the meantime"
_ATTEMPTS = 50
"""Number of attempts to swap or read a folder that another process writes at the same time."""
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<host>[^.]*)-(?P<pid>\d+)-\w+\.new(\.\w+)?")
_AUXILIARY = re.compile(r"\..+\.(previous|lock)")
_unfinished: dict[Path, int] = {}
"""Inodes of this process's temporary files and folders, to recognise each later."""
Value = TypeVar("Value")


class Writer(Protocol):
    """An object that is notified of every file written into its folder."""

    def writes(self, files: list[Path]) -> None:
        """Called before files appear, with their final paths."""


writers: WeakValueDictionary[Path, Writer] = WeakValueDictionary()
"""The existing writers, by folder."""


@scope
def atomic_file(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path` that replaces it if the block ends without an exception.

    Raises:
        OSError: the disk is full, or the file is too large; `path` is left as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _disk_explained(path):
        if not _in_unfinished(path):
            _remove_dead(path)
        # Keep the suffix, which some writers look at.
        handle, name = tempfile.mkstemp(f".new{path.suffix}", _prefix(path), path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            _unfinished[temporary] = temporary.stat().st_ino
            yield temporary
            # mkstemp creates private files; results should be as readable as any other new file.
            temporary.chmod(0o666 & ~_umask())
            if _in_unfinished(path):  # synced together with the folder around it
                os.replace(temporary, path)
            else:
                _sync(temporary)
                _announce([path])
                os.replace(temporary, path)
                _sync(path.parent)
        finally:
            _unfinished.pop(temporary, None)
            temporary.unlink(missing_ok=True)


@scope
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """A temporary folder beside `path` that replaces it if the block ends without an exception.

    A folder cannot be replaced in one step: the old one is moved aside first, and
    `recover_folder` restores it if the process dies in between.

    Raises:
        OSError: the disk is full, or a file is too large; `path` is left as it was.
        ValueError: `path` is a file.
    """
    path = Path(path).resolve()  # keep a link, replace its target
    with _unfinished_folder(path) as temporary:
        yield temporary
        _finish(temporary, path)
        _swap(temporary, path)


@scope
def atomic_files(folder: str | Path) -> Iterator[Path]:
    """A temporary folder whose files replace those in `folder` if the block ends without an error.

    Raises:
        OSError: the disk is full, or a file is too large; `folder` is left as it was.
        ValueError: `folder` is a file.
    """
    folder = Path(folder).resolve()
    with _unfinished_folder(folder) as temporary:
        yield temporary
        for file in _finish(temporary, folder):
            final = folder / file.relative_to(temporary)
            final.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, final)


@scope
def _unfinished_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, which is removed at the end."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"expected a folder, or an unused name; {path} is a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    with _disk_explained(path):
        nested = _in_unfinished(path)
        if not nested:
            _remove_dead(path)
        temporary = Path(tempfile.mkdtemp(".new", _prefix(path), path.parent))
        try:
            _unfinished[temporary] = temporary.stat().st_ino
            yield temporary
            if not nested:
                _sync(path.parent)
        finally:
            _unfinished.pop(temporary, None)
            shutil.rmtree(temporary, ignore_errors=True)


def _finish(temporary: Path, path: Path) -> list[Path]:
    """Sync a folder that will become `path`, or go into it, to the disk; return its files."""
    if not temporary.exists() or temporary.stat().st_ino != _unfinished[temporary]:
        raise OSError(f"cannot write {path}: {_GONE}")
    temporary.chmod(0o777 & ~_umask())
    files = [entry for entry in temporary.rglob("*") if entry.is_file()]
    if not _in_unfinished(path):  # otherwise it is synced together with the folder around it
        for entry in [*files, *filter(Path.is_dir, temporary.rglob("*")), temporary]:
            _sync(entry)
        _announce([path / file.relative_to(temporary) for file in files])
    return files


def _swap(temporary: Path, path: Path) -> None:
    """Replace a folder with another, even if other processes replace it at the same time."""
    aside = _aside(path)
    for attempt in range(_ATTEMPTS):
        try:
            if path.exists():
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(path, aside)
            os.replace(temporary, path)
            break
        except OSError as error:
            busy = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
            if not busy or not temporary.exists() or attempt + 1 == _ATTEMPTS:
                raise
            time.sleep(0.01)
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
    return stat.st_ino, stat.st_ctime_ns  # the inodes of removed folders are used again


def is_temporary(path: Path) -> bool:
    """Whether a path is an unfinished write, a lock, or a folder that was moved aside."""
    return bool(_TEMPORARY.fullmatch(path.name) or _AUXILIARY.fullmatch(path.name))


@scope
def _disk_explained(path: Path) -> Iterator[None]:
    """Name the file or folder that could not be written, the reason, and the free space.

    Raises:
        OSError: the disk is full, a file is too large, or the disk fails.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        if number is None:  # from safetensors or pandas, or explained already
            match = re.search(r"os error (\d+)", str(error))
            number = int(match[1]) if match else None
        if number == errno.ENOENT and not path.parent.exists():
            raise OSError(f"cannot write {path}: {_GONE}") from error
        if number not in _FULL:
            raise
        free = decimal(shutil.disk_usage(path.parent).free)
        explained = OSError(
            f"cannot write {path}: {_FULL[number]}; {free} are free there. No incomplete file was "
            "left, and earlier content is unchanged. Free some space, or choose another folder."
        )
        explained.errno = number
        raise explained from error


def _announce(files: list[Path]) -> None:
    """Notify the writers of folders of the files that will appear there."""
    files = [file.parent.resolve() / file.name for file in files]  # links are replaced themselves
    for folder in {parent for file in files for parent in file.parents}:
        if (writer := writers.get(folder)) is not None:
            writer.writes(files)


def _in_unfinished(path: Path) -> bool:
    return not _unfinished.keys().isdisjoint((path, *path.parents))


def _prefix(path: Path) -> str:
    return f".{path.name}.{_host()}-{os.getpid()}-"


def _host() -> str:
    return re.sub(r"[^\w]", "_", platform.node())


def _remove_dead(path: Path) -> None:
    """Remove the temporary files of earlier writes to a path that were killed on this machine."""
    for entry in path.parent.glob(f".{glob.escape(path.name)}.{_host()}-*.new*"):
        match = _TEMPORARY.fullmatch(entry.name)
        if match is None or match["name"] != path.name or entry in _unfinished:
            continue
        if int(match["pid"]) != os.getpid() and _runs(int(match["pid"])):
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:  # the process may belong to another user
        return not isinstance(error, ProcessLookupError)
    return True


def _sync(path: Path) -> None:
    """Write a file, or a folder's list of names, to the disk, where the system supports it."""
    if path.is_dir() and os.name != "posix":
        return
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


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
