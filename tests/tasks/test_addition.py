"""The addition task: what is read, what is predicted, and the split."""

from typing import Any

import pytest
import torch

from sparse_tl import AdditionTask
from sparse_tl.tasks.addition import CHARACTERS, addition_tokenizer, decode


def test_autoregressive_labels_are_the_next_characters():
    batch = AdditionTask("autoregressive").prompt("36+28")
    assert decode(batch.tokens[0]) == "36+28=00064"
    assert decode(batch.labels[0][batch.loss_mask[0]]) == "00064"
    assert batch.loss_mask[0].nonzero().flatten().tolist() == [5, 6, 7, 8, 9]


def test_small_integers_do_not_overflow():
    nines = torch.tensor([99], dtype=torch.int8)
    assert decode(AdditionTask("autoregressive").batch(nines, nines).tokens[0]) == "99+99=00198"


def test_placeholders_hide_the_answer():
    batch = AdditionTask("placeholder").prompt("7 + 95")
    assert decode(batch.tokens[0]) == "07+95=?????"
    assert decode(batch.labels[0][batch.loss_mask[0]]) == "00102"
    assert batch.loss_mask[0].nonzero().flatten().tolist() == [6, 7, 8, 9, 10]


@pytest.mark.parametrize("form", ["autoregressive", "placeholder"])
def test_the_split_is_a_partition_of_all_sums(form):
    task = AdditionTask(form)
    parts = task.split(validation=500, test=1000, seed=4)
    assert [len(part) for part in parts] == [8500, 500, 1000]
    operands = [decode(row[:5]) for part in parts for row in part.tokens]
    assert sorted(operands) == sorted(f"{a:02d}+{b:02d}" for a in range(100) for b in range(100))
    for part in parts:
        for row, labels, mask in zip(
            part.tokens[:20], part.labels[:20], part.loss_mask[:20], strict=True
        ):
            left, right = decode(row[:5]).split("+")
            assert int(decode(labels[mask])) == int(left) + int(right)
    again = task.split(validation=500, test=1000, seed=4)
    assert torch.equal(again[2].tokens, parts[2].tokens)
    assert not torch.equal(task.split(seed=5)[2].tokens, task.split(seed=6)[2].tokens)


def test_the_tokenizer_agrees_with_the_task():
    tokenizer = addition_tokenizer()
    tokens = AdditionTask("autoregressive").prompt("9+99").tokens[0]
    assert tokenizer("09+99=00108")["input_ids"] == tokens.tolist()
    assert tokenizer.decode(tokens) == decode(tokens) == "09+99=00108"
    assert tokenizer.mask_token_id == CHARACTERS.index("?")


@pytest.mark.parametrize("form", ["autoregressive", "placeholder"])
@pytest.mark.parametrize("digit", ["hundreds", "tens", "units"])
def test_pairs_differ_in_the_digit_that_is_asked_for(form: Any, digit: str) -> None:
    task = AdditionTask(form)
    pairs = task.pairs(digit, 50, seed=1)
    place = {"hundreds": 100, "tens": 10, "units": 1}[digit]
    held_out = {tuple(row) for row in task.split(seed=1)[2].tokens.tolist()}
    for clean, corrupted, answer, wrong in zip(
        pairs.clean, pairs.corrupted, pairs.answers, pairs.wrong, strict=True
    ):
        digits = []
        for row in (clean, corrupted):
            assert tuple(row.tolist()) in held_out
            left, right = decode(row)[:5].split("+")
            digits.append((int(left) + int(right)) // place % 10)
        assert digits == [answer.item(), wrong.item()]
        assert digits[0] != digits[1]
    column = {"hundreds": 8, "tens": 9, "units": 10}[digit]
    assert set(pairs.positions.tolist()) == {column - (form == "autoregressive")}
    with pytest.raises(ValueError, match="digit: .*'hundreds', 'tens' or 'units'; got 'thou"):
        task.pairs("thousands", 5)
