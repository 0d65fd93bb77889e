"""Capitals: ``The capital of France is``, answered by *Paris*.

The corrupted prompt names another country of equal token length, whose capital is the wrong answer.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sparse_tl.calls.arguments import checked
from sparse_tl.data.pairs import PairTexts
from sparse_tl.data.prompts import Encoder
from sparse_tl.metrics import Metric, logit_difference
from sparse_tl.tasks.words import WordTask, content, enough, single_words

COUNTRIES: tuple[tuple[str, str], ...] = content("capitals", "countries")


@checked
@dataclass(frozen=True, kw_only=True)
class CapitalsTask(WordTask):
    """Name the capital of a country.

    Args:
        templates: templates with [COUNTRY] once.
        countries: countries, each with its capital; at least two.

    Raises:
        ValueError: there is no template, or one has another form.
    """

    name: str = "capitals"
    title: str = "Capitals"
    metric: Metric = field(default=logit_difference, repr=False)
    templates: tuple[str, ...] = field(default=content("capitals", "templates"), repr=False)
    countries: tuple[tuple[str, str], ...] = field(default=COUNTRIES, repr=False)

    def __post_init__(self) -> None:
        if not self.templates or any(one.count("[COUNTRY]") != 1 for one in self.templates):
            raise ValueError(f"expected templates with [COUNTRY] once; got {self.templates}")

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
        by_length: dict[int, list[tuple[str, str]]] = {}
        for row in countries:
            by_length.setdefault(_length(encode, row[0]), []).append(row)

        def draw() -> PairTexts:
            template, row = rng.choice(self.templates), rng.choice(countries)
            candidates = by_length[_length(encode, row[0])]
            other = rng.choice([candidate for candidate in candidates if candidate != row])
            return PairTexts(
                template.replace("[COUNTRY]", row[0]),
                template.replace("[COUNTRY]", other[0]),
                answers=(f" {row[1]}",),
                wrong=(f" {other[1]}",),
            )

        return draw


def _length(encode: Encoder, country: str) -> int:
    """Number of tokens up to and including a country."""
    return len(encode(f"to {country}"))
