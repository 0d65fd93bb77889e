"""Gradients by the rules of relevance propagation, against laws and sums by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from random_models import MORE_KINDS, shaken
from torch import Tensor

from sparse_tl.backend import EMBEDDED, Model, adapt, record, relevance_rules

Build = Callable[..., Model]

WITHOUT_BIASES = ("sequential", "parallel", "grouped", "folded", "folded_rms")
"""Kinds whose attention reads nothing else than the stream, once biases are 0."""

pytestmark = pytest.mark.usefixtures("double_precision")


def _gradient(model: Model, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first logit at the end, what enters the first layer, and the gradient there."""
    adapter = adapt(model)
    kept, final = record(adapter, tokens, [EMBEDDED], differentiable=True)
    with torch.enable_grad():
        logit = adapter.logits(final)[:, -1, 0].sum()
    return logit, kept[EMBEDDED], torch.autograd.grad(logit, kept[EMBEDDED])[0]


def _without_biases(model: Model) -> Model:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rsplit(".", 1)[-1].lstrip("_").startswith("b"):  # bias, b_O, _b_K, b of a norm
                parameter.zero_()
    return model


@pytest.mark.parametrize("kind", MORE_KINDS)
def test_values_stay_bit_for_bit(build_tiny: Build, kind: str) -> None:
    model = shaken(build_tiny(**MORE_KINDS[kind], dtype="float64"))
    tokens = torch.tensor([[1, 5, 2], [3, 3, 7]])
    before = model(tokens)
    with relevance_rules(adapt(model)):
        assert torch.equal(model(tokens), before)
        with torch.no_grad():
            assert torch.equal(model(tokens), before)
    _, _, plain = _gradient(model, tokens)
    with relevance_rules(adapt(model)):
        pass
    assert torch.equal(_gradient(model, tokens)[2], plain), "the rules are gone after the block"


@pytest.mark.parametrize("kind", [kind for kind in WITHOUT_BIASES if kind in MORE_KINDS])
def test_relevance_is_conserved(build_tiny: Build, kind: str) -> None:
    """One token, no biases: attention is linear, and the logit is gradient . input."""
    model = _without_biases(shaken(build_tiny(**MORE_KINDS[kind], dtype="float64")))
    tokens = torch.tensor([[5]])
    with relevance_rules(adapt(model)):
        logit, entering, gradient = _gradient(model, tokens)
    assert (gradient * entering).sum().item() == pytest.approx(logit.item(), rel=1e-5)
    _, _, plain = _gradient(model, tokens)
    assert (plain * entering).sum().item() != pytest.approx(logit.item(), rel=1e-2)


def test_an_activation_at_zero_passes_nothing_on(build_tiny: Build) -> None:
    model = build_tiny(dtype="float64")
    with torch.no_grad():
        for block in model.blocks:
            for parameter in (block.mlp.W_in, block.mlp.b_in):
                parameter.zero_()
    with relevance_rules(adapt(model)):
        _, _, gradient = _gradient(model, torch.tensor([[5, 2]]))
    assert bool(gradient.isfinite().all()) and bool((gradient != 0).any())
