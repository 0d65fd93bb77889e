"""Batches of tokens and the loss on them, against computations by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch

from sparse_tl.data.batches import PASS, TokenBatch, exact_rows, token_losses


def _batch(
    n: int = 5, length: int = 4, padded: bool = False, seed: int = 0, groups: Any = None
) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(7, (n, length), generator=generator)
    labels = torch.randint(7, (n, length), generator=generator)
    loss_mask = torch.rand(n, length, generator=generator) < 0.5
    loss_mask[:, 0] = True
    attention_mask = torch.ones_like(tokens) if padded else None
    groups = None if groups is None else torch.tensor(groups)
    return TokenBatch(tokens, labels, loss_mask, attention_mask, groups)


def test_the_loss_of_every_label() -> None:
    batch = _batch(seed=3)
    logits = torch.randn(5, 4, 7, dtype=torch.float64)
    total, labels = 0.0, 0
    for row in range(5):
        for pos in range(4):
            if batch.loss_mask[row, pos]:
                weights = [math.exp(x) for x in logits[row, pos].tolist()]
                total -= math.log(weights[int(batch.labels[row, pos])] / sum(weights))
                labels += 1
    losses = token_losses(logits[batch.loss_mask], batch.loss_labels())
    assert losses.dtype == torch.float64 and len(losses) == labels
    assert losses.sum().item() == pytest.approx(total, rel=1e-13)


def test_the_loss_of_half_precision_logits_is_taken_in_float32() -> None:
    logits, labels = torch.randn(5, 7).bfloat16(), torch.arange(5)
    losses = token_losses(logits, labels)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, token_losses(logits.float(), labels))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_pieces_of_a_batch_are_its_rows_in_turn(size: int, padded: bool) -> None:
    batch = _batch(padded=padded)
    pieces = batch.split(size)
    assert [len(piece) for piece in pieces] == [min(size, 5 - start) for start in range(0, 5, size)]
    for place, piece in enumerate(pieces):
        rows = torch.arange(5)[place * size : (place + 1) * size]
        assert piece.digest() == batch.select(rows).digest()


# Groups of rows.


def _of_lengths(lengths: list[int], left: int = 0) -> TokenBatch:
    """Rows with so many real tokens, the last of which has the loss; `left` columns of padding."""
    width = left + max(lengths)
    tokens = torch.arange(len(lengths) * width).view(len(lengths), width)
    column = torch.arange(width)
    ends = left + torch.tensor(lengths)[:, None]
    real = ((column >= left) & (column < ends)).long()
    return TokenBatch(tokens, tokens + 1, column == ends - 1, real, torch.arange(len(lengths)))


@pytest.mark.parametrize("left", [0, 2])
def test_parts_of_like_length_have_all_rows_and_no_padding_on_the_right(left: int) -> None:
    lengths = [500, 200, 300, 500, 200, 400, 100, 300]
    batch = _of_lengths(lengths, left)
    parts = batch.by_length(3)
    shapes = [(3, left + 200), (2, left + 300), (3, left + 500)]
    assert [part.tokens.shape for part in parts] == shapes
    for part in parts:
        assert part.groups is not None
        for row, origin in enumerate(part.groups.tolist()):
            width = part.tokens.shape[1]
            for name in ("tokens", "labels", "loss_mask", "attention_mask"):
                assert torch.equal(getattr(part, name)[row], getattr(batch, name)[origin, :width])
            assert lengths[origin] + left <= width
    assert sorted(torch.cat([p.label_groups() for p in parts]).tolist()) == list(range(8))


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_parts_have_the_fewest_tokens(parts: int, seed: int) -> None:
    """Of all divisions of the sorted rows, where a pass counts as `PASS` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([3, 20, 60, 150, 200])[torch.randint(5, (7,), generator=generator)]
    found = _of_lengths(lengths.tolist()).by_length(parts)
    a_pass, n = PASS.on(torch.device("cpu")), len(lengths)
    ends = sorted(lengths.tolist())
    least = min(
        sum((stop - start) * ends[stop - 1] + a_pass for start, stop in pairwise((0, *cuts, n)))
        for k in range(parts)
        for cuts in combinations(range(1, n), k)
    )
    assert sum(part.tokens.numel() + a_pass for part in found) == least
    assert sum(map(len, found)) == n


def test_every_part_has_a_loss() -> None:
    batch = _of_lengths([3, 3, 200, 200])
    batch = replace(batch, loss_mask=batch.loss_mask & (torch.arange(4) < 2)[:, None])
    assert [part.tokens.shape for part in batch.by_length()] == [(4, 200)]


def test_rows_of_one_length_or_without_padding_are_one_part() -> None:
    unpadded = _batch()
    assert unpadded.by_length() == [unpadded]
    (same,) = _of_lengths([3, 3, 3]).by_length()
    assert same.digest() == _of_lengths([3, 3, 3]).digest()


def test_labels_are_of_the_group_of_their_row() -> None:
    batch = _batch(groups=[2, 0, 0, 2, 1], seed=3)
    assert batch.n_groups == 3
    expected = [
        group
        for group, row in zip([2, 0, 0, 2, 1], batch.loss_mask.tolist(), strict=True)
        for counts in row
        if counts
    ]
    assert batch.label_groups().tolist() == expected
    assert len(batch.loss_labels()) == len(expected)


def test_groups_go_with_their_rows() -> None:
    batch = _batch(groups=[2, 0, 0, 2, 1], padded=True)
    assert batch.groups is not None
    chosen = batch.select(torch.tensor([4, 0]))
    assert chosen.groups is not None and chosen.groups.tolist() == [1, 2]
    pieces = [piece.groups for piece in batch.split(2)]
    assert torch.equal(torch.cat([groups for groups in pieces if groups is not None]), batch.groups)
    trimmed = batch.trimmed(causal=True)
    assert trimmed.groups is not None and torch.equal(trimmed.groups, batch.groups)
    assert batch.select(torch.tensor([1, 2])).n_groups == 1


def test_groups_are_part_of_what_a_batch_is() -> None:
    digests = {_batch(groups=groups).digest() for groups in (None, [0] * 5, [0, 1, 0, 1, 0])}
    assert len(digests) == 3


def test_exact_rows_ask_for_every_label_and_for_nothing_else() -> None:
    labels = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 2]])
    loss_mask = torch.tensor([[True, True, False]] * 3)
    logits = torch.nn.functional.one_hot(labels, 3).float()
    logits[2, 1] = torch.tensor([1.0, 0.0, 0.0])  # wrong
    batch = TokenBatch(labels, labels, loss_mask)
    assert exact_rows(logits[loss_mask], batch).tolist() == [True, True, False]
