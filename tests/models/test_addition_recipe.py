"""What each form of the addition model is made with."""

from __future__ import annotations

from sparse_tl.models.addition import addition_settings, closed_edges
from sparse_tl.models.built_in import addition_recipe
from sparse_tl.tasks.addition import LENGTH


def test_sums_are_read_from_near_and_made_before_the_equals_sign() -> None:
    closed = closed_edges("autoregressive")
    assert closed is not None
    assert closed.shape == (4, 4, LENGTH, LENGTH)
    for query in range(LENGTH):
        for key in range(query + 1):
            far = query - key > 5
            assert closed[1:, :, query, key].unique().tolist() == [far]
            silent = query >= "36+28=00064".index("=") or query == key
            assert closed[0, :, query, key].unique().tolist() == [far or silent]


def test_the_placeholder_form_closes_nothing_and_is_the_one_that_is_shipped() -> None:
    assert closed_edges("placeholder") is None
    assert "closed" not in addition_settings("placeholder")
    assert addition_recipe("placeholder", 0).shipped(0).is_dir()
    assert addition_settings("autoregressive")["closed"]
