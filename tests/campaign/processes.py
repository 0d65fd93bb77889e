"""Jobs in processes of their own, forked from this one, and ended when they touch a file."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from type_checks import checks_end

TOUCHES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "shutil.rmtree")
"""Events of Python before it touches a file."""


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Args:
        code: exit code; minus the number of the signal that ended it.
        answer: what the job returned, or its exception as text.
        touches: how often it touched files below the folder.
    """

    code: int
    answer: Any = None
    touches: int = 0


def run(job: Callable[[Path], Any], folder: Path, strike: tuple[int, int] | None = None) -> Ended:
    """A job from start to end, or until it is about to touch a file for the n-th time.

    Args:
        job: function of a folder; it and its answer can be pickled.
        folder: its argument.
        strike: n, and the number of the signal that it gets then.
    """
    if "fork" not in multiprocessing.get_all_start_methods() or not Path("/proc/self").exists():
        pytest.skip("needs processes that can be forked, and /proc")
    context = multiprocessing.get_context("fork")
    end, other = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(job, folder, other, strike))
    process.start()
    other.close()
    try:
        message = end.recv() if end.poll(300.0) else {}
    except EOFError:
        message = {}
    process.join(30.0)
    assert process.exitcode is not None, "it goes on"
    return Ended(process.exitcode, **message)


def _run(job: Any, folder: Path, end: Any, strike: Any) -> None:
    """The process itself, with the signal handlers of a terminal."""
    checks_end()
    torch.set_num_threads(1)  # the threads of the process that forked are not here
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    place, touches = str(folder), 0

    def touched(event: str, given: tuple[Any, ...]) -> None:
        nonlocal touches
        if event in TOUCHES and given and place in str(given[0]):
            touches += 1
            if strike is not None and touches == strike[0]:
                os.kill(os.getpid(), strike[1])

    sys.addaudithook(touched)
    code, answer = 0, None
    try:
        answer = job(folder)
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        answer = f"{type(error).__name__}: {error}"[:3000]
    end.send({"answer": answer, "touches": touches})
    end.close()
    os._exit(code)
