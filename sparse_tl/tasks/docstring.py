"""Docstring: predict the argument that a function's documentation describes next.

::

    def port(self, load, size, files, last, key, user):
        \"""oil column piece

        :param files: crime population
        :param last: dog tree
        :param

The definition has two arguments, then three *matching* ones, then one more. The docstring describes
the matching ones in turn, and the answer is the third, ``key``. The corrupted prompt has other
names for the matching arguments, and different ones again where the docstring describes them, so
nothing in it matches.

Reference: Heimersheim and Janiak, *A circuit for Python docstrings in a 4-layer attention-only
transformer* (2023); sizes and corruption ("random_random") as in ACDC, arXiv 2304.14997.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from sparse_tl.arguments import checked
from sparse_tl.data.pairs import PairTexts
from sparse_tl.metrics import Metric, margin
from sparse_tl.tasks.task import Task, content, single_words

# Word lists of ACDC (github.com/ArthurConmy/Automatic-Circuit-Discovery, MIT, (c) 2023 Arthur
# Conmy, Adrià Garriga-Alonso).
ARGUMENTS = content("docstring", "arguments")
NOUNS = content("docstring", "nouns")

PREFIX, MATCHING, SUFFIX = 2, 3, 1
"""Numbers of arguments in the definition."""
NAMED = 1 + PREFIX + MATCHING + SUFFIX + MATCHING + (MATCHING - 1)
"""Number of different names in a clean and a corrupted prompt together."""
SUMMARY, DESCRIPTION = 3, 2
"""Numbers of nouns in the docstring's first line and in an argument's description."""


@checked
@dataclass(frozen=True, kw_only=True)
class DocstringTask(Task):
    """Predict the next argument of a reST docstring.

    Args:
        arguments: names for the function and its arguments, at least twelve.
        nouns: words for the descriptions, at least three.
    """

    name: str = "docstring"
    title: str = "Docstring"
    metric: Metric = field(default=margin, repr=False)
    arguments: tuple[str, ...] = field(default=ARGUMENTS, repr=False)
    nouns: tuple[str, ...] = field(default=NOUNS, repr=False)

    def words(self, tokenizer: Any) -> dict[str, list[str]]:
        """The arguments and nouns that are single tokens."""
        return {
            "arguments": single_words(tokenizer, self.arguments, NAMED, "arguments"),
            "nouns": single_words(tokenizer, self.nouns, SUMMARY, "nouns"),
        }

    def drawing(self, tokenizer: Any, rng: random.Random) -> Callable[[], PairTexts]:
        """A function that draws a prompt; the answer is the third matching argument.

        All other arguments of the clean and the corrupted prompt are wrong answers, since a model
        that follows the corrupted prompt names the third argument of its definition.
        """
        arguments, nouns = self.words(tokenizer).values()

        def draw() -> PairTexts:
            function, *drawn = rng.sample(arguments, NAMED)
            rest = iter(drawn)
            prefix, suffix, matching, other = (
                list(islice(rest, count)) for count in (PREFIX, SUFFIX, MATCHING, MATCHING)
            )
            undefined = list(rest)
            summary = " ".join(rng.sample(nouns, SUMMARY))
            texts = [" ".join(rng.sample(nouns, DESCRIPTION)) for _ in undefined]

            def write(matching: Sequence[str], described: Sequence[str]) -> str:
                defined = ", ".join([*prefix, *matching, *suffix])
                # The published prompts start with a line break.
                lines = ["", f"def {function}(self, {defined}):", f'    """{summary}', ""]
                for argument, text in zip(described, texts, strict=True):
                    lines.append(f"    :param {argument}: {text}")
                return "\n".join([*lines, "    :param"])

            wrong = [*prefix, *matching[:-1], *suffix, *other, *undefined]
            return PairTexts(
                write(matching, matching[:-1]),
                write(other, undefined),
                answers=(f" {matching[-1]}",),
                wrong=tuple(f" {argument}" for argument in wrong),
            )

        return draw
