"""Live progress of long work: a bar in a terminal, one line that renews itself in Jupyter.

A saved notebook keeps that one line, which then says what was done and how long it took; work of
less than half a second leaves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

DELAY, PAUSE = 0.5, 0.2
"""Seconds before a notebook shows anything, and at least between two of its updates."""


@contextmanager
def tracked(title: str, total: int, shown: bool = True) -> Iterator[Callable[[], None]]:
    """A bar with the time that is left; the block calls what it gets once per piece of work."""
    with ProgressBar(title, total, shown=shown) as bar:
        yield lambda: bar.update(bar.done + 1)


class ProgressBar:
    """How much of some work is done, and what was measured last.

    Args:
        title: what is running.
        total: pieces of work.
        done: pieces done before, when work is resumed.
        shown: False to stay silent.
    """

    def __init__(self, title: str, total: int, *, done: int = 0, shown: bool = True) -> None:
        self.title, self.total, self.done, self.measured = title, total, done, ""
        self._display: _Terminal | _Notebook | None = None
        if shown:
            self._display = (_Notebook if in_notebook() else _Terminal)(self)

    def __enter__(self) -> ProgressBar:
        if self._display is not None:
            self._display.start()
        return self

    def update(self, done: int, measured: str = "") -> None:
        """Show how many pieces are done, and what was measured."""
        self.done, self.measured = done, measured or self.measured
        if self._display is not None:
            self._display.renew()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._display is not None:
            self._display.stop(stopped=kind is not None)


class _Terminal:
    """On standard error, so that a command's output can be kept in a file."""

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[measured]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(
            bar.title, total=bar.total, completed=bar.done, measured=""
        )

    def start(self) -> None:
        self._progress.start()

    def renew(self) -> None:
        self._progress.update(self._task, completed=self._bar.done, measured=self._bar.measured)

    def stop(self, *, stopped: bool) -> None:
        self._progress.stop()


class _Notebook:
    """One output, replaced in place: needs no widgets, and is small in the saved notebook.

    rich's own display leaves a widget that is gone when the notebook is opened again, and an empty
    box.
    """

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar
        self._before = bar.done
        self._handle: Any = None

    def start(self) -> None:
        self._started = time.monotonic()
        self._due = self._started + DELAY

    def renew(self) -> None:
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + PAUSE
        bar, seconds = self._bar, time.monotonic() - self._started
        rate = (bar.done - self._before) / seconds
        left = f"{clock((bar.total - bar.done) / rate)} left" if rate > 0 else ""
        meter = (
            f'<progress value="{bar.done}" max="{bar.total}" style="width:10em;margin:0 0.8em;'
            'vertical-align:middle"></progress>'
        )
        self._show([f"{bar.done:,} of {bar.total:,}", left, bar.measured], meter)

    def stop(self, *, stopped: bool) -> None:
        seconds = time.monotonic() - self._started
        if self._handle is None and seconds < DELAY:
            return
        bar = self._bar
        count = f"{bar.done:,} of {bar.total:,}"
        self._show([f"stopped at {count}" if stopped else count, clock(seconds), bar.measured])

    def _show(self, parts: list[str], meter: str = " · ") -> None:
        from IPython.display import display  # only notebooks get here

        said = " · ".join(part for part in parts if part)
        html = (
            '<div style="font-size:0.9em;opacity:0.8;font-variant-numeric:tabular-nums">'
            f"{escape(self._bar.title)}{meter}{escape(said)}</div>"
        )
        data = {"text/html": html, "text/plain": f"{self._bar.title} · {said}"}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def in_notebook() -> bool:
    """Whether what is shown appears below a cell."""
    return Console().is_jupyter


def clock(seconds: float) -> str:
    """As ``0:07``, ``12:30`` or ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
