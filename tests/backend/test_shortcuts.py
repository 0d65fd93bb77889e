"""Passes that leave out what is not read: logits and gradients are the same where it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tiny import SHAPES

from sparse_tl.backend import Model, adapt

Build = Callable[..., Model]
TOKENS = torch.randint(13, (3, 6), generator=torch.Generator().manual_seed(0))


def _read() -> torch.Tensor:
    read = torch.zeros_like(TOKENS, dtype=torch.bool)
    read[:, 4:] = True
    read[0, 1] = True
    return read


def _gradients(model: Model, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits.square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", SHAPES)
def test_logits_and_gradients_are_the_same_where_they_are_read(
    build_tiny: Build, kind: str
) -> None:
    model, read = build_tiny(kind, dtype="float64"), _read()
    plain = model(TOKENS)[read]
    plain_gradients = _gradients(model, plain)
    with adapt(model).only_at(read) as logits_at:
        found = logits_at(model(TOKENS))
        assert torch.allclose(found, plain, rtol=0, atol=1e-12)
        gradients = _gradients(model, found)
    assert gradients.keys() == plain_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, plain_gradients[name], rtol=1e-9, atol=1e-13), name


def test_the_last_mlp_sees_no_more_than_is_read(build_tiny: Build) -> None:
    model, read, seen = build_tiny(), _read(), []
    adapter, mlp = adapt(model), model.blocks[-1].mlp
    forward = mlp.forward
    mlp.__dict__["forward"] = lambda x: (seen.append(x.shape[1]), forward(x))[1]
    with adapter.only_at(read):
        model(TOKENS)
    assert seen == [int(read.sum())]


@pytest.mark.parametrize("read", [_read(), torch.ones_like(_read()), torch.zeros_like(_read())])
def test_logits_are_computed_nowhere_else(build_tiny: Build, read: torch.Tensor) -> None:
    model = build_tiny()
    with adapt(model).only_at(read) as logits_at:
        assert model(TOKENS).shape == (1, int(read.sum()), 13)
        assert torch.allclose(logits_at(model(TOKENS)), model(TOKENS)[0])
        # Other prompts are none of its business.
        assert model(TOKENS[:2]).shape == (2, 6, 13)
    assert model(TOKENS).shape == (3, 6, 13)


def test_what_is_hooked_inside_sees_every_position(build_tiny: Build) -> None:
    model, shapes = build_tiny(), {}

    def note(tensor: torch.Tensor, hook: object, name: str) -> None:
        shapes[name] = tuple(tensor.shape)

    names = ["blocks.1.mlp.hook_post", "blocks.0.ln1.hook_scale", "ln_final.hook_normalized"]
    with (
        model.hooks(fwd_hooks=[(name, partial(note, name=name)) for name in names]),
        adapt(model).only_at(_read()) as logits_at,
    ):
        logits = logits_at(model(TOKENS))
    assert [shapes[name][:2] for name in names] == [(3, 6)] * 3
    assert torch.allclose(logits, model(TOKENS)[_read()], atol=1e-6)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "name",
    [
        "blocks.1.hook_mlp_out",
        "blocks.1.hook_resid_post",
        "ln_final.hook_normalized",
        "unembed.hook_out",
    ],
)
def test_hooks_behind_the_last_mlp_see_every_position(build_tiny: Build, name: str) -> None:
    """A user's hook there may move what is read, from where it is not."""
    model, read = build_tiny(dtype="float64"), _read()

    def mix(value: torch.Tensor, hook: object) -> torch.Tensor:
        return value + value.mean(dim=1, keepdim=True)

    with model.hooks(fwd_hooks=[(name, mix)]):
        plain = model(TOKENS)[read]
        with adapt(model).only_at(read) as logits_at:
            assert torch.allclose(logits_at(model(TOKENS)), plain, rtol=0, atol=1e-12)
