"""Every kind of small model in turn, and prompt pairs without meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from double_precision import DoublePrecision
from random_models import KINDS, ROUNDED, random_pairs, shaken

from sparse_tl.backend import Model
from sparse_tl.data.pairs import PromptPairs


@pytest.fixture
def double_precision() -> Iterator[None]:
    """Models in float64 compute nothing in float32."""
    with DoublePrecision():
        yield


@pytest.fixture(params=list(KINDS))
def model(request: pytest.FixtureRequest, build_tiny: Callable[..., Model]) -> Model:
    """Every kind in turn, in float64 throughout."""
    kind = request.param
    if kind in ROUNDED:
        request.getfixturevalue("double_precision")
    return shaken(build_tiny(**KINDS[kind], dtype="float64"))


@pytest.fixture
def pairs() -> PromptPairs:
    """Five random pairs."""
    return random_pairs()
