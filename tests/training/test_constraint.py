"""Targets as people write them, and a controller that finds lambda."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparse_tl.training import LossConstraint, Target
from sparse_tl.training.constraint import (
    BOUNDS,
    DEFAULT_TARGET,
    INTEGRAL,
    PROPORTIONAL,
    START,
)

FREE = (1e-3, 1e3)
"""Bounds wide enough for problems whose lambda is small."""


def _constraint(n_groups: int = 1, **settings: Any) -> LossConstraint:
    return LossConstraint(torch.ones(n_groups), **settings)


def _moved(constraint: LossConstraint, *violations: Any) -> list[list[float]]:
    """log lambda of every group after each of these violations."""
    path = []
    for violation in violations:
        constraint.move(torch.tensor(violation, dtype=torch.float64).reshape(-1))
        path.append(constraint.lambda_.log().tolist())
    return path


@pytest.mark.parametrize(
    ("written", "nats", "of", "shown"),
    [
        (0.01, 0.01, "loss", "0.01"),
        ("0.01", 0.01, "loss", "0.01"),
        (" 1e-2 ", 0.01, "loss", "0.01"),
        (2, 2.0, "loss", "2"),
        ("+0.05", 0.05, "increase", "+0.05"),
        (" +5e-2", 0.05, "increase", "+0.05"),
        ("kl+0.05", 0.05, "divergence", "kl+0.05"),
        (" kl+5e-2", 0.05, "divergence", "kl+0.05"),
        (np.float64(0.5), 0.5, "loss", "0.5"),
    ],
)
def test_targets(written: Any, nats: float, of: str, shown: str) -> None:
    target = Target.parse(written)
    assert target == Target(nats, of)  # type: ignore[arg-type]
    assert str(target) == shown
    assert Target.parse(str(target)) == target


@pytest.mark.parametrize(
    ("written", "amount", "times_fewer", "shown"),
    [
        (300, 300.0, False, "300 edges per token"),
        (" 2.5", 2.5, False, "2.5 edges per token"),
        ("100x", 100.0, True, "100 times fewer edges per token"),
    ],
)
def test_target_edges(written: Any, amount: float, times_fewer: bool, shown: str) -> None:
    target = Target.parse(edges=written)
    assert target == Target(amount, "times fewer" if times_fewer else "edges")
    assert str(target) == shown
    assert target.edges(450.0) == pytest.approx(450 / amount if times_fewer else amount)


def test_there_is_one_target() -> None:
    assert Target.parse() == Target.parse(DEFAULT_TARGET)
    with pytest.raises(ValueError, match="each determines the other"):
        Target.parse("+0.1", 300)


# The controller, update by update.


@pytest.mark.parametrize(
    ("target_edges", "summed"), [(None, [0.5, -0.2, 0.9]), (7, [2, -0.2, 3.6])]
)
def test_three_updates_by_hand(target_edges: float | None, summed: list[float]) -> None:
    """``log lambda = log START + INTEGRAL / n * sum e + PROPORTIONAL * e``.

    Too few edges, an e above 0 under a target of edges, count four times in the sum.
    """
    violations = [0.5, -0.2, 0.9]
    found = _moved(_constraint(target_edges=target_edges, evaluated_every=40), *violations)
    assert (INTEGRAL, PROPORTIONAL) == (0.4, 0.5)
    for (log_lambda,), last, total in zip(found, violations, accumulate(summed), strict=True):
        assert log_lambda == pytest.approx(math.log(START) + 0.01 * total + 0.5 * last, abs=1e-12)


@pytest.mark.parametrize(("large", "clipped"), [(20.0, 1.0), (-20.0, -1.0), (math.inf, 1.0)])
def test_violations_are_clipped(large: float, clipped: float) -> None:
    expected = max(math.log(START) + 0.4 * clipped + 0.5 * clipped, math.log(BOUNDS[0]))
    assert _moved(_constraint(), large)[0][0] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("violation", "bound"), [(1.0, BOUNDS[1]), (-1.0, BOUNDS[0])])
def test_lambda_stays_within_its_bounds(violation: float, bound: float) -> None:
    constraint = _constraint(integral=0.5)
    path = [log_lambda for (log_lambda,) in _moved(constraint, *[violation] * 20)]
    assert path[-1] == pytest.approx(math.log(bound))
    assert all(math.log(BOUNDS[0]) <= at <= math.log(BOUNDS[1]) + 1e-12 for at in path)
    # And it comes back at once when the violation turns.
    assert abs(_moved(constraint, -violation)[-1][0] - math.log(bound)) > 0.1


def test_a_group_that_violates_raises_its_own_lambda_alone() -> None:
    groups = _moved(_constraint(3), [0.4, -0.1, 0.0], [0.2, -0.3, 0.0])
    alone = [_moved(_constraint(), *of) for of in ([0.4, 0.2], [-0.1, -0.3], [0.0, 0.0])]
    assert [[log for (log,) in path] for path in alone] == [
        list(x) for x in zip(*groups, strict=True)
    ]
    assert groups[-1][0] > math.log(START) > groups[-1][1]
    assert groups[-1][2] == math.log(START)


# What it finds: problems with a multiplier that is known.


def _solve(
    gradient: Callable[[Tensor, Tensor], Tensor],
    constrained: Callable[[Tensor], Tensor],
    constraint: LossConstraint,
    steps: int = 4000,
    rate: float = 0.05,
) -> tuple[Tensor, Tensor]:
    """Descend on x and let the controller move lambda; the path of both."""
    n_groups = len(constraint.lambda_)
    x, xs, lambdas = torch.zeros(n_groups, dtype=torch.float64), [], []
    for _ in range(steps):
        constraint.move(constrained(x))
        x = x - rate * gradient(x, constraint.lambda_)
        xs.append(x)
        lambdas.append(constraint.lambda_)
    return torch.stack(xs), torch.stack(lambdas)


def _one(constraint: LossConstraint, rate: float = 0.05) -> tuple[Tensor, Tensor]:
    """Minimise x^2 / 2 with 1 - x <= 0: stationary where x = lambda, so lambda is 1."""
    return _solve(lambda x, lambda_: x - lambda_, lambda x: 1 - x, constraint, rate=rate)


@pytest.mark.parametrize("start", [0.05, START, 100.0])
def test_lambda_of_one_constraint_is_found(start: float) -> None:
    xs, lambdas = _one(_constraint(start=start, evaluated_every=40, bounds=FREE))
    assert lambdas[-1].item() == pytest.approx(1.0, abs=1e-3)
    assert xs[-1].item() == pytest.approx(1.0, abs=1e-3)


def test_the_lambda_of_each_of_two_constraints_is_found() -> None:
    """Minimise (3 x^2 + y^2) / 2 + x y with x >= 1 and y >= 2: lambdas of 5 and 3."""
    hessian = torch.tensor([[3.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    least = torch.tensor([1.0, 2.0], dtype=torch.float64)
    xs, lambdas = _solve(
        lambda x, lambda_: hessian @ x - lambda_,
        lambda x: (least - x) / least,
        _constraint(2, evaluated_every=40, bounds=FREE),
    )
    assert lambdas[-1].tolist() == pytest.approx([5.0, 3.0], rel=1e-3)
    assert xs[-1].tolist() == pytest.approx([1.0, 2.0], rel=1e-3)


def test_a_constraint_that_does_not_bind_ends_near_nothing() -> None:
    """Minimise (x - 2)^2 / 2 with x >= 1: met without any help."""
    constraint = _constraint(evaluated_every=40, bounds=FREE)
    xs, lambdas = _solve(lambda x, lambda_: x - 2 - lambda_, lambda x: 1 - x, constraint)
    assert lambdas[-1].item() == pytest.approx(FREE[0])
    assert xs[-1].item() == pytest.approx(2.0, abs=0.01)
