"""Arguments out of range, and shapes that do not fit each other, are refused in every call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.calls.arguments import Count, Positive, checked


@checked
def accept(
    texts: Iterable[str] = (),
    tokens: Int[Tensor, "row pos"] | None = None,
    weights: Float[Tensor, " row"] | None = None,
    rates: Mapping[str, Positive] | None = None,
) -> None:
    """Takes nothing amiss."""


@checked
class Counter:
    """Something with methods."""

    def __init__(self, start: Count) -> None:
        self.start = start

    def by(self, n: Count) -> int:
        """The start and some more."""
        return self.start + n

    @staticmethod
    def of(n: Count) -> Counter:
        """One that starts there."""
        return Counter(n)

    @classmethod
    def named(cls, name: str) -> Counter:
        """One that starts at the length of its name."""
        return cls(len(name))

    def _unseen(self, n: int) -> int:
        return n


def test_sizes_of_other_arguments() -> None:
    with pytest.raises(
        ValueError,
        match=r"for weights; got a Tensor of float32 and shape \(3,\), where tokens is a Tensor of "
        r"int64 and shape \(2, 5\)",
    ):
        accept(tokens=torch.zeros(2, 5, dtype=torch.long), weights=torch.zeros(3))
    accept(tokens=torch.zeros(2, 5, dtype=torch.long), weights=torch.zeros(2))


@pytest.mark.parametrize("rate", [-1.0, 0.0, math.nan, math.inf, 1e300])
def test_rates_out_of_range(rate: float) -> None:
    with pytest.raises(ValueError, match="finite numbers above 0 .* for rates"):
        accept(rates={"*": rate})


def test_methods_of_a_class() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: Counter(-1),
        lambda: Counter(1).by(-1),
        lambda: Counter.of(-1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"Counter.*: expected a whole number from 0"):
            call()
    assert Counter.named("four").by(1) == Counter.of(4)._unseen(5) == 5
