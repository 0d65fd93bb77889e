"""Jobs in processes of their own, forked from this one, and ended as one likes.

A process can be ended after some seconds, or when it is about to touch a file below a folder for
the n-th time: what a kill can leave behind lies around those moments.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from type_checks import checks_end

TOUCHES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "shutil.rmtree")
"""Events of Python before it touches a file."""
HANDLERS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""As in a terminal."""


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Args:
        code: exit code; minus the number of the signal that ended it.
        answer: what the job returned, or its exception as text.
        touches: how often it touched files below the folder.
        seconds: seconds from start to end.
    """

    code: int
    answer: Any = None
    touches: int = 0
    seconds: float = 0.0


class Process:
    """A running job.

    Args:
        job: function of a folder; it and its answer can be pickled.
        folder: its argument.
        strike: the number of the touch of a file below the folder at which it is ended, and the
            signal.
    """

    def __init__(
        self,
        job: Callable[[Path], Any],
        folder: Path,
        strike: tuple[int, int] | None = None,
    ) -> None:
        context = _context()
        self._end, other = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(job, folder, other, strike))
        self._started = time.monotonic()
        self._process.start()
        other.close()

    def send(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def begun(self, within: float = 300.0) -> None:
        """Wait until the job itself begins."""
        if self._end.poll(within):
            assert self._end.recv() == "begun"

    def join(self, within: float = 300.0) -> Ended:
        """Wait for its end; one that takes longer is killed, and its code is None's: -999."""
        message: Any = None
        try:
            while self._end.poll(within):
                if (message := self._end.recv()) != "begun":
                    break
        except EOFError:
            message = None
        self._process.join(within if message in (None, "begun") else 30)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join()
            code = -999
        seconds = time.monotonic() - self._started
        if not isinstance(message, dict):
            return Ended(code, seconds=seconds)
        return Ended(code, seconds=seconds, **message)


def run(job: Callable[[Path], Any], folder: Path) -> Ended:
    """A job from start to end."""
    return Process(job, folder).join()


def _context() -> Any:
    if "fork" not in multiprocessing.get_all_start_methods() or not Path("/proc/self").exists():
        pytest.skip("needs processes that can be forked, and /proc")
    return multiprocessing.get_context("fork")


def _run(job: Any, folder: Path, end: Any, strike: Any) -> None:
    """The process itself."""
    checks_end()
    torch.set_num_threads(1)  # the threads of the process that forked are not here
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)
    place, touches, own = str(folder), 0, os.getpid()

    def touched(event: str, given: tuple[Any, ...]) -> None:
        nonlocal touches
        if event in TOUCHES and given and place in str(given[0]):
            touches += 1
            if strike is not None and touches == strike[0]:
                os.kill(own, strike[1])

    end.send("begun")
    said: dict[str, Any] = {}
    sys.addaudithook(touched)
    code = 0
    try:
        said["answer"] = job(folder)
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        said["answer"] = f"{type(error).__name__}: {error}"[:3000]
    end.send({**said, "touches": touches})
    end.close()
    os._exit(code)
