"""Commands run in this process, as the tests of the command line need them."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import pytest

from sparse_tl.cli import main
from sparse_tl.data.streams import ShuffledStream

ADDITION = ["addition", "--dense-steps", "3", "--steps", "2", "--target-loss", "9", "--quiet"]


@dataclass
class Outcome:
    """How a command ended and what it said, on one line."""

    code: int
    out: str
    err: str


def run_command(*arguments: object, whole: bool = False) -> Outcome:
    """Run ``sparse-tl`` with these arguments; `whole` keeps its line breaks."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["sparse-tl", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = before
    said, complained = out.getvalue(), err.getvalue()
    if not whole:
        said, complained = " ".join(said.split()), " ".join(complained.split())
    return Outcome(code, said, complained)


@contextmanager
def no_training() -> Iterator[None]:
    def refuse(self: ShuffledStream, step: int) -> Any:
        raise AssertionError("training began")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShuffledStream, "batch", refuse)
        yield
