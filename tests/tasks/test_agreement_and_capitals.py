"""Agreement of subjects with verbs and pronouns, and capitals: which answers are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from made_tokenizers import byte_level
from reading import Reader, check_pairs
from transformers import PreTrainedTokenizerFast

from sparse_tl.tasks import AnaphorTask, CapitalsTask, SubjectVerbTask, Task
from sparse_tl.tasks.templates import ACTIONS, COUNTRIES, NOUNS, PEOPLE

FRAME = "The near behind next to the in front of across from Yesterday end In is are was were has"
FRAME += " have himself herself themselves capital city called As everybody knows, She lives After"
FRAME += " a week they returned its Our flight landed"
PLURALS = {"children", "ladies", "men", "women", "gentlemen", "wives"}
FEMALE = {"actress", "aunt", "daughter", "girl", "lady", "mother", "princess", "queen", "sister"}
FEMALE |= {"waitress", "wife", "woman"}
CAPITALS = {
    **{"France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid"},
    **{"Japan": "Tokyo", "China": "Beijing", "Russia": "Moscow", "Egypt": "Cairo"},
    **{"Greece": "Athens", "Austria": "Vienna", "Poland": "Warsaw", "Norway": "Oslo"},
    **{"Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Peru": "Lima"},
    **{"Ireland": "Dublin", "Portugal": "Lisbon", "Hungary": "Budapest", "Cuba": "Havana"},
    **{"Canada": "Ottawa", "Australia": "Canberra", "Kenya": "Nairobi", "Iraq": "Baghdad"},
    **{"Iran": "Tehran", "Turkey": "Ankara", "Thailand": "Bangkok", "Ukraine": "Kyiv"},
    **{"Belgium": "Brussels", "Switzerland": "Bern", "Vietnam": "Hanoi", "Chile": "Santiago"},
}
TASKS = [SubjectVerbTask(), AnaphorTask(), CapitalsTask()]


def _words() -> Any:
    rows = [*NOUNS, *PEOPLE, *COUNTRIES]
    several = {"snakes", "senators", "princesses", "Kabul"}
    found = {*FRAME.split(), *ACTIONS, *(word for row in rows for word in row)} - several
    return byte_level(*(f" {word}" for word in sorted(found)))


@pytest.fixture(scope="module", params=["made", "gpt2", "olmo"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "made":
        return _words()
    shared: Path = request.getfixturevalue("shared_data")
    path = shared / "tokenizers" / request.param / "tokenizer.json"
    return PreTrainedTokenizerFast(tokenizer_file=str(path))


def is_plural(noun: str) -> bool:
    return noun in PLURALS or (noun.endswith("s") and not noun.endswith("ss"))


@pytest.mark.every_case
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_prompts_differ_in_one_word_and_answers_are_one_token(task: Task, tokenizer: Any) -> None:
    for record in check_pairs(task.pairs(Reader(tokenizer), 60, seed=2), tokenizer, 60):
        words = [re.findall(r"\w+", record[side]) for side in ("clean", "corrupted")]
        assert sum(one != other for one, other in zip(*words, strict=True)) == 1


@pytest.mark.every_case
def test_a_verb_agrees_with_the_subject_and_not_with_what_is_between(tokenizer: Any) -> None:
    kinds = set()
    for record in SubjectVerbTask().pairs(Reader(tokenizer), 60).to_records(tokenizer):
        subject, *_, other = re.findall(r"\w+", record["clean"])[1:]
        verbs = [" are", " were", " have"], [" is", " was", " has"]
        right, wrong = verbs if is_plural(subject) else verbs[::-1]
        assert (record["answer"], record["wrong"]) == (right, wrong)
        other_subject = re.findall(r"\w+", record["corrupted"])[1]
        assert is_plural(other_subject) != is_plural(subject)
        kinds.add((is_plural(subject), is_plural(other)))
    assert len(kinds) == 4  # in every combination


@pytest.mark.every_case
def test_a_pronoun_agrees_with_the_subject(tokenizer: Any) -> None:
    seen = set()
    for record in AnaphorTask().pairs(Reader(tokenizer), 60).to_records(tokenizer):
        nouns = [
            re.search(r"[Tt]he (?!end\b)(\w+)", record[side]) for side in ("clean", "corrupted")
        ]
        clean, corrupted = (found[1] for found in nouns if found)
        (single,) = {clean, corrupted} - {noun for noun in (clean, corrupted) if is_plural(noun)}
        one = " herself" if single in FEMALE else " himself"
        right, wrong = (" themselves", one) if is_plural(clean) else (one, " themselves")
        assert (record["answer"], record["wrong"]) == ([right], [wrong])
        seen.add(right)
    assert seen == {" herself", " himself", " themselves"}


@pytest.mark.every_case
def test_capitals_are_those_of_the_countries(tokenizer: Any) -> None:
    known = 0
    for record in CapitalsTask().pairs(Reader(tokenizer), 60).to_records(tokenizer):
        for side, said in (("clean", "answer"), ("corrupted", "wrong")):
            (country,) = {
                country for country, _ in COUNTRIES if re.search(rf"\b{country}\b", record[side])
            }
            (capital,) = record[said]
            assert (country, capital.strip()) in COUNTRIES
            if country in CAPITALS:
                assert capital == f" {CAPITALS[country]}"
                known += 1
    assert known > 30


def test_the_list_of_capitals() -> None:
    listed = dict(COUNTRIES)
    assert len(listed) == len(COUNTRIES) == len({*listed.values()})
    assert {country: listed[country] for country in CAPITALS} == CAPITALS


def test_the_words_are_of_the_right_number_and_sex() -> None:
    for single, plural, *_ in (*NOUNS, *PEOPLE):
        assert is_plural(plural) and not is_plural(single)
    for single, _, pronoun in PEOPLE:
        assert pronoun == ("herself" if single in FEMALE else "himself")


def test_words_that_are_several_tokens_are_left_out_with_their_number() -> None:
    reader = Reader(_words())
    assert repr(SubjectVerbTask().pairs(reader, 2)).endswith("2 of 58 nouns left out)")
    assert repr(AnaphorTask().pairs(reader, 2)).endswith("1 of 26 people left out)")
    assert "1 of 109 countries left out" in repr(CapitalsTask().pairs(reader, 2))


def test_countries_of_a_length_of_their_own_are_left_out() -> None:
    tokenizer = byte_level(" The", " France", " Italy", " Paris", " Rome", " Lima", " to", " of")
    rows = (("France", "Paris"), ("Italy", "Rome"), ("Peru", "Lima"), ("Spain", "Madrid"))
    task = CapitalsTask(templates=("The city of [COUNTRY]:",), countries=rows)
    assert task.words(tokenizer) == {"countries": [("France", "Paris"), ("Italy", "Rome")]}
    assert "2 of 4 countries left out" in task.describe(tokenizer)
