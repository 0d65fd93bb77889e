"""Locks that give a file or folder to one process at a time, and refuse a second one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from sparse_tl.calls.scopes import scope


class Hold:
    """A lock on a file or folder for this process, until it is released or garbage-collected.

    The kernel lifts the lock of a process that dies. On disks without locks, nothing is locked.

    Args:
        path: the file or folder; the lock is a hidden file beside it.

    Raises:
        ValueError: another process holds it.
    """

    def __init__(self, path: Path) -> None:
        path = path.resolve()
        file = path.with_name(f".{path.name}.lock")
        # One lock per process, which may hold it several times.
        lock = FileLock(file, thread_local=False, is_singleton=True)
        self.release = lambda: None
        with suppress(OSError, NotImplementedError):
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(blocking=False)
            except Timeout:
                raise ValueError(
                    f"expected {path} to be in use by one process at a time; another one is "
                    "writing to it. Wait until that ends, or choose another place."
                ) from None
            self.release = weakref.finalize(self, _release, lock, file)


@scope
def held(path: Path | None) -> Iterator[None]:
    """Lock a file or folder for this process within the block; see `Hold`."""
    if path is None:
        yield
        return
    hold = Hold(path)
    try:
        yield
    finally:
        hold.release()


def _release(lock: FileLock, file: Path) -> None:
    if lock.lock_counter == 1:
        with suppress(OSError):
            file.unlink()  # while the lock is held, so that waiting processes notice the removal
    lock.release()
