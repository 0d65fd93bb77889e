"""Tasks whose prompts are templates with words: agreement, capitals and completions.

*Subject-verb agreement*: ``The teachers near the museum`` is continued by *are*, *were* or *have*,
and not by *is*, *was* or *has*. The noun in between is randomly singular or plural.
*Anaphor agreement*: ``The sisters near the boy praised`` is continued by *themselves*, and not by
*herself*. In both, the corrupted prompt has the subject in the other number, and nothing else
differs: its determiner and the verbs of anaphor agreement are the same in both numbers.

*Capitals*: ``The capital of France is``, answered by *Paris*. The corrupted prompt names another
country of equal token length, whose capital is the wrong answer.

*Completions*: ``The opposite of hot is`` is continued by *cold*, and not by *hot* or *up*. A
completion has no corrupted counterpart; both prompts of its pairs are the same. With agreement in
templates that the tasks do not use, they make up `BATTERY`: skills that no task asks for, which
post-training may lose without a trace.

Reference: the paradigms regular_plural_subject_verb_agreement and anaphor_number_agreement of BLiMP
(Warstadt et al., arXiv 1912.00582), whose vocabulary most nouns and verbs are from; its sentences
are not used.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, product
from typing import Any

from sparse_tl.arguments import checked
from sparse_tl.data.pairs import PairTexts, tokens_of_pairs
from sparse_tl.data.prompts import Encoder
from sparse_tl.tasks.task import (
    Task,
    check_templates,
    content,
    enough,
    single_rows,
    single_words,
)

# Words of BLiMP (github.com/alexwarstadt/blimp, CC BY 4.0, (c) Alex Warstadt et al.), and more.
NOUNS: tuple[tuple[str, str], ...] = content("subject_verb", "nouns")
VERBS: tuple[tuple[str, str], ...] = content("subject_verb", "verbs")
PEOPLE: tuple[tuple[str, str, str], ...] = content("anaphor", "people")
ACTIONS: tuple[str, ...] = content("anaphor", "actions")
PLURAL = "themselves"
COUNTRIES: tuple[tuple[str, str], ...] = content("capitals", "countries")


@checked
@dataclass(frozen=True, kw_only=True)
class SubjectVerbTask(Task):
    """Continue a subject with a verb that agrees in number.

    Args:
        templates: templates with [NOUN], the subject, once, and [OTHER], another noun, at most
            once.
        nouns: nouns, each singular and plural; at least two.
        verbs: verbs, each singular and plural.

    Raises:
        ValueError: a template has another form.
    """

    name: str = "subject_verb"
    title: str = "Subject-Verb Agreement"
    templates: tuple[str, ...] = field(default=content("subject_verb", "templates"), repr=False)
    nouns: tuple[tuple[str, str], ...] = field(default=NOUNS, repr=False)
    verbs: tuple[tuple[str, str], ...] = field(default=VERBS, repr=False)

    def __post_init__(self) -> None:
        check_templates(self.templates, "NOUN", "NOUN OTHER")

    def words(self, tokenizer: Any) -> dict[str, list[tuple[str, ...]]]:
        """The nouns and verbs whose singular and plural are single tokens."""
        return {
            "nouns": single_rows(tokenizer, self.nouns, 2, "nouns"),
            "verbs": single_rows(tokenizer, self.verbs, 1, "verbs"),
        }

    def drawing(self, tokenizer: Any, rng: random.Random) -> Callable[[], PairTexts]:
        """A function that draws a prompt; answers are the verbs in the subject's number.

        Wrong answers are those in the other number.
        """
        nouns, verbs = self.words(tokenizer).values()
        singular, plural = (tuple(f" {verb}" for verb in side) for side in zip(*verbs, strict=True))
        return lambda: _agreement(rng, self.templates, nouns, lambda noun: (singular, plural))


@checked
@dataclass(frozen=True, kw_only=True)
class AnaphorTask(Task):
    """Refer back to a subject with a reflexive pronoun that agrees in number.

    Args:
        templates: templates with [NOUN], the subject, and [VERB] once each, and [OTHER], another
            noun, at most once.
        people: nouns, each singular and plural, with the singular's pronoun; at least two.
        actions: verbs with the same form in both numbers, such as past forms.

    Raises:
        ValueError: a template has another form.
    """

    name: str = "anaphor"
    title: str = "Anaphor Agreement"
    templates: tuple[str, ...] = field(default=content("anaphor", "templates"), repr=False)
    people: tuple[tuple[str, str, str], ...] = field(default=PEOPLE, repr=False)
    actions: tuple[str, ...] = field(default=ACTIONS, repr=False)

    def __post_init__(self) -> None:
        check_templates(self.templates, "NOUN VERB", "NOUN OTHER VERB")
        if not self.actions:
            raise ValueError("the anaphor task needs at least one verb as actions")

    def words(self, tokenizer: Any) -> dict[str, list[tuple[str, ...]]]:
        """The nouns whose singular, plural and pronoun are single tokens."""
        single_rows(tokenizer, [(PLURAL,)], 1, "plural pronouns")
        return {"people": single_rows(tokenizer, self.people, 2, "people")}

    def drawing(self, tokenizer: Any, rng: random.Random) -> Callable[[], PairTexts]:
        """A function that draws a prompt; the answer is the pronoun in the subject's number.

        The wrong answer is the pronoun in the other number.
        """
        people = self.words(tokenizer)["people"]

        def pronouns(noun: tuple[str, ...]) -> tuple[tuple[str], tuple[str]]:
            return (f" {noun[2]}",), (f" {PLURAL}",)

        return lambda: _agreement(rng, self.templates, people, pronouns, self.actions)


def _agreement(
    rng: random.Random,
    templates: Sequence[str],
    nouns: Sequence[tuple[str, ...]],
    answers: Callable[[tuple[str, ...]], tuple[tuple[str, ...], tuple[str, ...]]],
    actions: Sequence[str] = (),
) -> PairTexts:
    """A prompt whose subject has the other number in the corrupted one.

    `answers` are those after a noun in the singular, and in the plural.
    """
    number = rng.randrange(2)
    noun, other = rng.sample(nouns, 2)
    template = rng.choice(templates).replace("[OTHER]", other[rng.randrange(2)])
    if actions:
        template = template.replace("[VERB]", rng.choice(actions))
    return PairTexts(
        template.replace("[NOUN]", noun[number]),
        template.replace("[NOUN]", noun[1 - number]),
        answers=answers(noun)[number],
        wrong=answers(noun)[1 - number],
    )


@checked
@dataclass(frozen=True, kw_only=True)
class CapitalsTask(Task):
    """Name the capital of a country.

    Args:
        templates: templates with [COUNTRY] once.
        countries: countries, each with its capital; at least two.

    Raises:
        ValueError: a template has another form.
    """

    name: str = "capitals"
    title: str = "Capitals"
    templates: tuple[str, ...] = field(default=content("capitals", "templates"), repr=False)
    countries: tuple[tuple[str, str], ...] = field(default=COUNTRIES, repr=False)

    def __post_init__(self) -> None:
        check_templates(self.templates, "COUNTRY")

    def words(self, tokenizer: Any) -> dict[str, list[tuple[str, str]]]:
        """The countries whose capital is a single token, if another has as many tokens."""
        encode = Encoder(tokenizer)
        rows = tuple(dict.fromkeys(self.countries))
        known = set(single_words(tokenizer, (capital for _, capital in rows), 0, "capitals"))
        usable = [row for row in rows if row[1] in known]
        lengths = Counter(_length(encode, country) for country, _ in usable)
        usable = [row for row in usable if lengths[_length(encode, row[0])] > 1]
        return {"countries": enough(usable, rows, 2, "countries")}

    def drawing(self, tokenizer: Any, rng: random.Random) -> Callable[[], PairTexts]:
        """A function that draws a prompt; the answer is the country's capital.

        The wrong answer is that of the other country.
        """
        countries, encode = self.words(tokenizer)["countries"], Encoder(tokenizer)
        by_length = defaultdict[int, list[tuple[str, str]]](list)
        for row in countries:
            by_length[_length(encode, row[0])].append(row)

        def draw() -> PairTexts:
            template, row = rng.choice(self.templates), rng.choice(countries)
            candidates = by_length[_length(encode, row[0])]
            other = rng.choice([candidate for candidate in candidates if candidate != row])
            prompts = (template.replace("[COUNTRY]", country) for country, _ in (row, other))
            return PairTexts(*prompts, answers=(f" {row[1]}",), wrong=(f" {other[1]}",))

        return draw


def _length(encode: Encoder, country: str) -> int:
    """Number of tokens up to and including a country."""
    return len(encode(f"to {country}"))


@checked
@dataclass(frozen=True, kw_only=True)
class CompletionTask(Task):
    """Complete a text with a right word rather than a wrong one.

    Args:
        templates: texts with ``{}`` where a row's own texts go.
        rows: texts for a template, then the right words and the wrong ones, as in
            ``("hot", "cold", "hot|up")``.
        gap: text between prompt and word.
    """

    templates: Sequence[str] = field(repr=False)
    rows: Sequence[Sequence[str]] = field(repr=False)
    gap: str = " "

    @property
    def prompts(self) -> list[PairTexts]:
        """The prompts of all templates, with their answers."""
        made = []
        for template, (*texts, right, wrong) in product(self.templates, self.rows):
            text = template.format(*texts)
            answers, others = (
                tuple(f"{self.gap}{word}" for word in words.split("|")) for words in (right, wrong)
            )
            made.append(PairTexts(text, text, answers, others))
        return made

    def words(self, tokenizer: Any) -> dict[str, list[PairTexts]]:
        """The prompts whose answers are all single tokens."""
        usable = []
        for prompt in self.prompts:
            with suppress(ValueError):
                ((_, _, *sides),) = tokens_of_pairs(tokenizer, [prompt], ())
                if all(len(answer) == 1 for side in sides for answer in side):
                    usable.append(prompt)
        if not usable:
            raise ValueError(
                f"no prompt of {self.name} has answers that are single tokens under this tokenizer"
            )
        return {"prompts": usable}

    def drawing(self, tokenizer: Any, rng: random.Random) -> Callable[[], PairTexts]:
        """A function that draws a prompt; none is drawn again before all others."""
        prompts = self.words(tokenizer)["prompts"]
        return cycle(rng.sample(prompts, len(prompts))).__next__


_KINDS = {"verbs": SubjectVerbTask, "anaphors": AnaphorTask, "completions": CompletionTask}
BATTERY: tuple[Task, ...] = tuple(
    kind(**family | {"templates": tuple(family["templates"])})
    for key, kind in _KINDS.items()
    for family in content("battery", key)
)
"""The families of prompts that `compare_skills` measures."""
