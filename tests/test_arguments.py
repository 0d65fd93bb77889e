"""What is accepted, and what messages say to those who wrote something else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from annotated_types import Ge, Le
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.calls.arguments import AtLeastOne, Count, Fraction, Positive, checked
from sparse_tl.calls.wording import in_words

IN_WORDS = {
    AtLeastOne: "a whole number from 1 to 1,000,000,000",
    Sequence[AtLeastOne]: "a list of whole numbers from 1 to 1,000,000,000",
    Sequence[tuple[int, int]]: "a list of (a whole number, a whole number)",
    tuple[AtLeastOne, ...]: "a list of whole numbers from 1 to 1,000,000,000",
    tuple[Fraction, Fraction]: "(a finite number from 0 to 1, a finite number from 0 to 1)",
    Positive | Mapping[str, Positive]: (
        "a finite number above 0 to 1,000,000,000 or a mapping of texts to finite numbers above 0 "
        "to 1,000,000,000"
    ),
    Sequence[Sequence[int]] | Int[Tensor, "row pos"]: (
        "a list of a list of whole numbers or Int[Tensor, 'row pos']"
    ),
    Iterable[str] | None: "an iterable of texts or None",
    Sequence[Annotated[int, Ge(0), Le(3)] | str]: "a list of a whole number from 0 to 3 or text",
    Mapping[str, Any]: "a mapping of texts to anything",
    Sequence[Literal["a", "b"]]: "a list of 'a' or 'b'",
    Callable[[int], Sequence[int]]: "a function",
    str | Path | Sequence[Path]: "text or a path or a list of paths",
}


@pytest.mark.parametrize("annotation", IN_WORDS)
def test_types_in_words(annotation: Any) -> None:
    assert in_words(annotation) == IN_WORDS[annotation]


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


@pytest.mark.parametrize("text", ["a text", b"bytes"])
def test_a_text_is_no_iterable_of_texts(text: Any) -> None:
    with pytest.raises(TypeError, match="expected an iterable of texts for texts; got b?'"):
        accept(text)
    accept(iter(["a text"]))


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
    wrong: Any = 3
    with pytest.raises(TypeError, match=r"Counter\.named: expected text for name; got 3 \(int\)"):
        Counter.named(wrong)
    assert Counter.named("four").by(1) == Counter.of(4)._unseen(5) == 5
