"""Progress bars, and lines about what happens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from tqdm import tqdm

DELAY, PAUSE, LOG_PAUSE = 0.5, 0.2, 60.0
"""Seconds until a bar appears, and minimum seconds between its updates: on a screen, in a log."""


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
    on_screen = _in_notebook() or sys.stderr.isatty()
    bar = tqdm(
        desc=title,
        total=total,
        initial=done,
        disable=not shown,
        file=_output() if on_screen else _Log(),
        delay=DELAY,
        mininterval=PAUSE if on_screen else LOG_PAUSE,
        miniters=1,  # look at the clock after each piece, since they do not take equally long
        dynamic_ncols=True,
    )
    with bar:

        def step(measured: str = "") -> None:
            if measured:
                bar.set_postfix_str(measured, refresh=False)
            bar.update()

        yield step


def say(line: str) -> None:
    """Write a line below the cell in a notebook, or else to standard error."""
    print(line, file=_output(), flush=True)


class _Log:
    """Standard error in a file, where each update of a bar is a line."""

    encoding = "utf-8"

    def write(self, text: str) -> None:
        if text := text.strip():  # not what ends a bar on a screen
            sys.stderr.write(f"{text}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def _output() -> Any:
    # Not on standard output of a command, which may be redirected to a file.
    return sys.stdout if _in_notebook() else sys.stderr


def _in_notebook() -> bool:
    """Whether output appears below a notebook cell."""
    return Console().is_jupyter
