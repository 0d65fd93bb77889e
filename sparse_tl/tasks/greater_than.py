"""Greater-Than: ``The war lasted from the year 1732 to the year 17``, answered by 33 to 99.

The corrupted prompt starts in the year 1701, where every ending except 00 and 01 is right. An
answer is one token, so how the tokenizer splits years decides which digits the model has to give:

- *the last two digits*, if a year is split into century and ending (17, 32). As in the paper, every
  ending from 00 to 99 is a right or wrong answer, even if the tokenizer has a single token for the
  full year, as GPT-2's has for 1776.
- *the tens digit*, if every digit is a token. The tens digits above that of the start year are
  right, and those below are wrong. The start year's own tens digit begins both earlier and later
  years, and is neither.
- *the last digit*, if the first three digits are a token (173, 2). The prompt then includes these
  digits of the end year, ``to the year 173``, and the answers are 3 to 9. The corrupted prompt
  starts in 1731.

Reference: Hanna et al., arXiv 2305.00586; nouns and range of years as in EAP-IG's data.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, Le

from sparse_tl.arguments import checked
from sparse_tl.data.pairs import PairTexts
from sparse_tl.data.prompts import Encoder, Tokens, in_tokens
from sparse_tl.metrics import Metric, probability_difference
from sparse_tl.tasks.task import Task, content, is_token, single_words

# The nouns of EAP-IG's prompts (github.com/hannamw/EAP-IG, MIT).
NOUNS = content("greater_than", "nouns")
CENTURIES = tuple(range(11, 18))


class YearForm(NamedTuple):
    """Which digits of the end year prompts give and ask for.

    Args:
        answer: the answer, in words.
        n_given: number of the end year's digits that the prompt gives.
        n_asked: number of digits in the answer.
    """

    answer: str
    n_given: int
    n_asked: int

    @property
    def unit(self) -> int:
        """Number of years that begin with the same answer."""
        return 10 ** (4 - self.n_given - self.n_asked)

    @property
    def endings(self) -> list[str]:
        """All possible answers."""
        return [f"{number:0{self.n_asked}d}" for number in range(10**self.n_asked)]

    @property
    def corrupted(self) -> str:
        """The last digits of corrupted start years."""
        return "1".zfill(4 - self.n_given)

    @property
    def starts(self) -> list[str]:
        """The last digits of clean start years, which have a right and a wrong answer.

        The last year of a tens digit is left out: no later year begins with that digit, so the
        digit would be a wrong answer.
        """
        n_left = 4 - self.n_given
        years = range(2, 10**n_left - 1)
        some = [f"{year:0{n_left}d}" for year in years if self.unit == 1 or (year + 1) % self.unit]
        return [start for start in some if all(self.judged(start))]

    def judged(self, start: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Right answers, all of whose years are later, and wrong ones, none of whose years is."""
        years = {end: int(end) * self.unit for end in self.endings}
        return (
            tuple(end for end, first in years.items() if first > int(start)),
            tuple(end for end, first in years.items() if first + self.unit - 1 <= int(start)),
        )


PAIRS = YearForm("the last two digits", 2, 2)
FORMS = (PAIRS, YearForm("the tens digit", 2, 1), YearForm("the last digit", 3, 1))
"""Forms in order of preference; a task uses the first one that the tokenizer allows."""


@checked
@dataclass(frozen=True, kw_only=True)
class GreaterThanTask(Task):
    """Complete end years that are later than start years.

    Args:
        nouns: events that last, such as wars.
        centuries: first two digits of the years.
    """

    name: str = "greater_than"
    title: str = "Greater Than"
    metric: Metric = field(default=probability_difference, repr=False)
    nouns: tuple[str, ...] = field(default=NOUNS, repr=False)
    centuries: tuple[Annotated[int, Ge(10), Le(99)], ...] = CENTURIES

    def words(self, tokenizer: Any) -> dict[str, list[str]]:
        """The nouns that are single tokens."""
        return {"nouns": single_words(tokenizer, self.nouns, 1, "nouns")}

    def describe(self, tokenizer: Any) -> str:
        """The answer in words, and how many nouns are left out under this tokenizer."""
        asked = f"the answer is {self.form_and_years(tokenizer)[0].answer} of the year"
        return ", ".join(filter(None, [asked, super().describe(tokenizer)]))

    def drawing(self, tokenizer: Any, rng: random.Random) -> Callable[[], PairTexts]:
        """A function that draws a prompt, with right and wrong answers from `YearForm.judged`."""
        nouns = self.words(tokenizer)["nouns"]
        form, years = self.form_and_years(tokenizer)
        judged = {start: form.judged(start) for start in form.starts}

        def draw() -> PairTexts:
            noun, (given, start) = rng.choice(nouns), rng.choice(years)
            return PairTexts(
                f"The {noun} lasted from the year {given}{start} to the year {given}",
                f"The {noun} lasted from the year {given}{form.corrupted} to the year {given}",
                *judged[start],
                joined=form is not PAIRS,
            )

        return draw

    def form_and_years(self, tokenizer: Any) -> tuple[YearForm, list[tuple[str, str]]]:
        """Their form; and start years, split into the digits that the end year shares and the rest.

        Years near the ends are left out, and so are those that the corruption would not change, or
        that would leave no answer.

        Raises:
            ValueError: the tokenizer splits years in none of the supported ways.
        """
        encode = Encoder(tokenizer)
        for form in FORMS:
            if years := self._years(encode, form):
                return form, years
        read = in_tokens(tokenizer, encode("year 1732")[len(encode("year")) :])
        raise ValueError(
            f"the tokenizer splits no year of the centuries {list(self.centuries)} into two tokens "
            "such as 17 and 32, with a token for each of 00 to 99, nor digit by digit, nor into "
            f"173 and 2; it reads 1732 as {read}. Give other `centuries`, or use a tokenizer that "
            "reads digits in pairs, one by one, or in threes."
        )

    def _years(self, encode: Encoder, form: YearForm) -> list[tuple[str, str]]:
        """The start years that a tokenizer splits so that their next token is of this form."""
        years = []
        n_decades = 10 ** (form.n_given - 2)
        firsts = (c * n_decades + decade for c in self.centuries for decade in range(n_decades))
        starts = (form.corrupted, *form.starts)
        for given in map(str, firsts):
            before = encode(f"year {given}")
            if form is PAIRS and len(before) != len(encode("year")) + 1:
                continue
            answers = _answers(encode, form, given)
            if answers is None:
                continue
            split = [
                rest
                for rest in starts
                if encode(f"year {given}{rest}")[: len(before) + 1]
                == before + answers[rest[: form.n_asked]]
            ]
            if form.corrupted in split:
                years += [(given, rest) for rest in split if rest != form.corrupted]
        return years


def _answers(encode: Encoder, form: YearForm, given: str) -> dict[str, Tokens] | None:
    """The token of every possible answer; ``None`` if one is not a single token."""
    before = () if form is PAIRS else encode(f"year {given}")
    by_ending = {}
    for end in form.endings:
        tokens = encode(end if form is PAIRS else f"year {given}{end}")
        if tokens[: len(before)] != before or not is_token(
            encode.tokenizer, tokens[len(before) :], end
        ):
            return None
        by_ending[end] = tokens[len(before) :]
    return by_ending
