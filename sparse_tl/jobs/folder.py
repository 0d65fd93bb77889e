"""The output folder of a command: its settings, finished stages and results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from sparse_tl.gates import SparseTransformer
from sparse_tl.jobs.settings import Job
from sparse_tl.plots.page.rendering import Figure
from sparse_tl.plots.panels import grid
from sparse_tl.results import Result, from_fields, table_html
from sparse_tl.storage.files import check_writable, locked, read_json, write_json
from sparse_tl.training import DenseAndSparse, HeldOut

Saved = TypeVar("Saved", bound=Result)

SIDES = ("dense", "sparse")
RUN_FILE = "run.json"
_EARLIER = "earlier-"
"""Start of the names of the folders, in a run's folder, of the runs before each restart."""


def save_figures(
    figures: Mapping[str, Figure], folder: Path, suffixes: Sequence[str] = ("html", "svg", "png")
) -> None:
    """Write figures by name; plots as SVG and PNG only if there is a browser to draw them."""
    plots = {name: each for name, each in figures.items() if isinstance(each, grid.GridFigure)}
    can_draw = grid.has_browser()
    if plots and can_draw:
        grid.draw_images([*plots.values()])
    for name, figure in figures.items():
        for suffix in suffixes:
            if suffix == "html" or can_draw or name not in plots:
                figure.save(folder / f"{name}.{suffix}")


def saved(folder: Path, kind: type[Saved], measured: Callable[[], Saved]) -> Saved:
    """The result that an earlier call saved in a folder; otherwise a new one, saved there."""
    if folder.exists():
        return kind.load(folder)
    result = measured()
    result.save(folder)
    return result


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

    def to_pandas(self) -> pd.DataFrame:
        """Held-out measurements of both models: on every text and task, if the job has several."""

        def held_out(sides: dict[str, Any]) -> DenseAndSparse:
            return DenseAndSparse(*(from_fields(HeldOut, sides[side]) for side in SIDES))

        if texts := self.metrics.get("texts"):
            rows = {name: held_out(sides).row() for name, sides in texts.items()}
            return pd.DataFrame.from_dict(rows, orient="index")
        both = held_out(self.metrics)
        return pd.DataFrame({"dense": both.dense.numbers, "sparse": both.sparse.numbers})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.verdict})"

    def _repr_html_(self) -> str:
        return table_html(self.to_pandas(), self.verdict)


_RECORD = {"settings", "seconds", "pinned"}


class RunFolder:
    """An output folder that a command can resume.

    ``run.json`` holds the job's settings, of which some may be `changed`, values noted by `pin`,
    and the seconds of each stage.
    A stage is finished when its result exists in the folder; the caller decides which file that is.

    A folder with other settings, or without a run, is refused. A job with `restart` first moves all
    that an earlier run's folder holds into a folder ``earlier-1``, ``earlier-2``, ... in it.
    `reads_only` neither locks nor writes the folder, which another process of this job does.
    """

    def __init__(self, path: Path, job: Job, *, reads_only: bool = False, **changed: Any) -> None:
        self.path, settings = path, job.settings(**changed)
        self._reads_only = reads_only
        earlier = None if reads_only else self._open(job.restart)
        empty: dict[str, Any] = {"settings": settings, "seconds": {}, "pinned": {}}
        self._record = earlier or empty
        recorded = self._record["settings"]
        different = [
            f"{name} {recorded.get(name)!r:.200} there, {settings.get(name)!r:.200} here"
            for name in {**recorded, **settings}
            if recorded.get(name) != settings.get(name)
        ]
        if different:
            raise ValueError(
                f"{self.path} holds a run with other settings ({', '.join(different)}). "
                "Choose another --out, or start over with --restart."
            )
        self._write()

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def finished(self, name: str) -> bool:
        """Whether a stage's result exists."""
        return (self.path / name).exists()

    def pin(self, name: str, value: Any) -> None:
        """Record an input that is known only once it is loaded; refuse another one."""
        earlier = self._record["pinned"].setdefault(name, value)
        if earlier != value:
            raise ValueError(
                f"{self.path} holds results of another {name} ({earlier!s:.200} there, {value} "
                "here). Choose another --out, or start over with --restart."
            )
        self._write()

    @contextmanager
    def stage(self, name: str, title: str = "") -> Iterator[None]:
        """Add the duration of a block to a stage, and `title` to the block's ValueErrors."""
        started = time.monotonic()
        try:
            yield
        except ValueError as error:
            if not title:
                raise
            raise ValueError(f"{title}: {error}") from error
        finally:
            seconds = self._record["seconds"]
            seconds[name] = seconds.get(name, 0.0) + time.monotonic() - started
            self._write()

    @property
    def seconds(self) -> float:
        """Total seconds of all stages, over all calls of the command."""
        return sum(self._record["seconds"].values())

    def _open(self, restart: bool) -> dict[str, Any] | None:
        """Lock the folder; return the record of an earlier call, if this one resumes it."""
        file = check_writable(self.path) / RUN_FILE
        self._lock = ExitStack()  # until this object is collected
        self._lock.enter_context(locked(file))
        names = [entry.name for entry in self.path.iterdir()]
        results = {name for name in names if not name.startswith((".", _EARLIER))}
        if results and RUN_FILE not in results:
            raise ValueError(
                f"{self.path} is neither empty nor the folder of an earlier run: it has no "
                f"{RUN_FILE}, but {sorted(results)[:5]}. Choose another --out."
            )
        if restart and results:
            self._set_aside(results)
            return None
        # What failed before it produced anything may be changed.
        record = read_json(file) if results - {RUN_FILE} else None
        if record is not None and not (isinstance(record, dict) and record.keys() >= _RECORD):
            raise ValueError(f"{file} is from another version. Choose another --out, or --restart.")
        return record

    def _set_aside(self, names: set[str]) -> None:
        asides = (self.path / f"{_EARLIER}{number}" for number in count(1))
        aside = next(folder for folder in asides if not folder.exists())
        aside.mkdir()
        # The record first: a folder that is half moved is refused, not resumed.
        for name in [RUN_FILE, *names - {RUN_FILE}]:
            (self.path / name).rename(aside / name)

    def _write(self) -> None:
        if not self._reads_only:
            write_json(self.path / RUN_FILE, self._record)
