"""End a run early, after a signal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from sparse_tl.calls.scopes import scope
from sparse_tl.parallel import ranks

_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
"""Signals that ask a process to stop; SIGHUP does not exist on every platform."""


@scope
def interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Defer Ctrl-C until the running step is complete, so that checkpoints are consistent.

    The same holds for signals that a cluster or a closing terminal sends before killing a process.
    """
    noted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield noted.is_set
        return

    def note(number: int, frame: FrameType | None) -> None:
        # A second signal stops a lone process at once. With several ranks, one Ctrl-C sends each
        # of them two, the terminal's and the launcher's; the launcher kills them if they take too
        # long.
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

    before = {number: signal.getsignal(number) for number in _SIGNALS}
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
    """Which facts hold on at least one rank, so that all ranks make the same decision."""
    return [any(of) for of in zip(*ranks.gathered(facts), strict=True)]
