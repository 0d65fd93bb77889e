"""A site that is not built in: the methods of `Site`, and nothing else.

One gate per MLP, on what the MLP writes, checked against plain hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from finite_differences import derivative
from torch import Tensor

from sparse_tl import GatedRun, gated
from sparse_tl.backend import Adapter, Hook, Model, Order
from sparse_tl.gates import PatchValues, Site
from sparse_tl.gates.sites import GatedPass

Build = Callable[..., Model]

GATES = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 0.5], [1.0, 0.25, 1.0]])


@dataclass(frozen=True)
class MLPs(Site):
    """One gate per MLP, ``[layer]``, on its output."""

    order = Order.LAST

    def shape(self, adapter: Adapter) -> tuple[int, ...]:
        return (adapter.n_layers,)

    def points(self, adapter: Adapter, gates: Any = None) -> list[str]:
        return [f"blocks.{layer}.hook_mlp_out" for layer in range(adapter.n_layers)]

    def first_layer(self, adapter: Adapter, differ: Tensor) -> int:
        return min(differ.nonzero()[:, 1].tolist(), default=adapter.n_layers)

    def hooks(self, adapter: Adapter, gates: Any, patch: PatchValues, now: GatedPass) -> list[Hook]:
        names = enumerate(self.points(adapter))
        return [
            (name, self.order, partial(self._close, name, gates[:, layer], patch, now))
            for layer, name in names
            if layer >= now.from_layer
        ]

    def _close(self, name: str, gates: Tensor, patch: PatchValues, now: GatedPass, clean: Tensor):
        gates = gates.repeat_interleave(len(clean) // len(gates))[:, None, None]
        other = patch.at(name, clean, now.n_stack)
        return gates * clean + (1 - gates) * (0 if other is None else other)


def by_hand(model: Any, tokens: Tensor, gates: Tensor, other: Tensor | None) -> Tensor:
    """Logits with each MLP's output mixed with that of other prompts, by plain hooks."""
    cache = None if other is None else model.run_with_cache(other)[1]

    def mix(out: Tensor, hook: Any, gate: Tensor, name: str) -> Tensor:
        return gate * out + (1 - gate) * (0 if cache is None else cache[name])

    names = [f"blocks.{layer}.hook_mlp_out" for layer in range(len(gates))]
    hooks = [
        (name, partial(mix, gate=gate, name=name)) for name, gate in zip(names, gates, strict=True)
    ]
    return model.run_with_hooks(tokens, fwd_hooks=hooks)


@pytest.mark.parametrize("patch", ["zero", "corrupted"])
def test_gates_at_a_site_of_the_users_own(build_tiny: Build, patch: Any) -> None:
    model = build_tiny(n_layers=3)
    generator = torch.Generator().manual_seed(0)
    tokens, other = torch.randint(13, (2, 4, 6), generator=generator)
    reference = other if patch == "corrupted" else None
    expected = torch.stack([by_hand(model, tokens, gates, reference) for gates in GATES])
    site = MLPs()
    for gates, logits in zip(GATES, expected, strict=True):
        with gated(model, site, gates, patch, reference=reference):
            torch.testing.assert_close(model(tokens), logits, atol=1e-5, rtol=0)
    read = torch.zeros(4, 6, dtype=torch.bool)
    read[:, -1] = True
    run = GatedRun(model, site, tokens, read, patch, reference=reference)
    torch.testing.assert_close(run.logits(GATES), expected[:, :, -1], atol=1e-5, rtol=0)
    run.start_from(GATES[1])  # later passes start at the first MLP whose gate differs
    torch.testing.assert_close(run.logits(GATES), expected[:, :, -1], atol=1e-5, rtol=0)


def test_gates_at_a_site_of_the_users_own_can_be_trained(build_tiny: Build) -> None:
    model = build_tiny(n_layers=3)
    tokens = torch.arange(6).repeat(2, 1)
    logits = torch.full((3,), 0.5, requires_grad=True)
    with gated(model, MLPs(), logits.sigmoid()):
        model(tokens)[:, -1].logsumexp(-1).sum().backward()

    def value() -> Tensor:
        return by_hand(model, tokens, logits.sigmoid(), None)[:, -1].logsumexp(-1).sum()

    slopes = [derivative(value, logits, layer, 1e-2) for layer in range(3)]
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx(slopes, abs=2e-3, rel=1e-2)
