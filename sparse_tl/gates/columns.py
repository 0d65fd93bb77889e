"""Rules for the columns that an intervention acts on, including tokens still to be generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

Columns = int | slice | Sequence[int] | Callable[[int], bool]
"""Columns, from 0: one, a list, a slice, or a function that says whether a column is selected.

Negative columns count from the end of the tokens that are run.
"""


def meant(
    columns: Columns, start: int, end: int, *, first: int | None = None
) -> Bool[Tensor, " column"]:
    """Whether a rule selects each column from `first` to `end` (exclusive).

    Args:
        columns: the rule.
        start: number of columns in the key-value cache.
        end: number of columns in the cache and in this pass together.
        first: first column of the result; by default the first column of this pass.

    Raises:
        ValueError: a listed column lies outside the tokens that are run, or a column counts from
            the end in a run with a key-value cache.
    """
    first = start if first is None else first
    if callable(columns):
        found = [column for column in range(first, end) if columns(column)]
    elif isinstance(columns, slice):
        _check_from_start([columns.start or 0, columns.stop or 0], start)
        found = list(range(end)[columns])
    else:
        listed = [columns] if isinstance(columns, int) else columns
        _check_from_start(listed, start)
        outside = [column for column in listed if not -end <= column < end]
        if outside:
            raise ValueError(
                f"expected positions in {-end}..{end - 1} of prompts of {end} tokens; got "
                f"{outside[0]}. For tokens that are still to be generated, give a slice or a "
                "function, such as slice(15, None)"
            )
        found = [column % end for column in listed]
    chosen = torch.zeros(end, dtype=torch.bool)
    chosen[found] = True
    return chosen[first:]


def _check_from_start(columns: Sequence[int], start: int) -> None:
    """Check that no column counts from the end, which moves with every generated token."""
    if start and min(columns, default=0) < 0:
        raise ValueError(
            "expected positions that count from the start, in a run with a key-value cache: the "
            f"end moves with every token; got {min(columns)}. The last of 15 tokens is 14; "
            "or run without a cache"
        )
