"""Live progress of long work, in a terminal and in Jupyter alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import Progress


@contextmanager
def tracked(title: str, total: int, shown: bool = True) -> Iterator[Callable[[], None]]:
    """A bar with the time that is left; the block calls what it gets once per piece of work."""
    with Progress(disable=not shown) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)
