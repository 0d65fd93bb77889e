"""The output folder of a command: what it was made with, what is finished, how long it took."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparse_tl.files import check_writable, read_json, recover_folder, write_json

RUN_FILE = "run.json"


class RunFolder:
    """An output folder that a command can come back to.

    ``run.json`` holds the command's settings, what `pin` noted and the seconds of each stage. A
    stage is finished when its result is in the folder; the caller decides which file that is.

    Args:
        path: the folder; made when absent.
        settings: what determines the results; a folder made with others is refused.
        restart: remove an earlier run of this kind first.

    Raises:
        ValueError: the folder cannot be written, holds another run, or holds other files.
    """

    def __init__(
        self, path: str | Path, settings: dict[str, Any], *, restart: bool = False
    ) -> None:
        self.path = check_writable(path)
        self.settings = settings
        found = self._found()
        if found is not None and (restart or self._nothing_done()):
            self._clear()
            found = None
        if found is None:
            self._seconds: dict[str, float] = {}
            self._pinned: dict[str, Any] = {}
            self._write()
            return
        there = found["settings"]
        different = [k for k in {**there, **settings} if there.get(k) != settings.get(k)]
        if different:
            raise ValueError(
                f"{self.path} holds a run with other settings ("
                + ", ".join(
                    f"{k} {there.get(k)!r} there, {settings.get(k)!r} here" for k in different
                )
                + "). Choose another --out, or begin anew with --restart."
            )
        self._seconds, self._pinned = found["seconds"], found.get("pinned", {})

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def finished(self, name: str) -> bool:
        """Whether a stage's result is there."""
        recover_folder(self.path / name)
        return (self.path / name).exists()

    def pin(self, name: str, value: Any) -> None:
        """Note what the run was made from, where that is known only once it is loaded.

        Raises:
            ValueError: an earlier call of the command was made from something else.
        """
        earlier = self._pinned.setdefault(name, value)
        if earlier != value:
            raise ValueError(
                f"{self.path} holds results of another {name} ({earlier} there, {value} here). "
                "Choose another --out, or begin anew with --restart."
            )
        self._write()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the seconds of a block, also when it is interrupted."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - started
            self._write()

    @property
    def seconds(self) -> float:
        """Seconds spent on all stages, over all calls of the command."""
        return sum(self._seconds.values())

    def _found(self) -> dict[str, Any] | None:
        if (self.path / RUN_FILE).exists():
            found = read_json(self.path / RUN_FILE)
            if isinstance(found, dict) and {"settings", "seconds"} <= found.keys():
                return found
        elif not any(self.path.iterdir()):
            return None
        raise ValueError(
            f"expected an empty folder or one of an earlier run, with {RUN_FILE}, as output; "
            f"{self.path} holds {sorted(p.name for p in self.path.iterdir())[:5]}"
        )

    def _nothing_done(self) -> bool:
        """Whether an earlier command was refused before it left anything."""
        left = [entry for entry in self.path.iterdir() if entry.name != RUN_FILE]
        return not any(entry.is_file() or any(entry.iterdir()) for entry in left)

    def _clear(self) -> None:
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _write(self) -> None:
        write_json(
            self.path / RUN_FILE,
            {"settings": self.settings, "seconds": self._seconds, "pinned": self._pinned},
        )
