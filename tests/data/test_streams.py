"""Streams that give the batch of any step."""

from __future__ import annotations

import pytest
import torch

from sparse_tl.data import ShuffledStream
from sparse_tl.data.batches import TokenBatch


def _numbered(n: int) -> TokenBatch:
    """Rows that carry their own number."""
    return TokenBatch.next_token(torch.arange(n)[:, None].repeat(1, 2))


def _rows(batch: TokenBatch) -> list[int]:
    return batch.tokens[:, 0].tolist()


@pytest.mark.parametrize(("n", "size"), [(10, 3), (10, 5), (7, 7), (5, 1), (8, 6)])
def test_every_row_once_per_epoch(n: int, size: int) -> None:
    stream = ShuffledStream(_numbered(n), size, seed=3)
    sequence = [row for step in range(3 * n) for row in _rows(stream.batch(step))]
    epochs = [sequence[start : start + n] for start in range(0, 3 * size * n, n)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    if n > 1:
        assert len({tuple(epoch) for epoch in epochs}) > 1


def test_random_access_equals_sequential() -> None:
    sequential = ShuffledStream(_numbered(11), 4)
    expected = {step: _rows(sequential.batch(step)) for step in range(40)}
    jumping = ShuffledStream(_numbered(11), 4)
    for step in (39, 0, 17, 16, 17, 2, 38, 3):
        assert _rows(jumping.batch(step)) == expected[step]
    assert _rows(ShuffledStream(_numbered(11), 4).batch(23)) == expected[23]


def test_seeds_shuffle_differently_and_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    orders = {tuple(_rows(ShuffledStream(_numbered(20), 20, seed).batch(0))) for seed in range(4)}
    assert len(orders) == 4
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_says_in_how_many_pieces_its_batches_are_run() -> None:
    """And gives the same whole batches whatever it says."""
    plain, in_pieces = (
        ShuffledStream(_numbered(9), 6),
        ShuffledStream(_numbered(9), 6, accumulate=3),
    )
    assert (plain.accumulate, in_pieces.accumulate) == (1, 3)
    assert [_rows(plain.batch(step)) for step in range(3)] == [
        _rows(in_pieces.batch(step)) for step in range(3)
    ]
