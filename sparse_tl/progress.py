"""Progress display for long work.

A terminal shows a bar, a log file a line per minute, and Jupyter a line that updates itself. A
saved notebook keeps that line, which finally states what was done and how long it took; work that
takes less than half a second leaves no line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

DELAY, PAUSE = 0.5, 0.2
"""Seconds until a notebook shows anything, and minimum seconds between its updates."""
LOG_DELAY, LOG_PAUSE = 10.0, 60.0
"""The same for lines of a log."""


@contextmanager
def tracked(
    title: str, total: int, shown: bool = True, *, done: int = 0
) -> Iterator[Callable[..., None]]:
    """Show progress and the remaining time.

    The block calls the yielded function after each piece of work, with the latest measurements if
    there are any.

    Args:
        title: title of the work.
        total: number of pieces of work.
        shown: False to show nothing.
        done: number of pieces done before, when resuming.
    """
    if not shown:
        yield lambda measured="": None
    elif in_notebook() or not Console(stderr=True).is_terminal:
        line = _Line(title, total, done)
        try:
            yield line.step
        except BaseException:
            line.end("stopped at ")
            raise
        line.end()
    else:
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[measured]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(),
        )
        # On standard error, so that a command's output can be redirected to a file.
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=total, completed=done, measured="")

            def step(measured: str = "") -> None:
                latest = measured or bar.tasks[0].fields["measured"]
                bar.update(task, advance=1, measured=latest)

            yield step


def say(line: str) -> None:
    """Write a line below the cell in a notebook, or else to standard error."""
    print(line, file=sys.stdout if in_notebook() else sys.stderr, flush=True)


class _Line:
    """A line with the progress, the elapsed or remaining time, and the latest measurements.

    In a notebook it is updated in place, needs no widgets, and is small when saved: rich's own
    display leaves an empty box, and a widget that is missing when the notebook is reopened. A log
    file gets a line per minute and one at the end.
    """

    _handle: Any = None

    def __init__(self, title: str, total: int, done: int) -> None:
        self.title, self.total, self.done, self.measured = title, total, done, ""
        self._before, self._shown, self._in_notebook = done, False, in_notebook()
        delay, self._pause = (DELAY, PAUSE) if self._in_notebook else (LOG_DELAY, LOG_PAUSE)
        self._started = time.monotonic()
        self._due = self._started + delay

    def step(self, measured: str = "") -> None:
        self.done, self.measured = self.done + 1, measured or self.measured
        now = time.monotonic()
        if now < self._due or self.done == self.total:  # `end` shows the last line
            return
        self._due, self._shown = now + self._pause, True
        each = (now - self._started) / (self.done - self._before)
        left = f"{clock((self.total - self.done) * each)} left"
        meter = (
            f'<progress value="{self.done}" max="{self.total}" style="width:10em;'
            'margin:0 0.8em;vertical-align:middle"></progress>'
        )
        self._show("", left, meter)

    def end(self, how: str = "") -> None:
        seconds = time.monotonic() - self._started
        if self._shown or seconds >= DELAY:
            self._show(how, clock(seconds), meter=" · ")

    def _show(self, how: str, when: str, meter: str) -> None:
        parts = (f"{how}{self.done:,} of {self.total:,}", when, self.measured)
        text = " · ".join(part for part in parts if part)
        line = f"{self.title} · {text}"
        if not self._in_notebook:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
            return
        from IPython.display import display

        html = (
            '<div style="font-size:0.9em;opacity:0.8;font-variant-numeric:tabular-nums">'
            f"{escape(self.title)}{meter}{escape(text)}</div>"
        )
        data = {"text/html": html, "text/plain": line}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def in_notebook() -> bool:
    """Whether output appears below a notebook cell."""
    return Console().is_jupyter


def clock(seconds: float) -> str:
    """A duration as ``0:07``, ``12:30`` or ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
