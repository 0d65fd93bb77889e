"""Greater-Than: ``The war lasted from the year 1732 to the year 17``, answered by 33 to 99.

The corrupted prompt starts in the year 1701, where every ending except 00 and 01 is right. Only
years that the tokenizer splits into century and year are used, since the answer is the second half.
As in the paper, every ending from 00 to 99 is a right or wrong answer, even if the tokenizer has a
single token for the whole year, as GPT-2's has for 1776.

Reference: Hanna et al., arXiv 2305.00586; nouns and range of years as in EAP-IG's data.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sparse_tl.arguments import checked
from sparse_tl.data.prompts import Encoder
from sparse_tl.data.records import PairTexts
from sparse_tl.metrics import Metric, probability_difference
from sparse_tl.tasks.words import WordTask, content, is_token, single_words

# The nouns of EAP-IG's prompts (github.com/hannamw/EAP-IG, MIT).
NOUNS = content("greater_than", "nouns")
CENTURIES = tuple(range(11, 18))
ENDS = tuple(f"{year:02d}" for year in range(100))
CORRUPTED = "01"


@checked
@dataclass(frozen=True, kw_only=True)
class GreaterThanTask(WordTask):
    """Complete end years that are later than start years.

    Args:
        nouns: events that last, such as wars.
        centuries: first two digits of the years.

    Raises:
        ValueError: a century does not have two digits.
    """

    name: str = "greater_than"
    title: str = "Greater Than"
    metric: Metric = field(default=probability_difference, repr=False)
    nouns: tuple[str, ...] = field(default=NOUNS, repr=False)
    centuries: tuple[int, ...] = CENTURIES

    def __post_init__(self) -> None:
        odd = [century for century in self.centuries if not 10 <= century <= 99]
        if odd:
            raise ValueError(f"expected centuries in 10..99, two digits each; got {odd}")

    def drawing(self, tokenizer: Any, rng: random.Random) -> Callable[[], PairTexts]:
        """Answers are the year endings above YY; all others are wrong."""
        nouns = single_words(tokenizer, self.nouns, 1, "nouns")
        years = self.years(tokenizer)

        def draw() -> PairTexts:
            noun, (century, start) = rng.choice(nouns), rng.choice(years)
            return PairTexts(
                f"The {noun} lasted from the year {century}{start} to the year {century}",
                f"The {noun} lasted from the year {century}{CORRUPTED} to the year {century}",
                answers=tuple(end for end in ENDS if end > start),
                wrong=tuple(end for end in ENDS if end <= start),
                joined=False,
            )

        return draw

    def years(self, tokenizer: Any) -> list[tuple[str, str]]:
        """Start years as (century, YY), each half one token; YY in 02..98.

        Up to 01 the corruption would change nothing, and 99 would leave no answer.

        Raises:
            ValueError: the tokenizer splits no year like this, or lacks some of 00..99.
        """
        encode = Encoder(tokenizer)
        lacking = [end for end in ENDS if not is_token(tokenizer, encode(end), end)]
        if lacking:
            raise ValueError(
                f"expected 00 to 99 to be single tokens, since each can be an answer; "
                f"{len(lacking)} are not, such as {lacking[:3]}. Use a tokenizer that reads digits "
                "in pairs."
            )
        years = []
        for century in map(str, self.centuries):
            before = encode(f"year {century}")
            if len(before) != len(encode("year")) + 1:
                continue
            split = [end for end in ENDS if encode(f"year {century}{end}") == before + encode(end)]
            if CORRUPTED in split:
                years += [(century, end) for end in split if CORRUPTED < end < ENDS[-1]]
        if not years:
            raise ValueError(
                "expected years that are two tokens, such as 17 and 32; the tokenizer splits no "
                f"year of the centuries {list(self.centuries)} like that. Give other "
                "`centuries`, or use a tokenizer that reads digits in pairs."
            )
        return years
