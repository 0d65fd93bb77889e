"""Tiny models that know the characters of the addition task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sparse_tl.backend import Model
from sparse_tl.explorer import CircuitExplorer, explore
from sparse_tl.gates import SparseTransformer
from sparse_tl.tasks.addition import addition_tokenizer

PROMPT = "36+28=?????"


@pytest.fixture(scope="session")
def build_small(build_tiny: Callable[..., Model]) -> Callable[..., Model]:
    """A tiny model in float64 with random weights and a tokenizer for sums."""

    def build(kind: str = "float64", seed: int = 0, **config: Any) -> Model:
        config = {"dtype": "float64", "default_prepend_bos": False, **config}
        model = build_tiny(kind, seed, tokenizer=addition_tokenizer(), **config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.3 * noise)
        return model

    return build


@pytest.fixture(scope="module")
def models(build_small: Callable[..., Model]) -> Iterator[dict[str, Any]]:
    """A dense model and a sparse one, some of whose gates are closed: no test may change them."""
    sparse = SparseTransformer(build_small(seed=1), initial_bias=0.3)
    yield {"Dense": build_small(), "Sparse": sparse}
    sparse.unwrap()


@pytest.fixture(scope="module")
def shared_explorer(models: dict[str, Any]) -> CircuitExplorer:
    return explore(models, PROMPT)


@pytest.fixture
def explorer(shared_explorer: CircuitExplorer) -> CircuitExplorer:
    """The same widget in all tests of a module, always as it was at the start."""
    if shared_explorer.exploration.prompt != PROMPT:
        shared_explorer.show_prompt(PROMPT)
    shared_explorer._state = {"target": 4, "weight": "attention", "threshold": 0.1}
    shared_explorer._handle_custom_msg({"action": "unselect"}, [])
    if shared_explorer._metric["name"] != "log_probability":
        shared_explorer.choose_metric("log_probability")
    shared_explorer.restore()
    return shared_explorer
