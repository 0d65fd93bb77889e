"""Prompt pairs refuse what they cannot mean; metrics are what their names say; spans of tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from made_tokenizers import word_level
from reading import Reader
from torch import Tensor
from transformers import AutoTokenizer

from sparse_tl.data.pairs import NO_TOKEN, PromptPairs
from sparse_tl.metrics import (
    Metric,
    divergence,
    explained_effect,
    log_probability,
    logit_difference,
    margin,
    measure,
    probability_difference,
)

WORDS = ["<s>", "the", "cat", "dog", "sat", "ran", "far"]
RECORDS: list[dict[str, Any]] = [
    {"clean": "the cat", "corrupted": "the dog", "answer": "sat", "wrong": ["far", "ran"]},
    {"clean": "the dog sat", "corrupted": "the cat sat", "answer": ["far", "ran"], "wrong": "cat"},
]


def _reader(*, bos: bool = True, tokenizer: Any = None) -> Any:
    """What is asked of a model: its tokenizer, and whether it prepends BOS."""
    if tokenizer is None:
        tokenizer = word_level(*WORDS, bos_token="<s>")
    return Reader(tokenizer, bos=bos)


def _pairs() -> PromptPairs:
    return PromptPairs.from_texts(_reader(), RECORDS)


def test_prompts_are_padded_on_the_right_and_read_at_their_end() -> None:
    pairs = _pairs()
    assert pairs.clean.tolist() == [[0, 1, 2, 0], [0, 1, 3, 4]]
    assert pairs.positions.tolist() == [2, 3]
    assert pairs.answers.tolist() == [[4, NO_TOKEN], [6, 5]]
    logits = torch.randn(2, 4, 7)
    assert torch.equal(pairs.read(logits), torch.stack([logits[0, 2], logits[1, 3]]))
    pieces = pairs.split(1)
    assert [len(piece) for piece in pieces] == [1, 1]
    assert torch.equal(pieces[1].wrong, pairs.wrong[1:])


def test_padding_is_the_tokenizers_padding_token() -> None:
    reader = _reader()
    reader.tokenizer.pad_token = "far"
    pairs = PromptPairs.from_texts(reader, RECORDS)
    assert pairs.clean.tolist() == [[0, 1, 2, 6], [0, 1, 3, 4]]
    assert pairs.corrupted.tolist() == [[0, 1, 3, 6], [0, 1, 2, 4]]


def test_pairs_of_each_length_have_no_padding() -> None:
    pairs = _pairs()
    short, long = pairs.by_length()
    assert (short.clean.tolist(), long.clean.tolist()) == ([[0, 1, 2]], [[0, 1, 3, 4]])
    assert (short.positions.tolist(), short.answers.tolist()) == ([2], [[4, NO_TOKEN]])
    assert long.of_one_length().digest() == long.digest()
    with pytest.raises(ValueError, match=r"of one length.* lengths of \[3, 4\] tokens"):
        pairs.of_one_length()
    spans = pairs.with_spans({"noun": 1}).by_length()[0].spans
    assert spans is not None and spans.at.tolist() == [[1, 0, 1]]


def test_a_model_that_prepends_no_bos_reads_the_texts_alone() -> None:
    pairs = PromptPairs.from_texts(_reader(bos=False), RECORDS)
    assert pairs.clean.tolist() == [[1, 2, 0], [1, 3, 4]]
    assert (pairs.positions.tolist(), pairs.answers[1].tolist()) == ([1, 2], [6, 5])


def test_a_data_frame_and_its_own_records_give_the_same_pairs() -> None:
    reader = _reader(bos=False)
    pairs = PromptPairs.from_texts(reader, RECORDS)
    again = pairs.to_records(reader.tokenizer)
    for rows in (pd.DataFrame(RECORDS), again, tuple(RECORDS)):
        assert PromptPairs.from_texts(reader, rows).digest() == pairs.digest()


def test_wrong_answers_may_be_left_out() -> None:
    rows = [{name: row[name] for name in row if name != "wrong"} for row in RECORDS]
    pairs = PromptPairs.from_texts(_reader(), rows)
    assert pairs.wrong.tolist() == [[NO_TOKEN]] * 2
    assert measure(log_probability, torch.randn(2, 7), pairs).shape == (2,)
    with pytest.raises(ValueError, match="a wrong answer is missing"):
        measure(logit_difference, torch.randn(2, 7), pairs)
    with pytest.raises(ValueError, match="row 0: there is no answer in `answer`"):
        PromptPairs.from_texts(_reader(), [{**rows[0], "answer": " "}])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"clean": "the " * 12 + "cat sat", "corrupted": "the " * 12 + "dog ran sat"},
            r"row 1: .* 15 and 16 tokens, .* \['the', 'the', 'cat', .* / .*'dog', 'ran', 'sat'\]",
        ),
        (
            {"answer": "far", "wrong": "far ran"},
            r"row 1: an answer begins with another one, \[6\], which includes it",
        ),
        ({"answer": ["far", "ran"]}, r"row 1: an answer is a wrong answer too; it has \[6, 5, 5"),
        ({"clean": ""}, "row 1: the clean prompt is empty"),
        ({"answer": math.nan}, "row 1: 'answer': Input should be a text or a list of texts; got n"),
        ({"wrong": ["ran", ""]}, "row 1: there is no answer in `wrong`"),
        ({"wrong": []}, "row 1: give `wrong` here too, as in other rows, or in none"),
    ],
)
def test_texts_that_are_no_pairs(change: dict[str, Any], message: str) -> None:
    same = {"clean": "the cat sat", "corrupted": "the dog sat", "answer": "far", "wrong": "ran"}
    with pytest.raises(ValueError, match=message):
        PromptPairs.from_texts(_reader(), [RECORDS[0], {**same, **change}])


@pytest.mark.parametrize("metric", [log_probability, logit_difference, probability_difference])
def test_an_answer_given_twice_counts_once(metric: Metric) -> None:
    """With and without a space, a text can be the same token."""
    logits = torch.randn(2, 7, dtype=torch.float64)
    twice = [
        {**RECORDS[0], "answer": ["sat", " sat"]},
        {**RECORDS[1], "answer": ["far", "ran", " far"], "wrong": ["cat", " cat"]},
    ]
    assert torch.equal(
        metric(logits, PromptPairs.from_texts(_reader(), twice)), metric(logits, _pairs())
    )


def test_a_word_that_begins_with_its_space(shared_data: Path) -> None:
    """As in GPT-2's vocabulary, where a name without its space is in pieces, or another token."""
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "gpt2")
    reader = _reader(tokenizer=tokenizer)
    row = {"clean": "Then Mary met", "corrupted": "Then John met", "answer": " Joshua"}
    with pytest.warns(UserWarning, match="'Allison' of row 0.*'metAllison'.*write ' Allison'"):
        PromptPairs.from_texts(reader, [{**row, "answer": "Allison"}])
    with pytest.warns(UserWarning, match="'Joshua' of row 0.*'metJoshua'.*write ' Joshua'"):
        PromptPairs.from_texts(reader, [{**row, "answer": "Joshua"}])
    chinese = {"clean": "巴黎是法国的", "corrupted": "法国是巴黎的", "answer": "首都"}
    PromptPairs.from_texts(reader, [chinese])  # no space is missing
    pairs = PromptPairs.from_texts(reader, [row])
    assert pairs.to_records(tokenizer)[0]["clean"] == "<|endoftext|>Then Mary met"
    assert tokenizer.decode(pairs.answers[0]) == " Joshua"


@pytest.mark.parametrize("metric", [logit_difference, log_probability, margin])
def test_a_model_that_predicts_other_tokens_than_it_reads(metric: Metric) -> None:
    """Answers are output tokens: below d_vocab_out all is well, from there on it is refused."""
    pairs = _pairs()
    assert measure(metric, torch.randn(2, 7), pairs).shape == (2,)
    with pytest.raises(ValueError, match="predicts 5 tokens, and the answer 6 is none"):
        measure(metric, torch.randn(2, 5), pairs)


def test_metrics_by_hand() -> None:
    pairs = _pairs()
    logits = torch.tensor([[0.0, 0, 0, 0, 3, 1, 2], [0.0, 0, 5, 0, 0, 4, 2]], dtype=torch.float64)
    assert logit_difference(logits, pairs).tolist() == pytest.approx([3 - 1.5, 3 - 5])
    assert margin(logits, pairs).tolist() == pytest.approx([3 - 2, 3 - 5])
    first = [math.exp(x) for x in (0, 0, 0, 0, 3, 1, 2)]
    share = [x / sum(first) for x in first]
    assert probability_difference(logits, pairs)[0].item() == pytest.approx(
        share[4] - share[5] - share[6]
    )
    assert log_probability(logits, pairs)[0].item() == pytest.approx(math.log(share[4]))
    second = [math.exp(x) for x in (0, 0, 5, 0, 0, 4, 2)]
    both = (second[6] + second[5]) / sum(second)
    assert log_probability(logits, pairs)[1].item() == pytest.approx(math.log(both))
    assert divergence(logits, logits).tolist() == [0, 0]
    uniform = torch.zeros_like(logits)
    expected = sum(p * (math.log(p) + math.log(7)) for p in share)
    assert divergence(uniform, logits)[0].item() == pytest.approx(expected)


def test_metrics_of_half_precision_logits_are_computed_in_single() -> None:
    """Computed in bfloat16, a divergence of 7e-6 nats was 4e-4."""
    pairs, generator = _pairs(), torch.Generator().manual_seed(0)
    logits = (20 * torch.rand(2, 7, generator=generator)).bfloat16()
    moved = (logits * 1.01).bfloat16()
    assert torch.equal(divergence(moved, logits), divergence(moved.float(), logits.float()))
    for metric in (logit_difference, margin):
        assert torch.equal(metric(logits, pairs), metric(logits.float(), pairs))


def test_metrics_that_are_none() -> None:
    pairs, logits = _pairs(), torch.zeros(2, 7)
    bad: list[tuple[Tensor, str]] = [
        (torch.zeros(2, 1), r"shape \(2,\), one value per pair; got \(2, 1\)"),
        (torch.tensor([0.0, math.nan]), "finite metric; pair 1 has nan"),
    ]
    for values, message in bad:
        with pytest.raises(ValueError, match=message):
            measure(lambda logits, pairs, values=values: values, logits, pairs)


def test_explained_effect_averages_before_it_divides() -> None:
    clean, corrupted = torch.tensor([4.0, 2.0]), torch.tensor([0.0, 1.0])
    circuits = torch.tensor([[4.0, 2.0], [0.0, 1.0], [4.0, 1.0]])
    effects = explained_effect(circuits, clean, corrupted)
    assert effects.tolist() == pytest.approx([1.0, 0.0, 4 / 5])
    with pytest.raises(ValueError, match="no effect to explain"):
        explained_effect(circuits, clean, clean.flip(0))


# ---- spans ---------------------------------------------------------------------------------------


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
