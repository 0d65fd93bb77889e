"""How a run ends before its time: by a signal, or because another rank is gone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from torch.distributed import DistError

from sparse_tl import ranks
from sparse_tl.scopes import SIGNALS, scope


@scope
def interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Defer Ctrl-C until the running step is complete, so that checkpoints are consistent.

    The same goes for signals that a cluster or a closing terminal sends before killing a process.
    """
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted.is_set
        return

    def note(number: int, frame: FrameType | None) -> None:
        # A second signal stops at once. Of several ranks, each gets the terminal's and the
        # launcher's signal for one Ctrl-C; the launcher kills them if they take too long.
        first = not noted.is_set()
        noted.set()
        if first or ranks.count() > 1:
            return
        handler = before[number]
        if callable(handler):
            handler(number, frame)
        else:  # the default of SIGTERM and SIGHUP: the process ends here
            signal.signal(number, handler)
            signal.raise_signal(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    # Ignored signals stay ignored: `nohup` keeps a run alive when its terminal closes.
    before = {k: v for k, v in before.items() if v not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, note)
    try:
        yield noted.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def on_any_rank(*facts: bool) -> list[bool]:
    """Which facts hold on at least one rank, so that all ranks go on alike."""
    return [any(of) for of in zip(*ranks.gathered(facts), strict=True)]


@scope
def lost_rank_noted(folder: Path | None) -> Iterator[None]:
    """Say why another rank is gone, if it has said so, and where to resume.

    Raises:
        LostRankError: another rank ended; the message names the last checkpoint.
    """
    try:
        yield
    except Exception as error:
        if not _is_lost(error):
            ranks.leave_word(f"{type(error).__name__}: {error}")
            raise
        # The launcher ends what is left of the job now; that must not cut off the message.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        left = "There is no checkpoint to resume from."
        if folder is not None and folder.exists():
            left = f"The last checkpoint in {folder} is complete: the same command resumes there."
        raise ranks.LostRankError(f"{ranks.last_word() or error}. {left}") from error


def _is_lost(error: Exception) -> bool:
    """Whether another rank is gone; the passes of a sharded model raise what gloo raises."""
    return isinstance(error, (ranks.LostRankError, DistError)) or (
        ranks.count() > 1 and isinstance(error, RuntimeError) and "gloo" in str(error)
    )
