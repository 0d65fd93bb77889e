"""Spans: which tokens a name stands for, pair by pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparse_tl.data import PromptPairs


@pytest.fixture
def pairs() -> PromptPairs:
    """Three pairs of 4, 3 and 2 tokens."""
    prompts, answers = torch.arange(12).view(3, 4), torch.zeros(3, 1, dtype=torch.long)
    return PromptPairs(prompts, prompts, answers, answers + 1, torch.tensor([3, 2, 1]))


def test_one_mapping_for_all(pairs: PromptPairs) -> None:
    spans = pairs.with_spans({"START": 0, "END": -1}).spans
    assert spans is not None
    assert spans.names == ("START", "END", "rest")
    # Padding belongs to the span of the last token.
    assert spans.at.tolist() == [[0, 2, 2, 1], [0, 2, 1, 1], [0, 1, 1, 1]]


def test_a_mapping_for_each(pairs: PromptPairs) -> None:
    each = [{"a": range(3), "b": [3]}, {"a": 0, "b": (1, 2)}, {"a": [], "b": range(2)}]
    spans = pairs.with_spans(each).spans
    assert spans is not None
    assert spans.names == ("a", "b")  # every token is named
    assert spans.at.tolist() == [[0, 0, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]


def test_tokens(pairs: PromptPairs) -> None:
    spans = pairs.select(slice(1, 2)).spans_of("tokens")
    assert spans.names == ("0", "1", "2")
    assert spans.at.tolist() == [[0, 1, 2, 2]]


def test_rows_keep_their_spans(pairs: PromptPairs) -> None:
    spanned = pairs.with_spans([{"S": 3}, {"S": 1}, {"S": 0}])
    one, other = spanned.split(2)
    assert one.spans is not None
    assert other.spans is not None
    assert other.spans.names == ("S", "rest")
    assert other.spans.at.tolist() == [[0, 1, 1, 1]]
    assert len(one.spans) == 2
    assert spanned.digest() != pairs.digest()
    assert spanned.digest() != pairs.with_spans({"S": 0}).digest()


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ({"S": 2}, "2 tokens of pair 2; got 2 in 'S'"),
        ({"S": [0, 1], "T": -1}, "column 1 of pair 2 is in 'S' and in 'T'"),
    ],
)
def test_spans_that_do_not_fit(pairs: PromptPairs, spans: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pairs.with_spans(spans)
