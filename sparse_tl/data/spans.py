"""Spans: the part of its prompt that each token belongs to, for scores and circuits by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl.calls.arguments import checked
from sparse_tl.data.batches import Rows

Positions = Literal["tokens", "spans"]
"""The unit of position: each token, in prompts of one length, or a named span."""
Span = int | range | Sequence[int]
"""One or several columns; negative columns count from the end of the prompt."""
REST = "rest"
"""The span of the tokens that belong to no other span."""


@checked
@dataclass(frozen=True, eq=False)
class Spans(Rows):
    """The span of every token; padding belongs to the span of the last token.

    Args:
        at: index into `names`.
        names: names of the spans.
    """

    at: Int[Tensor, "pair pos"]
    names: tuple[str, ...]

    @staticmethod
    def of_tokens(ends: Int[Tensor, " pair"], n_columns: int) -> Spans:
        """A span for every token, named by its column.

        Args:
            ends: column of each prompt's last token.
            n_columns: number of columns, including padding.

        Raises:
            ValueError: the prompts differ in length.
        """
        end = int(ends[0])
        if bool((ends != end).any()):
            raise ValueError(
                f'expected prompts of one length for positions="tokens"; got lengths from '
                f"{int(ends.min()) + 1} to {int(ends.max()) + 1} tokens. Select those of one "
                'length, or name spans: pairs.with_spans(...) and positions="spans"'
            )
        columns = torch.arange(n_columns, device=ends.device).clamp(max=end)
        return Spans(columns.repeat(len(ends), 1), tuple(map(str, range(end + 1))))

    @staticmethod
    def named(
        spans: Mapping[str, Span] | Sequence[Mapping[str, Span]],
        ends: Int[Tensor, " pair"],
        n_columns: int,
    ) -> Spans:
        """Named spans, as in `PromptPairs.with_spans`; other arguments as in `of_tokens`."""
        rows = [spans] * len(ends) if isinstance(spans, Mapping) else list(spans)
        if len(rows) != len(ends):
            raise ValueError(f"expected spans for {len(ends)} pairs; got {len(rows)}")
        names = tuple(rows[0])
        if not names or any(not name or name.isdigit() for name in names):
            raise ValueError(
                f"expected span names other than numbers, which name tokens; got {names}"
            )
        at = torch.full((len(ends), n_columns), -1)
        for row, (by_name, end) in enumerate(zip(rows, ends.tolist(), strict=True)):
            if by_name.keys() != set(names):
                raise ValueError(
                    f"expected the same spans in every pair, {names}; pair {row} has "
                    f"{tuple(by_name)}"
                )
            for index, name in enumerate(names):
                for column in _columns(by_name[name], name, row, end):
                    if at[row, column] >= 0:
                        raise ValueError(
                            f"expected spans that share no token; column {column} of pair {row} "
                            f"is in {names[int(at[row, column])]!r} and in {name!r}"
                        )
                    at[row, column] = index
        last = ends.cpu()[:, None]
        others = (at < 0) & (torch.arange(n_columns) <= last)
        if bool(others.any()):
            names = tuple(dict.fromkeys([*names, REST]))
            at[others] = names.index(REST)
        at = torch.where(at < 0, at.gather(1, last), at)
        return Spans(at.to(ends.device), names)

    def __repr__(self) -> str:
        return f"Spans({', '.join(self.names)})"


def _columns(span: Span, name: str, row: int, end: int) -> list[int]:
    """The columns of a pair's span, counted from the start."""
    columns = [span] if isinstance(span, int) else list(span)
    for column in columns:
        if not -end - 1 <= column <= end:
            raise ValueError(
                f"expected columns within the {end + 1} tokens of pair {row}; got {column} in "
                f"{name!r}"
            )
    return [column % (end + 1) for column in columns]
