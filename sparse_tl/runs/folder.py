"""The output folder of a command: its settings, finished stages, and results."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from sparse_tl import ranks
from sparse_tl.atomic import is_temporary, writers
from sparse_tl.files import check_writable, read_json, recover_folder, write_json
from sparse_tl.gates import SparseTransformer
from sparse_tl.locks import Hold
from sparse_tl.plots.rendering import Figure
from sparse_tl.results import Result, from_fields, table_html
from sparse_tl.scopes import scope
from sparse_tl.training import DenseAndSparse, HeldOut

Saved = TypeVar("Saved", bound=Result)

RUN_FILE = "run.json"
_FIELDS = {"settings": dict, "seconds": dict, "pinned": dict, "wrote": list}


def save_figure(figure: Figure, folder: Path, name: str) -> None:
    """Write a figure in every format: interactive HTML, SVG and PNG."""
    for suffix in ("html", "svg", "png"):
        figure.save(folder / f"{name}.{suffix}")


def saved(folder: Path, kind: type[Saved], measured: Callable[[], Saved]) -> Saved:
    """A result: the one that an earlier call saved in a folder, or a new one, saved there."""
    if ranks.on_first(lambda: recover_folder(folder)):
        return kind.load(folder)
    found = measured()
    found.save(folder)
    return found


@dataclass(frozen=True, repr=False)
class SparseRun:
    """Results of a command that sparsifies a model.

    Args:
        metrics: content of ``metrics.json``; ``dense`` and ``sparse`` are fields of `HeldOut`.
        sparse: the sparse model.
    """

    metrics: dict[str, Any]
    sparse: SparseTransformer

    @classmethod
    def read(cls, folder: Path, sparse: SparseTransformer) -> SparseRun:
        """The results whose ``metrics.json`` a folder holds.

        Raises:
            ValueError: a number is missing, or of another type.
        """
        file = folder / "metrics.json"
        found = cls(read_json(file), sparse)
        try:
            _ = found.held_out, found.texts, found.verdict + ""
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"expected the metrics of a run in {file}; {error!r}") from error
        return found

    @property
    def verdict(self) -> str:
        """Whether post-training met its target, and with how many attention edges."""
        return self.metrics["verdict"]

    @property
    def held_out(self) -> dict[str, HeldOut]:
        """Held-out measurements of the dense and the sparse model."""
        return {side: _held_out(self.metrics[side]) for side in ("dense", "sparse")}

    @property
    def texts(self) -> dict[str, DenseAndSparse]:
        """Held-out measurements of both models on every text and task, if there are several."""
        return {
            name: DenseAndSparse(**{side: _held_out(numbers) for side, numbers in sides.items()})
            for name, sides in self.metrics.get("texts", {}).items()
        }

    def to_pandas(self) -> pd.DataFrame:
        """Held-out measurements of both models, side by side, or on every text."""
        if self.texts:
            return pd.DataFrame.from_dict(
                {name: found.row() for name, found in self.texts.items()}, orient="index"
            )
        return pd.DataFrame({side: found.numbers for side, found in self.held_out.items()})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.verdict})"

    def _repr_html_(self) -> str:
        return table_html(self.to_pandas(), self.verdict)


def _held_out(numbers: dict[str, Any]) -> HeldOut:
    """Measurements as they were written; those that older versions did not write are None."""
    absent = {field.name: None for field in fields(HeldOut) if field.default is None}
    by_group = {
        name: {int(group): value for group, value in numbers.get(name, {}).items()}
        for name in ("group_losses", "group_divergences")  # JSON keys are strings
    }
    return from_fields(HeldOut, {**absent, **numbers, **by_group})


class RunFolder:
    """An output folder that a command can resume.

    ``run.json`` holds the command's settings, values noted by `pin`, and the seconds of each stage.
    A stage is finished when its result exists in the folder; the caller decides which file that is.
    It also lists every file that the command writes, which is what `restart` removes. Of several
    ranks the first looks and writes, and the others are told.

    Args:
        path: the folder; created if absent.
        settings: everything that determines the results; a folder with other settings is refused.
        restart: remove what an earlier run wrote first.

    Raises:
        ValueError: the folder cannot be written, is in use by another process, holds another run,
            or holds other files; ranks have other settings.
    """

    def __init__(
        self, path: str | Path, settings: dict[str, Any], *, restart: bool = False
    ) -> None:
        self.path = Path(path)
        ranks.check_alike({"out": str(path), **settings})
        found = ranks.on_first(lambda: self._opened(restart))
        empty: dict[str, Any] = {"settings": settings, "seconds": {}, "pinned": {}, "wrote": []}
        self._said = found or empty
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
        writers[self.path.resolve()] = self

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

    def writes(self, files: list[Path]) -> None:
        """Note files before they appear; see `Writer`."""
        names = [file.relative_to(self.path.resolve()).as_posix() for file in files]
        new = {*names} - {*self._said["wrote"], RUN_FILE}
        if new:
            self._said["wrote"] = sorted({*self._said["wrote"], *new})
            self._write()

    @property
    def seconds(self) -> float:
        """Total seconds of all stages, over all calls of the command."""
        return sum(self._said["seconds"].values())

    def _opened(self, restart: bool) -> dict[str, Any] | None:
        """What an earlier call left in ``run.json``, if the folder goes on from it."""
        check_writable(self.path)
        self._hold = Hold(self.path)
        found = self._found()
        if found is None:
            return None
        if not restart and any((self.path / name).exists() for name in found["wrote"]):
            return found
        self._clear(found)  # also where an earlier command failed before it produced anything
        return None

    def _found(self) -> dict[str, Any] | None:
        if (self.path / RUN_FILE).exists():
            found = read_json(self.path / RUN_FILE)
            if isinstance(found, dict) and all(
                type(found.get(name)) is kind for name, kind in _FIELDS.items()
            ):
                return found
            raise ValueError(
                f"expected the {RUN_FILE} in {self.path} to be one of this version. Remove the "
                "folder yourself, or choose another --out."
            )
        elif all(map(is_temporary, self.path.iterdir())):
            return None
        raise ValueError(
            f"expected an empty folder or one of an earlier run, with {RUN_FILE}, as output; "
            f"{self.path} holds {sorted(p.name for p in self.path.iterdir())[:5]}"
        )

    def _clear(self, found: dict[str, Any]) -> None:
        """Remove what the earlier run wrote, and nothing else.

        Raises:
            ValueError: somebody else's files are in folders that the run wrote.
        """
        own = {self.path / str(name) for name in found["wrote"]}
        folders = {parent for file in own for parent in file.parents if self.path in parent.parents}
        inside = [entry for folder in folders if folder.is_dir() for entry in folder.iterdir()]
        strange = [
            os.path.relpath(entry, self.path)
            for entry in {*inside, *own}
            if not is_temporary(entry)
            and (entry not in own | folders or (entry in own and entry.is_dir()))
        ]
        place = Path(os.path.realpath(self.path))
        if strange or any(place not in Path(os.path.realpath(file)).parents for file in own):
            raise ValueError(
                f"expected nothing but files of the run where it wrote, to begin anew; {self.path} "
                f"holds {sorted(strange)[:5]}, which would be deleted. Move that elsewhere."
            )
        for file in own:
            file.unlink(missing_ok=True)
        for entry in [*folders, *filter(is_temporary, self.path.iterdir())]:
            if entry.is_dir():
                shutil.rmtree(entry)  # nothing is in it but what is unfinished
            else:
                entry.unlink(missing_ok=True)
        (self.path / RUN_FILE).unlink()

    def _write(self) -> None:
        if ranks.is_first():
            write_json(self.path / RUN_FILE, self._said)
