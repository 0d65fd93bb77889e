"""Agreement in number: of a verb with its subject, and of a reflexive pronoun with its antecedent.

*Subject-verb agreement*: ``The teachers near the museum`` is continued by *are*, *were* or *have*,
and not by *is*, *was* or *has*. The noun in between is randomly singular or plural.
*Anaphor agreement*: ``The sisters near the boy praised`` is continued by *themselves*, and not by
*herself*. In both, the corrupted prompt has the subject in the other number, and nothing else
differs: its determiner and the verbs of anaphor agreement are the same in both numbers.

Reference: the paradigms regular_plural_subject_verb_agreement and anaphor_number_agreement of BLiMP
(Warstadt et al., arXiv 1912.00582), whose vocabulary most nouns and verbs are from; its sentences
are not used.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sparse_tl.calls.arguments import checked
from sparse_tl.data.pairs import PairTexts
from sparse_tl.metrics import Metric, logit_difference
from sparse_tl.tasks.words import WordTask, content, single_rows

# Words of BLiMP (github.com/alexwarstadt/blimp, CC BY 4.0, (c) Alex Warstadt et al.), and more.
NOUNS: tuple[tuple[str, str], ...] = content("subject_verb", "nouns")
VERBS: tuple[tuple[str, str], ...] = content("subject_verb", "verbs")
PEOPLE: tuple[tuple[str, str, str], ...] = content("anaphor", "people")
ACTIONS: tuple[str, ...] = content("anaphor", "actions")
PLURAL = "themselves"


@checked
@dataclass(frozen=True, kw_only=True)
class SubjectVerbTask(WordTask):
    """Continue a subject with a verb that agrees in number.

    Args:
        templates: templates with [NOUN], the subject, once, and [OTHER], another noun, at most
            once.
        nouns: nouns, each singular and plural; at least two.
        verbs: verbs, each singular and plural.

    Raises:
        ValueError: there is no template, or one has another form.
    """

    name: str = "subject_verb"
    title: str = "Subject-Verb Agreement"
    metric: Metric = field(default=logit_difference, repr=False)
    templates: tuple[str, ...] = field(default=content("subject_verb", "templates"), repr=False)
    nouns: tuple[tuple[str, str], ...] = field(default=NOUNS, repr=False)
    verbs: tuple[tuple[str, str], ...] = field(default=VERBS, repr=False)

    def __post_init__(self) -> None:
        _check_templates(self.templates, [["NOUN"], ["NOUN", "OTHER"]])

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

        def draw() -> PairTexts:
            number = rng.randrange(2)
            noun, other = rng.sample(nouns, 2)
            template = rng.choice(self.templates).replace("[OTHER]", other[rng.randrange(2)])
            return PairTexts(
                template.replace("[NOUN]", noun[number]),
                template.replace("[NOUN]", noun[1 - number]),
                answers=tuple(f" {verb[number]}" for verb in verbs),
                wrong=tuple(f" {verb[1 - number]}" for verb in verbs),
            )

        return draw


@checked
@dataclass(frozen=True, kw_only=True)
class AnaphorTask(WordTask):
    """Refer back to a subject with a reflexive pronoun that agrees in number.

    Args:
        templates: templates with [NOUN], the subject, and [VERB] once each, and [OTHER], another
            noun, at most once.
        people: nouns, each singular and plural, with the singular's pronoun; at least two.
        actions: verbs with the same form in both numbers, such as past forms.

    Raises:
        ValueError: there is no template or verb, or a template has another form.
    """

    name: str = "anaphor"
    title: str = "Anaphor Agreement"
    metric: Metric = field(default=logit_difference, repr=False)
    templates: tuple[str, ...] = field(default=content("anaphor", "templates"), repr=False)
    people: tuple[tuple[str, str, str], ...] = field(default=PEOPLE, repr=False)
    actions: tuple[str, ...] = field(default=ACTIONS, repr=False)

    def __post_init__(self) -> None:
        _check_templates(self.templates, [["NOUN", "VERB"], ["NOUN", "OTHER", "VERB"]])
        if not self.actions:
            raise ValueError("expected at least one verb as actions; got none")

    def words(self, tokenizer: Any) -> dict[str, list[tuple[str, ...]]]:
        """The nouns whose singular, plural and pronoun are single tokens."""
        single_rows(tokenizer, [(PLURAL,)], 1, "plural pronouns")
        return {"people": single_rows(tokenizer, self.people, 2, "people")}

    def drawing(self, tokenizer: Any, rng: random.Random) -> Callable[[], PairTexts]:
        """A function that draws a prompt; the answer is the pronoun in the subject's number.

        The wrong answer is the pronoun in the other number.
        """
        people = self.words(tokenizer)["people"]

        def draw() -> PairTexts:
            number = rng.randrange(2)
            (*noun, pronoun), other = rng.sample(people, 2)
            pronouns = pronoun, PLURAL
            template = rng.choice(self.templates).replace("[OTHER]", other[rng.randrange(2)])
            template = template.replace("[VERB]", rng.choice(self.actions))
            return PairTexts(
                template.replace("[NOUN]", noun[number]),
                template.replace("[NOUN]", noun[1 - number]),
                answers=(f" {pronouns[number]}",),
                wrong=(f" {pronouns[1 - number]}",),
            )

        return draw


def _check_templates(templates: tuple[str, ...], allowed: list[list[str]]) -> None:
    if not templates:
        raise ValueError("expected at least one template; got none")
    for template in templates:
        if sorted(re.findall(r"\[([A-Z]+)\]", template)) not in allowed:
            forms = " or ".join(", ".join(f"[{slot}]" for slot in slots) for slots in allowed)
            raise ValueError(f"expected templates with {forms}, once each; got {template!r}")
