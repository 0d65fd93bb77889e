"""Stacked head gates: one pass equals many, gates of 1 the model, gates of 0 no heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import SHAPES

from sparse_tl.backend import Model, adapt
from sparse_tl.gates import GatedRun, Heads

Build = Callable[..., Model]


def _tokens(rows: int = 3, length: int = 6) -> torch.Tensor:
    return torch.randint(13, (rows, length), generator=torch.Generator().manual_seed(0))


def _final(model: Model, tokens: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
    """The residual stream after the last layer, in a whole pass."""
    seen: list[torch.Tensor] = []
    point: Any = model.blocks[-1].hook_resid_post
    handle = point.register_forward_hook(lambda module, args, output: seen.append(output))
    model(tokens, **kwargs)
    handle.remove()
    return seen[0]


def _stacked(
    model: Any, tokens: torch.Tensor, gates: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """At every position."""
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    found = GatedRun(model, Heads(), tokens, everywhere, attention_mask=mask).final(gates)
    return found.view(len(gates), *tokens.shape, -1)


def _random_gates(model: Model, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(n, model.cfg.n_layers, model.cfg.n_heads, generator=generator).double()


@pytest.mark.parametrize("kind", SHAPES)
def test_a_stack_is_one_pass_per_matrix(build_tiny: Build, kind: str) -> None:
    model = build_tiny(kind, dtype="float64")
    gates, tokens = _random_gates(model, 4), _tokens()
    gates[0] = 1  # the model
    gates[1, 1, 0] = 0
    stacked = _stacked(model, tokens, gates)
    assert torch.allclose(stacked[0], _final(model, tokens), rtol=0, atol=1e-13)
    for one, found in zip(gates, stacked, strict=True):
        hooks = [
            (name, lambda z, hook, layer=layer, one=one: z * one[layer, :, None])
            for layer, name in enumerate(adapt(model).layer_points("attn.hook_z"))
        ]
        with model.hooks(fwd_hooks=hooks):
            assert torch.allclose(found, _final(model, tokens), atol=1e-12)


@pytest.mark.parametrize("kind", SHAPES)
def test_positions_that_are_not_read_change_nothing(build_tiny: Build, kind: str) -> None:
    model, tokens = build_tiny(kind, dtype="float64"), _tokens()
    gates = _random_gates(model, 4).requires_grad_()
    read = torch.tensor([[0, 1, 0, 0, 0, 1], [0] * 5 + [1], [1] * 6]).bool()
    everything = _stacked(model, tokens, gates)[:, read]
    some = GatedRun(model, Heads(), tokens, read).final(gates)
    assert torch.allclose(some, everything, rtol=0, atol=1e-13)
    slopes = [torch.autograd.grad(x.sin().sum(), gates)[0] for x in (some, everything)]
    assert torch.allclose(*slopes, atol=1e-11)


def test_a_hook_inside_a_normalisation_still_fires(build_tiny: Build) -> None:
    model, tokens, seen = build_tiny(dtype="float64"), _tokens(), []

    def double(scale: torch.Tensor, hook: object) -> torch.Tensor:
        seen.append(len(scale))
        return 2 * scale

    with model.hooks(fwd_hooks=[("blocks.1.ln1.hook_scale", double)]):
        found = _stacked(model, tokens, torch.ones(2, 2, 2))
        assert torch.allclose(found[0], _final(model, tokens), rtol=0, atol=1e-12)
    # HookedTransformers normalise for q, k and v each, bridges once.
    assert list(dict.fromkeys(seen)) == [6, 3]
