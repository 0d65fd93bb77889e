"""Question sets become prompts with the published answers as targets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sparse_tl.backend import Model
from sparse_tl.tasks.questions import (
    COMMON_SENSE,
    MATHEMATICS,
    SYNTAX,
    QuestionSet,
    common_sense_questions,
    mathematics_questions,
    read_rows,
    syntax_questions,
)


@pytest.fixture(scope="module")
def gpt2(shared_data: Path, build_tiny: Callable[..., Model]) -> Callable[..., Model]:
    """A tiny model with the tokenizer of GPT-2 and a context of some length."""
    tokenizer = AutoTokenizer.from_pretrained(str(shared_data / "tokenizers" / "gpt2"))

    def build(context: int = 1024) -> Model:
        return build_tiny(d_vocab=len(tokenizer), n_ctx=context, tokenizer=tokenizer)

    return build


def test_minimal_pairs() -> None:
    pair = {"sentence_good": "The cats on the mat sleep.", "sentence_bad": "The cats on it sleep."}
    named = {
        **pair,
        "one_prefix_method": True,
        "one_prefix_prefix": "Susan revealed",
        "one_prefix_word_good": "herself",
    }
    first_differs = {"sentence_good": "These cats", "sentence_bad": "This cats"}
    of_the_hub = {**pair, "one_prefix_method": True, "two_prefix_method": False, "pair_id": 0}
    assert syntax_questions([pair, named, first_differs, of_the_hub]) == [
        ("The cats on", " the mat sleep."),
        ("Susan revealed", " herself"),
        ("The cats on", " the mat sleep."),
    ]


@pytest.mark.parametrize(
    "shape",
    [
        lambda texts, answer: {"choices": texts, "answer": answer},
        lambda texts, answer: {
            "choices": {"label": list("AB"), "text": texts},
            "answerKey": answer,
        },
    ],
)
def test_lettered_choices_stand_behind_an_example(shape: Any) -> None:
    rows = [
        {"question": "Where is a cow?", **shape(["field", "sea"], "A")},
        {"question": "Where is a fish?", **shape(["field", "sea"], "B")},
    ]
    assert common_sense_questions(rows) == [
        (
            "Question: Where is a cow?\nA. field\nB. sea\nAnswer: A\n\n"
            "Question: Where is a fish?\nA. field\nB. sea\nAnswer:",
            " B",
        )
    ]


def test_worked_solutions_lose_the_calculators_notes() -> None:
    rows = [
        {"question": "1 + 1?", "answer": "It is 1+1=<<1+1=2>>2.\n#### 2"},
        {"question": "2 + 2?", "answer": "2+2=<<2+2=4>>4\n#### 4"},
    ]
    assert mathematics_questions(rows) == [
        (
            "Question: 1 + 1?\nAnswer: It is 1+1=2.\n#### 2\n\nQuestion: 2 + 2?\nAnswer:",
            " 2+2=4\n#### 4",
        )
    ]


@pytest.mark.parametrize(
    ("asked", "source", "target"),
    [
        (SYNTAX, "blimp", " herself"),
        (SYNTAX, "blimp/anaphor_number_agreement.jsonl", " herself"),
        (COMMON_SENSE, "commonsenseqa/validation.jsonl", " A"),
        (MATHEMATICS, "gsm8k/test.jsonl", " It takes 2/2=1 bolt of white fiber"),
    ],
)
def test_the_published_files(
    gpt2: Callable[..., Model], shared_data: Path, asked: QuestionSet, source: str, target: str
) -> None:
    model = gpt2()
    found = asked.load(model, 20, source=shared_data / "prompts" / source)
    assert len(found) == 20
    assert (found.rows.tokens[:, 0] == model.tokenizer.bos_token_id).all(), "as the model begins"
    assert found.to_records(model.tokenizer)[0]["target"].startswith(target)


def test_files_of_a_folder_take_turns(shared_data: Path) -> None:
    rows = read_rows(shared_data / "prompts" / "blimp", limit=3)
    assert [row["UID"] for row in rows] == [
        "anaphor_number_agreement",
        "determiner_noun_agreement_1",
        "regular_plural_subject_verb_agreement_1",
    ]


def test_long_questions_are_left_out(gpt2: Callable[..., Model], shared_data: Path) -> None:
    file = shared_data / "prompts" / "gsm8k" / "test.jsonl"
    found = MATHEMATICS.load(gpt2(240), 50, source=file)
    assert found.rows.tokens.shape[1] <= 240
    with pytest.raises(ValueError, match="at most 10 tokens"):
        MATHEMATICS.load(gpt2(10), 50, source=file)
