"""One process at a time in a folder; a second one is refused, not mixed up with the first."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from sparse_tl.scopes import scope, whole

_locks: weakref.WeakValueDictionary[Path, FileLock] = weakref.WeakValueDictionary()
"""Of this process, which may hold one several times."""


class Hold:
    """A folder for this process alone, until released or forgotten.

    The kernel lifts the lock of a process that dies. Disks without locks are used without.

    Args:
        folder: the folder; the lock is a hidden file beside it.

    Raises:
        ValueError: another process holds the folder.
    """

    @whole
    def __init__(self, folder: Path) -> None:
        place = folder.resolve()
        file = place.with_name(f".{place.name}.lock")
        lock = _locks.setdefault(file, FileLock(file, thread_local=False))
        self.release = lambda: None
        with suppress(OSError, NotImplementedError):
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(blocking=False)
            except Timeout:
                raise ValueError(
                    f"expected {folder} to be in use by one process at a time; another one writes "
                    "to it now. Wait for that, or choose another folder."
                ) from None
            self.release = weakref.finalize(self, _release, lock, file)


@scope
def held(folder: Path | None) -> Iterator[None]:
    """Inside the block, a folder is for this process alone; see `Hold`."""
    if folder is None:
        yield
        return
    hold = Hold(folder)
    try:
        yield
    finally:
        hold.release()


def _release(lock: FileLock, file: Path) -> None:
    if lock.lock_counter == 1:
        with suppress(OSError):
            file.unlink()  # while it is held: who waits for it sees that it is gone
    lock.release()
