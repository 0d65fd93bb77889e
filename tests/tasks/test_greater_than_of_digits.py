"""Greater-Than under tokenizers that read digits in pairs, one by one, or in threes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from made_tokenizers import byte_level, sentencepiece
from reading import Reader, check_pairs

from sparse_tl.tasks import GreaterThanTask

FRAME = ("The", " war", " trip", " lasted", " from", " the", " year", " to")
PAIRS = [f"{number:02d}" for number in range(100)]
NOUNS = ("war", "trip")

TOKENIZERS = {
    # " 17", "32", as GPT-2 reads most years
    "pairs": lambda: byte_level(*FRAME, *(f" {year}" for year in range(11, 18)), *PAIRS),
    # " ", "1", "7", "3", "2", as SmolLM2, Qwen, Gemma
    "digits": lambda: byte_level(*FRAME, digits=r"\d"),
    # "\u2581", "1", "7", "3", "2", as Llama 2 and Mistral
    "sentencepiece": lambda: sentencepiece(*FRAME, "The", " The"),
    # " ", "173", "2", as Llama 3
    "threes": lambda: byte_level(
        *FRAME, *PAIRS, *(f"{n:03d}" for n in range(1000)), digits=r"\d{1,3}"
    ),
}
FORMS = {
    "pairs": (2, 2, "last two digits"),
    "digits": (2, 1, "tens digit"),
    "sentencepiece": (2, 1, "tens digit"),
    "threes": (3, 1, "last digit"),
}


def _records(kind: str, n: int = 60) -> list[dict[str, Any]]:
    tokenizer = TOKENIZERS[kind]()
    pairs = GreaterThanTask(nouns=NOUNS).pairs(Reader(tokenizer), n, seed=1)
    assert f"the answer is the {FORMS[kind][2]} of the year" in repr(pairs)
    assert len(set(pairs.positions.tolist())) == 1
    return check_pairs(pairs, tokenizer, n)


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_answers_are_those_after_which_every_year_is_later(kind: str) -> None:
    given, asked, _ = FORMS[kind]
    starts = set()
    for record in _records(kind):
        said = r" ?The (war|trip) lasted from the year (\d{4}) to the year (\d+)"
        noun, start, prefix = re.fullmatch(said, record["clean"]).groups()  # type: ignore[union-attr]
        assert prefix == start[:given]
        lowest = prefix + "1".zfill(4 - given)
        corrupted = f"The {noun} lasted from the year {lowest} to the year {prefix}"
        assert record["corrupted"].strip() == corrupted
        later, not_later, both = set(), set(), set()
        for number in range(10**asked):
            answer = str(number).zfill(asked)
            ends = [y for y in range(1000, 2000) if str(y).startswith(prefix + answer)]
            after = {end > int(start) for end in ends}
            (both if len(after) == 2 else later if after.pop() else not_later).add(answer)
        assert {*record["answer"]} == later
        assert {*record["wrong"]} == not_later
        assert both == ({start[2]} if asked + given < 4 else set())
        starts.add(start)
    assert len(starts) > 40


def test_years_by_hand() -> None:
    task = GreaterThanTask(centuries=(17,))
    tens = [f"{tens}{unit}" for tens in range(1, 9) for unit in range(9)]
    assert task.form_and_years(TOKENIZERS["digits"]())[1] == [("17", rest) for rest in tens]
    last = [(f"17{tens}", f"{unit}") for tens in range(10) for unit in range(2, 9)]
    assert task.form_and_years(TOKENIZERS["threes"]())[1] == last
    both = [("17", f"{rest:02d}") for rest in range(2, 99)]
    assert task.form_and_years(TOKENIZERS["pairs"]())[1] == both


def test_a_tokenizer_that_splits_years_otherwise_is_refused_in_one_sentence() -> None:
    whole = byte_level(*FRAME, *(f" {year}" for year in range(1000, 2000)), *PAIRS)
    with pytest.raises(ValueError, match=r"splits no year .* it reads 1732 as \[' 1732'"):
        GreaterThanTask(nouns=NOUNS).pairs(Reader(whole), 1)
    threes = r"\d{1,3}(?=(?:\d{3})*(?!\d))"  # counted from behind: 1, 732
    from_behind = byte_level(*FRAME, *(f"{n:03d}" for n in range(1000)), digits=threes)
    with pytest.raises(ValueError, match=r"splits no year .* it reads 1732 as \[' ', '1', '732'\]"):
        GreaterThanTask(nouns=NOUNS).pairs(Reader(from_behind), 1)
