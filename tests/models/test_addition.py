"""What each form of the addition model is made with."""

from __future__ import annotations

from sparse_tl.models.addition import addition_settings, closed_edges
from sparse_tl.models.built_in import addition_recipe
from sparse_tl.tasks.addition import LENGTH


def test_answer_columns_read_nothing_and_no_column_itself_in_the_first_layer() -> None:
    closed = closed_edges("autoregressive")
    assert closed is not None
    assert closed.shape == (4, 4, LENGTH, LENGTH)
    assert not closed[1:].any()
    for query in range(LENGTH):
        for key in range(query + 1):
            expected = query >= "36+28=00064".index("=") + 1 or query == key
            assert closed[0, :, query, key].unique().tolist() == [expected]


def test_the_placeholder_form_closes_nothing_and_is_the_one_that_is_shipped() -> None:
    assert closed_edges("placeholder") is None
    assert "closed" not in addition_settings("placeholder")
    assert addition_recipe("placeholder", 0).shipped(0).is_dir()
    assert addition_settings("autoregressive")["closed"]
