"""The thread on which live widgets answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import get_ident
from typing import Any


def on_this_thread(function: Callable[..., None]) -> Callable[..., None]:
    """A function that runs on the thread that is here now, when that has ended what it does.

    JupyterLab delivers the messages of widgets on a thread beside that of the cells: whichever came
    second would be refused a model that both use. Without an event loop, as in a script, messages
    have no thread of their own.
    """
    try:
        loop, here = asyncio.get_running_loop(), get_ident()
    except RuntimeError:
        return function

    def run(*args: Any) -> None:
        if get_ident() == here:
            function(*args)
        else:
            loop.call_soon_threadsafe(function, *args)

    return run
