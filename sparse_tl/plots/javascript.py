"""Scripts of interactive figures, run without a browser: the same code draws static files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from sparse_tl.plots.interactive_html import read_assets

ROOM = 2**41
"""Bytes of address space, not of memory, in which V8 fits beside all else: it reserves 1.5 TB."""


def check_address_space() -> None:
    """Check that V8 can start; where it cannot, it would end the process.

    Raises:
        MemoryError: the address space of this process is limited.
    """
    if sys.platform == "win32":
        return
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < ROOM:
        raise MemoryError(
            "expected no limit on address space: static drawings are made by V8, which reserves "
            "1.5 TB of it, though little memory; this process is limited to "
            f"{limit / 1e9:.1f} GB. `ulimit -v unlimited` lifts the limit"
        )


def run_script(names: Sequence[str], function: str, *arguments: Any) -> Any:
    """Call a function of some scripts in V8, which has no page, files or network.

    Each call has an engine of its own, which takes 10 ms: none outlives a call, so that any thread,
    event loop or forked process can draw.

    Args:
        names: file names of the scripts, in this package.
        function: name of the function.
        arguments: its arguments, of types that JSON has.

    Returns:
        What the function returns, of such types.

    Raises:
        RuntimeError: the script fails; the message has its error, with file and line.
        MemoryError: the address space of this process is limited.
    """
    check_address_space()
    # Loading the library takes longer than all other imports of this package's plots.
    from py_mini_racer import JSEvalException, MiniRacer

    with MiniRacer() as engine:
        try:
            for name in names:
                engine.eval(f"{read_assets(name)}\n//# sourceURL={name}")
            return engine.call(function, *arguments)
        except JSEvalException as error:
            raise RuntimeError(f"{function} of {names[-1]} failed: {error}") from error
