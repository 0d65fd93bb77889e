"""Targets as people write them, and a lambda that moves the right way and no further."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from sparse_tl.training import LossConstraint, TargetLoss


@pytest.mark.parametrize(
    ("written", "nats", "reference", "shown"),
    [
        (0.01, 0.01, "absolute", "0.01"),
        ("0.01", 0.01, "absolute", "0.01"),
        (" 1e-2 ", 0.01, "absolute", "0.01"),
        (2, 2.0, "absolute", "2"),
        ("+0.05", 0.05, "dense", "+0.05"),
        (" +5e-2", 0.05, "dense", "+0.05"),
        (np.float64(0.5), 0.5, "absolute", "0.5"),
    ],
)
def test_targets(written: Any, nats: float, reference: str, shown: str) -> None:
    target = TargetLoss.parse(written)
    assert target == TargetLoss(nats, reference)  # type: ignore[arg-type]
    assert str(target) == shown
    assert TargetLoss.parse(target) is target
    assert TargetLoss.parse(str(target)) == target


@pytest.mark.parametrize(
    "written",
    ["", "abc", "nan", "+nan", "inf", "+inf", "0", 0.0, -0.1, "-0.1", "+-0.1", "++1", "+"],
)
def test_what_is_no_target(written: Any) -> None:
    with pytest.raises(ValueError, match=r'target loss in nats above 0.*"\+0\.05"; got'):
        TargetLoss.parse(written)


@pytest.mark.parametrize(("violation", "direction"), [(0.3, 1), (-0.3, -1), (0.0, 0)])
def test_lambda_rises_while_the_loss_is_above_its_target(violation: float, direction: int) -> None:
    constraint = LossConstraint(scale=1.0)
    assert constraint.lambda_ == 1.0
    path = [constraint.log_lambda]
    for _ in range(5):
        constraint.update(violation)
        path.append(constraint.log_lambda)
    steps = [math.copysign(1, b - a) if b != a else 0 for a, b in zip(path, path[1:], strict=False)]
    assert steps == [direction] * 5
    assert constraint.lambda_ == pytest.approx(math.exp(constraint.log_lambda))


def test_the_update_by_hand() -> None:
    constraint = LossConstraint(scale=0.5, rate=0.1, smoothing=0.9)
    constraint.update(0.25)  # half of a full violation; the average starts there
    assert constraint.log_lambda == pytest.approx(0.1 * 0.5)
    constraint.update(-0.1)  # a fifth below: average 0.9 * 0.5 - 0.1 * 0.2
    assert constraint.average == pytest.approx(0.43)
    assert constraint.log_lambda == pytest.approx(0.05 + 0.043)


@pytest.mark.parametrize("sign", [1, -1])
def test_one_wild_batch_moves_lambda_no_more_than_a_full_violation(sign: int) -> None:
    wild, full = (LossConstraint(scale=0.01, rate=0.1) for _ in range(2))
    wild.update(sign * 1e9)
    full.update(sign * 0.01)
    assert wild == full
    assert wild.log_lambda == pytest.approx(0.1 if sign > 0 else -0.1 * wild.fall)


def test_lambda_may_rise_faster_the_larger_the_violation() -> None:
    """Up to the multiple that it is given; the other way nothing changes."""
    for violation, steps in ((0.5, 0.5), (3.0, 3.0), (100.0, 4.0), (-100.0, -0.3)):
        constraint = LossConstraint(scale=1.0, rate=0.1, rise=4.0)
        constraint.update(violation)
        assert constraint.log_lambda == pytest.approx(0.1 * steps)


@pytest.mark.parametrize(("violation", "bound"), [(1.0, 2.0), (-1.0, -3.0)])
def test_lambda_stays_within_its_bounds(violation: float, bound: float) -> None:
    constraint = LossConstraint(scale=1.0, rate=0.5, fall=1.0, bounds=(-3.0, 2.0))
    for _ in range(20):
        constraint.update(violation)
    assert constraint.log_lambda == bound
    # And it comes back from there as soon as the average turns.
    for _ in range(20):
        constraint.update(-violation)
    assert abs(constraint.log_lambda - bound) > 1


@pytest.mark.parametrize("updates", [0, 1, 7])
def test_a_resumed_constraint_goes_on_exactly(updates: int) -> None:
    constraint = LossConstraint(scale=0.1, log_lambda=0.3)
    for i in range(updates):
        constraint.update(math.sin(i) * 0.07)
    kept = {"log_lambda": constraint.log_lambda, "average": constraint.average}
    resumed = LossConstraint(scale=0.1, **json.loads(json.dumps(kept)))
    for violation in (0.02, -0.4, 0.01):
        constraint.update(violation)
        resumed.update(violation)
    assert resumed == constraint
