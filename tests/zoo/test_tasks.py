"""The task model: its words, its rows and its accuracy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparse_tl.tasks import GreaterThanTask
from sparse_tl.zoo import (
    TASKS,
    task_accuracy,
    task_pairs,
    task_recipe,
    task_rows,
    task_tokenizer,
)
from sparse_tl.zoo.built_in import UNKNOWN, part_of, task_vocabulary

# Words


def test_every_word_is_one_token_and_reads_back() -> None:
    tokenizer = task_tokenizer()
    words = task_vocabulary()
    assert tokenizer.encode(" ".join(words[2:])) == list(range(2, len(words)))
    assert [tokenizer.decode([token]) for token in range(len(words))] == list(words)
    assert tokenizer.encode("Methuselah") == [words.index(UNKNOWN)]


def test_years_are_two_tokens_and_the_frame_of_a_definition_is_few() -> None:
    tokenizer = task_tokenizer()
    words = task_vocabulary()

    def read(text: str) -> list[str]:
        return [words[token] for token in tokenizer.encode(text)]

    assert read("the year 1732") == ["the", "year", "17", "32"]
    assert read('def test(self, data, path):\n    """cost\n\n    :param data: age') == [
        *("def", "test", "(self,", "data", ",", "path", "):", '"""', "cost"),
        *(":param", "data", ":", "age"),
    ]


# Rows


def clean_prompts(part: str, n: int, seed: int) -> set[tuple[int, ...]]:
    """Distinct prompts of a part, of the 97 that this task can draw at all."""
    task = GreaterThanTask(nouns=("plan",), centuries=(17,))
    return set(map(tuple, task_pairs(task, n, part=part, seed=seed).clean.tolist()))


def test_the_parts_share_no_prompt_whatever_the_seeds() -> None:
    held_out = clean_prompts("held_out", 8, seed=0)
    validation = clean_prompts("validation", 8, seed=0)
    training = clean_prompts("training", 60, seed=1)  # chance alone would not miss the others
    assert (len(held_out), len(validation), len(training)) == (8, 8, 60)
    assert not held_out & validation
    assert not (held_out | validation) & training


def test_one_prompt_in_eight_is_held_out_and_one_validates() -> None:
    parts = [part_of(f"prompt {number}") for number in range(4000)]
    for part, share in (("training", 0.75), ("validation", 0.125), ("held_out", 0.125)):
        assert parts.count(part) / 4000 == pytest.approx(share, abs=0.03)


def test_a_row_has_its_loss_at_the_answer_or_at_every_token() -> None:
    rows = task_rows(20, part="training", text=0.25)
    assert len(rows) == 20 * len(TASKS)
    words = task_vocabulary()
    text_rows = 0
    for tokens, labels, mask in zip(rows.tokens, rows.labels, rows.loss_mask, strict=True):
        end = int((tokens != 0).sum())
        assert not (tokens[end:] != 0).any()
        if mask[0]:
            text_rows += 1
            assert mask.nonzero().flatten().tolist() == list(range(end))
            assert torch.equal(labels[: end - 1], tokens[1:end])
        else:
            assert mask.nonzero().flatten().tolist() == [end - 1]
        prompt, answer = [words[token] for token in tokens[:end]], words[int(labels[end - 1])]
        if prompt[-1] == "to":
            assert prompt.count(answer) == 1  # the indirect object
        elif prompt[-1] == ":param":
            assert answer == prompt[11]  # the argument after the two that are described
        else:
            century, start = prompt[6:8]  # The plan lasted from the year 17 32 to the year 17
            assert prompt[-1] == century
            assert int(answer) > int(start)
    assert text_rows == 5 * len(TASKS)


def test_accuracy_is_the_share_of_right_answers() -> None:
    dense = task_recipe().build(device="cpu")
    answer = task_vocabulary().index("99")

    def prefer(logits: torch.Tensor, hook: Any) -> torch.Tensor:
        return logits + 1e4 * (torch.arange(logits.shape[-1]) == answer)

    with dense.hooks(fwd_hooks=[("unembed.hook_out", prefer)]):
        accuracy = task_accuracy(dense, n=5)
    assert accuracy == {"greater_than": 1.0, "ioi": 0.0, "ioi_long": 0.0, "docstring": 0.0}
