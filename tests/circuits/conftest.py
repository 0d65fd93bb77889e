"""Every kind of small model in turn, and prompt pairs without meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
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
def linear(build_tiny: Callable[..., Model]) -> Model:
    """Without normalisation, with MLPs that write nothing and patterns that no prompt changes."""
    model = build_tiny(dtype="float64", normalization_type=None)
    with torch.no_grad():
        for block in model.blocks:
            for weight in (block.attn.W_Q, block.attn.b_Q, block.mlp.W_out, block.mlp.b_out):
                weight.zero_()
    return model


@pytest.fixture
def pairs() -> PromptPairs:
    """Five random pairs."""
    return random_pairs()
