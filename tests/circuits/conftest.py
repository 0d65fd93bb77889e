"""Every kind of small model in turn, and prompt pairs without meaning."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from random_models import KINDS, random_pairs, shaken

from sparse_tl.data.pairs import PromptPairs
from sparse_tl.lens import Model


@pytest.fixture(params=list(KINDS))
def model(request: pytest.FixtureRequest, build_tiny: Callable[..., Model]) -> Model:
    """Every kind in turn, in float64."""
    return shaken(build_tiny(**KINDS[request.param], dtype="float64"))


@pytest.fixture
def pairs() -> PromptPairs:
    """Five random pairs."""
    return random_pairs()
