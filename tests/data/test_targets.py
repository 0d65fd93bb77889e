"""Prompts with targets, from whatever they come: the target's tokens are those that are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from made_tokenizers import byte_level
from tokenizers import normalizers

from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.data.targets import TargetDataset, read_jsonl
from sparse_tl.zoo import task_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return task_tokenizer()


ROWS = [[5, 6, 7, 8], [9, 10, 11]]
SPANS = [(2, 4), (1, 2)]


def test_spans_become_labels_where_they_are_predicted() -> None:
    rows = TargetDataset.from_tokens(ROWS, SPANS, pad_token=0).rows
    assert rows.tokens[1].tolist() == [9, 10, 11, 0]
    assert rows.loss_mask.nonzero().tolist() == [[0, 1], [0, 2], [1, 0]]
    assert rows.labels[rows.loss_mask].tolist() == [7, 8, 10]
    assert rows.attention_mask is not None
    assert rows.attention_mask.sum(dim=1).tolist() == [4, 3]


@pytest.mark.parametrize(
    "rows", [[[0, 0, 5, 6], [7, 8, 9, 0]], torch.tensor([[0, 0, 5, 6], [7, 8, 9, 0]])]
)
def test_padding_that_is_there_already_is_not_attended_to(rows: Any) -> None:
    found = TargetDataset.from_tokens(rows, [(3, 4), (2, 3)], pad_token=0).rows
    assert found.attention_mask is not None
    assert found.attention_mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 0]]
    with pytest.raises(ValueError, match="the target of row 1 has padding"):
        TargetDataset.from_tokens(rows, [(3, 4), (2, 4)], pad_token=0)


def test_rows_of_one_length_need_no_mask() -> None:
    assert TargetDataset.from_tokens([[1, 2], [3, 4]], [(1, 2)] * 2).rows.attention_mask is None


@pytest.mark.parametrize(
    ("rows", "spans", "message"),
    [
        ([[1, 2]], [(1, 1)], r"span \(1, 1\) of row 0 .* in 1..2"),
        ([[1, 2], [1, 0, 0]], [(1, 2), (1, 3)], "the target of row 1 has padding"),
    ],
)
def test_spans_that_do_not_fit_are_refused(rows: Any, spans: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TargetDataset.from_tokens(rows, spans, pad_token=0)


def test_targets_on_padding_are_refused() -> None:
    tokens = torch.tensor([[0, 3, 4]])
    mask = torch.tensor([[True, False, False]])
    with pytest.raises(ValueError, match="row 0: its target is on padding"):
        TargetDataset(TokenBatch(tokens, tokens, mask, torch.tensor([[0, 1, 1]])))
    with pytest.raises(ValueError, match="row 1: there is no target"):
        mask = torch.tensor([[True, False, False], [False] * 3])
        TargetDataset(TokenBatch(tokens.repeat(2, 1), tokens.repeat(2, 1), mask))


TEXTS = ["The attack lasted from the year 17 32 to the year 17", "def"]


def test_texts_and_targets(tokenizer: Any) -> None:
    found = TargetDataset.from_texts(tokenizer, TEXTS, [" 45", " (self,"])
    said = found.to_records(tokenizer)
    assert [row["target"] for row in said] == [" 45", " (self,"], "as they were given"
    assert said[0]["text"] == TEXTS[0]
    assert found.n_targets == 2


def test_every_source_gives_the_same_rows(tokenizer: Any, tmp_path: Path) -> None:
    records = [
        {"text": text, "target": target, "note": "not the end of a line: \u2028, \x85"}
        for text, target in zip(TEXTS, [" 45", " (self,"], strict=True)
    ]
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    file.write_text("\n".join(lines) + "\n\n", encoding="utf-8-sig")
    from datasets import Dataset

    sources = [
        TargetDataset.from_records(tokenizer, records),
        TargetDataset.from_records(tokenizer, pd.DataFrame(records)),
        TargetDataset.from_records(tokenizer, read_jsonl(file)),
        TargetDataset.from_records(tokenizer, Dataset.from_list(records)),
        TargetDataset.from_records(
            tokenizer,
            [{"q": row["text"], "a": row["target"]} for row in records],
            text="q",
            target="a",
        ),
    ]
    for source in sources[1:]:
        for name in ("tokens", "labels", "loss_mask", "attention_mask"):
            assert torch.equal(getattr(source.rows, name), getattr(sources[0].rows, name))


def test_an_accent_is_no_target_without_its_letter() -> None:
    """A tokenizer that composes them counted the accent as part of the text, not of the target."""
    tokenizer = byte_level(normalizer=normalizers.NFC())
    with pytest.raises(ValueError, match="target of row 0 begins inside a token"):
        TargetDataset.from_texts(tokenizer, ["cafe"], ["\u0301 x"])


def test_pairs_give_one_of_their_answers() -> None:
    pairs = PromptPairs(
        torch.tensor([[1, 2, 3], [4, 5, 0]]),
        torch.tensor([[1, 9, 3], [4, 9, 0]]),
        torch.tensor([[7, 8], [6, -1]]),
        torch.tensor([[0], [0]]),
        torch.tensor([2, 1]),
    )
    drawn = {int(TargetDataset.from_pairs(pairs, seed=s).rows.labels[0, 2]) for s in range(20)}
    assert drawn == {7, 8}
    assert int(TargetDataset.from_pairs(pairs).rows.labels[1, 1]) == 6
    assert TargetDataset.from_pairs(pairs).n_targets == 2
    mask = TargetDataset.from_pairs(pairs).rows.attention_mask
    assert mask is not None and mask.tolist() == [[1, 1, 1], [1, 1, 0]]


def test_a_split_holds_every_row_once() -> None:
    dataset = TargetDataset.from_windows(torch.arange(40).reshape(10, 4))
    assert dataset.n_targets == 30
    kept, held_out = dataset.split(0.3, seed=1)
    assert len(held_out) == 3
    firsts = [int(row[0]) for part in (kept, held_out) for row in part.rows.tokens]
    assert sorted(firsts) == list(range(0, 40, 4))
    with pytest.raises(ValueError, match="empty: give at least two rows and 0 < held_out < 1"):
        dataset.split(1.0)


def test_trimmed_batches_lose_what_cannot_matter() -> None:
    rows = TargetDataset.from_tokens([[1, 2, 3, 4], [0, 0, 5, 6]], [(2, 4), (3, 4)], pad_token=0)
    assert rows.rows.select(slice(1, 2)).trimmed(causal=True).tokens.tolist() == [[5]]
    assert rows.rows.trimmed(causal=True).tokens.tolist() == [[1, 2, 3], [0, 0, 5]]
    plain = TokenBatch.next_token(torch.ones(2, 3, dtype=torch.long)).trimmed(causal=True)
    assert plain.tokens.shape == (2, 2) and plain.attention_mask is None
