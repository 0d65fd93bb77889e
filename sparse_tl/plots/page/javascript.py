"""Scripts of interactive figures, run without a browser: the same code draws static files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from sparse_tl.plots.page.interactive_html import read_assets

ROOM = 2**41
"""Bytes of address space (not memory) that suffice for V8, which reserves 1.5 TB."""


def check_address_space() -> None:
    """Check that V8 can start; otherwise it would end the process.

    Raises:
        MemoryError: the address space of this process is limited.
    """
    if sys.platform == "win32":
        return
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < ROOM:
        raise MemoryError(
            "expected no limit on address space: V8, which makes static drawings, reserves 1.5 TB "
            f"of it, but uses little memory; this process is limited to {limit / 1e9:.1f} GB. "
            "`ulimit -v unlimited` lifts the limit"
        )


def first_view(names: Sequence[str], data: str, *options: Any) -> Any:
    """The value of ``firstView(data, ...options)`` of these scripts, as in `run_script`.

    Args:
        names: file names of the scripts, in this package.
        data: the function's first argument, as JSON.
        options: further arguments, of JSON types.
    """
    # V8 parses a JSON text faster than the literals that `MiniRacer.call` makes of arguments.
    function = "((json, ...options) => firstView(JSON.parse(json), ...options))"
    return run_script(names, function, data, *options)


def run_script(names: Sequence[str], function: str, *arguments: Any) -> Any:
    """Call a JavaScript function in V8, without page, files or network.

    Each call starts an engine in 10 ms. None outlives a call, so that any thread, event loop or
    forked process can draw.

    Args:
        names: file names of the scripts, in this package.
        function: name of the function.
        arguments: its arguments, of JSON types.

    Returns:
        The value of the function, of JSON types.

    Raises:
        RuntimeError: the script fails; the message has its error, with file and line.
        MemoryError: the address space of this process is limited.
    """
    check_address_space()
    # Slow import: takes longer than all others of this package.
    from py_mini_racer import JSEvalException, MiniRacer

    with MiniRacer() as engine:
        try:
            for name in names:
                engine.eval(f"{read_assets(name)}\n//# sourceURL={name}")
            return engine.call(function, *arguments)
        except JSEvalException as error:
            raise RuntimeError(f"{function} of {names[-1]} failed: {error}") from error
