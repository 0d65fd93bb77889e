"""Jobs that share a cache folder: one builds a pair, the others say that they wait for it."""

from __future__ import annotations

import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from sparse_tl.models.cache import Recipe, built_pair


def _not_again(*_: Any) -> Any:
    raise AssertionError("the pair was built twice")


RECIPE = Recipe("shared", {}, _not_again, _not_again)


def _finish(folder: Path) -> None:
    for side in ("base", "sparse"):
        (folder / side).mkdir(parents=True)


def test_a_job_that_waits_for_another_says_so(tmp_path: Path) -> None:
    folder = RECIPE.folder(0, tmp_path)
    folder.parent.mkdir(parents=True)
    begun = threading.Event()

    def build() -> None:
        with FileLock(folder.with_suffix(".lock")):
            begun.set()
            time.sleep(0.3)
            _finish(folder)

    other = threading.Thread(target=build)
    other.start()
    begun.wait(10)
    with pytest.warns(UserWarning, match=r"another job is building the shared models of seed 0"):
        assert built_pair(RECIPE, 0, cache=tmp_path) == folder
    other.join()
    # It has let go of the lock, too.
    FileLock(folder.with_suffix(".lock")).acquire(blocking=False).lock.release()


def test_nothing_is_said_where_nothing_is_waited_for(tmp_path: Path) -> None:
    _finish(RECIPE.folder(0, tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built_pair(RECIPE, 0, cache=tmp_path)
    with pytest.raises(AssertionError, match="built twice"):
        built_pair(RECIPE, 1, cache=tmp_path)
    FileLock(RECIPE.folder(1, tmp_path).with_suffix(".lock")).acquire(blocking=False).lock.release()
