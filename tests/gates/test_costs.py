"""Expected edges and their costs, with gradients, against sums over hooked scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_tl import SparseTransformer
from sparse_tl.backend import Model, read_parameters
from sparse_tl.gates import AttentionEdgeCounts

Build = Callable[..., Model]

LENGTH = 6
SHAPES = [
    (),
    (1,),
    (LENGTH,),
    (LENGTH, 1),
    (LENGTH, LENGTH),
    (2, 1, 1),
    (2, LENGTH, LENGTH),
    (2, 1, 1, 1),
    (1, 2, 1, 1),
    (2, 2, 1, LENGTH),
    (2, 2, LENGTH, LENGTH),
]


@pytest.fixture
def sparse(build_tiny: Build) -> SparseTransformer:
    found = SparseTransformer(build_tiny("float64"), initial_bias=0.4)
    with torch.no_grad():
        found.gates.bias.add_(torch.tensor([[0.0, -1.0], [2.0, 0.5]]))
    return found


def _tokens() -> Tensor:
    return torch.randint(13, (3, LENGTH), generator=torch.Generator().manual_seed(0))


def _by_hand(sparse: SparseTransformer, cost: Tensor, **kwargs: Any) -> Tensor:
    """``sum cost * sigmoid(s + b)`` of each layer, prompt and head, of scores as hooks see them."""
    scores: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: Any) -> None:
        scores[hook.name] = value

    names = [f"blocks.{layer}.attn.hook_attn_scores" for layer in range(2)]
    sparse.run_with_hooks(_tokens(), fwd_hooks=[(name, keep) for name in names], **kwargs)
    logits = torch.stack([scores[name] for name in names])
    logits = logits + sparse.gates.bias[:, None, :, None, None]
    triangle = torch.ones(LENGTH, LENGTH, dtype=torch.float64).tril()
    # [layer, head, query, key] beside a dimension of prompts
    each = cost.expand(2, 2, LENGTH, LENGTH)[:, None] * triangle
    return (each * logits.sigmoid()).sum(dim=(-2, -1))


def _gradients(sparse: SparseTransformer, of: Tensor) -> dict[str, Tensor]:
    sparse.zero_grad()
    of.backward()
    return {name: p.grad for name, p in read_parameters(sparse).items() if p.grad is not None}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_costs_and_their_gradients_are_those_of_an_explicit_sum(
    sparse: SparseTransformer, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    cost = torch.rand(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    weights = torch.rand(2, 3, 2, dtype=torch.float64)  # of layers, prompts and heads
    _, counts = sparse.run_with_counts(_tokens(), edge_cost=cost)
    assert counts.cost is not None
    by_hand = _by_hand(sparse, cost.double())
    torch.testing.assert_close(counts.cost, by_hand, rtol=1e-9, atol=1e-12)
    found = _gradients(sparse, (weights * counts.cost).sum())
    expected = _gradients(sparse, (weights * by_hand).sum())
    assert found.keys() == expected.keys() > {"gates.bias"}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-7, atol=1e-10, msg=name)


def test_expected_edges_and_their_gradients_are_those_of_an_explicit_sum(
    sparse: SparseTransformer,
) -> None:
    """Costs change nothing about them."""
    by_hand = _by_hand(sparse, torch.ones(1, dtype=torch.float64))
    expected = _gradients(sparse, by_hand.sum())
    for cost in (None, torch.rand(LENGTH)):
        _, counts = sparse.run_with_counts(_tokens(), edge_cost=cost)
        assert (counts.cost is None) == (cost is None)
        torch.testing.assert_close(counts.expected, by_hand, rtol=1e-9, atol=1e-12)
        found = _gradients(sparse, counts.expected.sum())
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-7, atol=1e-10, msg=name)


def test_costs_under_sampled_gates_are_of_the_same_scores(sparse: SparseTransformer) -> None:
    """The first layer's: those of the second come from what the gates of the first let pass."""
    cost = torch.rand(2, 2, LENGTH, LENGTH, dtype=torch.float64)
    with sparse.sampled(torch.Generator().manual_seed(0)):
        _, counts = sparse.run_with_counts(_tokens(), edge_cost=cost)
    assert counts.cost is not None
    torch.testing.assert_close(counts.cost[0], _by_hand(sparse, cost)[0], rtol=1e-9, atol=1e-12)


def test_pressure_is_at_the_edges_cost(sparse: SparseTransformer) -> None:
    """Wide open gates have no other gradient; the value stays."""
    with torch.no_grad():
        sparse.gates.bias.fill_(40.0)
    cost = torch.tensor([[[[3.0]]], [[[0.5]]]], dtype=torch.float64)
    _, counts = sparse.run_with_counts(_tokens(), pressure=0.2, edge_cost=cost)
    assert counts.cost is not None
    edges = LENGTH * (LENGTH + 1) / 2
    assert counts.cost[:, 0, 0].tolist() == pytest.approx([3.0 * edges, 0.5 * edges])
    (gradient,) = torch.autograd.grad(counts.cost.sum(), sparse.gates.bias)
    assert gradient[:, 0].tolist() == pytest.approx(
        [3 * 0.2 * c * edges for c in (3.0, 0.5)], rel=1e-6
    )


def test_padding_costs_nothing(sparse: SparseTransformer) -> None:
    cost = torch.rand(2, 2, 1, 1, dtype=torch.float64)
    padded = torch.cat([torch.zeros(3, 2, dtype=torch.long), _tokens()], dim=1)
    real = torch.ones_like(padded)
    real[:, :2] = 0
    _, plain = sparse.run_with_counts(_tokens(), edge_cost=cost)
    _, found = sparse.run_with_counts(padded, attention_mask=real, edge_cost=cost)
    torch.testing.assert_close(found.cost, plain.cost, rtol=1e-9, atol=1e-12)


def test_open_gates_cost_all_that_is_possible(sparse: SparseTransformer) -> None:
    cost = torch.rand(LENGTH, LENGTH, dtype=torch.float64)
    with sparse.opened():
        _, counts = sparse.run_with_counts(_tokens(), edge_cost=cost)
    assert counts.cost is not None
    assert counts.cost.flatten().tolist() == pytest.approx([cost.tril().sum().item()] * 12)


@pytest.mark.parametrize(
    "shape", [(3, 1, 1, 1), (1, 1, 1, 1, 1), (3, 1, 1), (LENGTH + 1,), (5, 1), (2, 2, 2, LENGTH)]
)
def test_costs_of_other_edges_are_refused(
    sparse: SparseTransformer, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"here \[2, 2, 6, 6\]"):
        sparse.run_with_counts(_tokens(), edge_cost=torch.ones(shape))
    _, counts = sparse.run_with_counts(_tokens())
    assert counts.cost is None, "nothing of it is left"


def test_batches_of_prompts_keep_their_costs(sparse: SparseTransformer) -> None:
    """Unless one of them has none."""
    cost = torch.rand(LENGTH, dtype=torch.float64)
    parts = [
        sparse.run_with_counts(some, edge_cost=cost)[1] for some in (_tokens()[:1], _tokens()[1:])
    ]
    _, whole = sparse.run_with_counts(_tokens(), edge_cost=cost)
    torch.testing.assert_close(AttentionEdgeCounts.concatenate(parts).cost, whole.cost)
    _, without = sparse.run_with_counts(_tokens())
    assert AttentionEdgeCounts.concatenate([*parts, without]).cost is None
