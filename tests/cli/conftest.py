"""A model and a text that every command can afford."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import WORDS, save_story, save_tiny

from sparse_tl.tasks.addition import AdditionTask


@pytest.fixture(scope="module", autouse=True)
def few_sums() -> Iterator[None]:
    """Two digits, and few sums to validate with, to test with and for each digit."""
    split = AdditionTask.split

    def small(self: AdditionTask, *, seed: int = 0) -> Any:
        return split(self, validation=64, test=64, seed=seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdditionTask, "split", small)
        patch.setattr("sparse_tl.jobs.addition.PAIRS", 8)
        patch.setattr("sparse_tl.jobs.addition.EXAMPLES", 8)
        # Models of a few steps have no small circuit, so a search takes all the time it is given.
        patch.setattr("sparse_tl.jobs.addition.SECONDS", 0.1)
        patch.setattr("sparse_tl.jobs.addition.DIGITS", ("tens", "units"))
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of our own format with a tokenizer of a dozen words."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", WORDS, ".")


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ninety windows of eight tokens."""
    return save_story(tmp_path_factory.mktemp("text") / "story.txt")
