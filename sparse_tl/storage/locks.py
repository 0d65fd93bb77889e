"""Locks that give a file or folder to one process at a time, and refuse a second one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from sparse_tl.calls.scopes import scope
from sparse_tl.storage.files import check_writable


def locked(path: Path) -> FileLock:
    """A lock on a file or folder, which ends when it is released or garbage-collected.

    It is a hidden file beside `path`. One process can hold it several times.

    Raises:
        ValueError: another process holds it.
    """
    path = path.resolve()
    file = check_writable(path.parent) / f".{path.name}.lock"
    lock = FileLock(file, thread_local=False, is_singleton=True)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(
            f"expected {path} to be in use by one process at a time; another one is writing to "
            "it. Wait until that ends, or choose another place."
        ) from None
    return lock


@scope
def held(path: Path | None) -> Iterator[None]:
    """Lock a file or folder for this process within the block; see `locked`."""
    lock = None if path is None else locked(path)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
