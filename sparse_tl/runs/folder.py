"""The output folder of a command: its settings, finished stages, and results."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sparse_tl import ranks
from sparse_tl.files import check_writable, read_json, recover_folder, write_json
from sparse_tl.gates import SparseTransformer
from sparse_tl.plots.rendering import Figure
from sparse_tl.results import table_html
from sparse_tl.scopes import scope
from sparse_tl.training import HeldOut

RUN_FILE = "run.json"


def save_figure(figure: Figure, folder: Path, name: str) -> None:
    """Write a figure in every format: interactive HTML, SVG and PNG."""
    for suffix in ("html", "svg", "png"):
        figure.save(folder / f"{name}.{suffix}")


@dataclass(frozen=True, repr=False)
class SparseRun:
    """Results of a command that sparsifies a model.

    Args:
        metrics: content of ``metrics.json``; ``dense`` and ``sparse`` are fields of `HeldOut`.
        sparse: the sparse model.
    """

    metrics: dict[str, Any]
    sparse: SparseTransformer

    @property
    def verdict(self) -> str:
        """Whether post-training met its target, and with how many attention edges."""
        return self.metrics["verdict"]

    @property
    def held_out(self) -> dict[str, HeldOut]:
        """Held-out measurements of the dense and the sparse model."""
        found = {}
        for side in ("dense", "sparse"):
            numbers = self.metrics[side]
            losses = numbers.get("group_losses", {})
            groups = {int(group): loss for group, loss in losses.items()}  # JSON keys are strings
            found[side] = HeldOut(**{**numbers, "group_losses": groups})
        return found

    def to_pandas(self) -> pd.DataFrame:
        """Held-out measurements of both models, side by side."""
        return pd.DataFrame({side: found.numbers for side, found in self.held_out.items()})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.verdict})"

    def _repr_html_(self) -> str:
        return table_html(self.to_pandas(), self.verdict)


class RunFolder:
    """An output folder that a command can resume.

    ``run.json`` holds the command's settings, values noted by `pin`, and the seconds of each stage.
    A stage is finished when its result exists in the folder; the caller decides which file that is.
    Of several ranks the first looks and writes, and the others are told.

    Args:
        path: the folder; created if absent.
        settings: everything that determines the results; a folder with other settings is refused.
        restart: remove an earlier run of this kind first.

    Raises:
        ValueError: the folder cannot be written, holds another run, or holds other files; ranks
            have other settings.
    """

    def __init__(
        self, path: str | Path, settings: dict[str, Any], *, restart: bool = False
    ) -> None:
        self.path = Path(path)
        ranks.check_alike({"out": str(path), **settings})
        found = ranks.on_first(lambda: self._opened(restart))
        self._said = {"settings": settings, "seconds": {}, "pinned": {}, **(found or {})}
        there = self._said["settings"]
        different = [
            f"{name} {there.get(name)!r} there, {settings.get(name)!r} here"
            for name in {**there, **settings}
            if there.get(name) != settings.get(name)
        ]
        if different:
            raise ValueError(
                f"{self.path} holds a run with other settings ({', '.join(different)}). "
                "Choose another --out, or begin anew with --restart."
            )
        self._write()

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def finished(self, name: str) -> bool:
        """Whether a stage's result exists."""
        return ranks.on_first(lambda: recover_folder(self.path / name))

    def pin(self, name: str, value: Any) -> None:
        """Record an input of the run that is only known once it is loaded.

        Raises:
            ValueError: an earlier call of the command used another input.
        """
        earlier = self._said["pinned"].setdefault(name, value)
        if earlier != value:
            raise ValueError(
                f"{self.path} holds results of another {name} ({earlier} there, {value} here). "
                "Choose another --out, or begin anew with --restart."
            )
        self._write()

    @scope
    def stage(self, name: str, what: str = "") -> Iterator[None]:
        """Add the duration of a block to a stage, even if it is interrupted.

        Raises:
            ValueError: the block raised it; the message is prefixed with `what`.
        """
        started = time.monotonic()
        try:
            yield
        except ValueError as error:
            if not what:
                raise
            raise ValueError(f"{what}: {error}") from error
        finally:
            seconds = self._said["seconds"]
            seconds[name] = seconds.get(name, 0.0) + time.monotonic() - started
            self._write()

    @property
    def seconds(self) -> float:
        """Total seconds of all stages, over all calls of the command."""
        return sum(self._said["seconds"].values())

    def _opened(self, restart: bool) -> dict[str, Any] | None:
        """What an earlier call left in ``run.json``, if the folder goes on from it."""
        check_writable(self.path)
        found = self._found()
        if found is not None and (restart or self._nothing_done()):
            self._clear()
            return None
        return found

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
        """Whether an earlier command failed before producing anything."""
        left = [entry for entry in self.path.iterdir() if entry.name != RUN_FILE]
        return not any(entry.is_file() or any(entry.iterdir()) for entry in left)

    def _clear(self) -> None:
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _write(self) -> None:
        if ranks.is_first():
            write_json(self.path / RUN_FILE, self._said)
