"""Arguments out of range, and shapes that do not fit each other, are refused in every call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.arguments import Positive, checked
from sparse_tl.data import PromptPairs


@checked
def accept(
    texts: Iterable[str] = (),
    tokens: Int[Tensor, "row pos"] | None = None,
    weights: Float[Tensor, " row"] | None = None,
    rates: Mapping[str, Positive] | None = None,
) -> None:
    """Takes nothing amiss."""


def test_sizes_of_other_arguments() -> None:
    with pytest.raises(
        ValueError,
        match=r"weights: .*row.* shape \(3,\)",
    ):
        accept(tokens=torch.zeros(2, 5, dtype=torch.long), weights=torch.zeros(3))
    accept(tokens=torch.zeros(2, 5, dtype=torch.long), weights=torch.zeros(2))


@pytest.mark.parametrize("rate", [-1.0, 0.0, math.nan, math.inf, 1e300])
def test_rates_out_of_range(rate: float) -> None:
    with pytest.raises(ValueError, match="rates"):
        accept(rates={"*": rate})


def test_messages_name_all_that_a_union_takes_and_names_like_the_one_given() -> None:
    @checked
    def read(prompt: str | Int[Tensor, " pos"], by: Literal["eap", "eap-ig"] = "eap") -> None: ...

    @checked
    def found(*, size: int) -> None: ...

    rows: Any = [("a", "b")]
    batch = r"prompt: Input should be a valid string or an instance of .*; got a torch.int64 Tensor"
    with pytest.raises(ValueError, match=batch + r" of shape \(1, 2\)$"):
        read(torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"by: .*; got 'EAPIG'\. Did you mean 'eap-ig'"):
        read("text", by="EAPIG")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rows, 0: .* a valid dictionary; got \('a',"):
        PromptPairs.from_texts(SimpleNamespace(cfg=None, tokenizer=None), rows)
    with pytest.raises(ValueError, match="prompt: Missing required argument$"):
        read()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="size: Missing required keyword only argument$"):
        found()  # type: ignore[call-arg]
