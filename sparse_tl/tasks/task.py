"""The base class of tasks, single-token words and distinct prompts."""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Le

from sparse_tl.arguments import Seed, checked
from sparse_tl.backend import HookedModel
from sparse_tl.data.pairs import PairTexts, PromptPairs, pairs_of_texts
from sparse_tl.data.prompts import Encoder, prepends_bos
from sparse_tl.metrics import Metric, logit_difference

Pairs = Annotated[int, Ge(1), Le(1_000_000)]
"""A number of pairs; drawing a million takes a minute."""
_CONTENT = json.loads(files("sparse_tl.tasks").joinpath("content.json").read_text("utf-8"))

Word = TypeVar("Word", bound=str | tuple[str, ...])
Drawn = TypeVar("Drawn", bound=tuple[Any, ...])


def content(task: str, key: str) -> tuple[Any, ...]:
    """A word list, a table of words, or a set of templates, stored next to this module."""
    return tuple(tuple(row) if isinstance(row, list) else row for row in _CONTENT[task][key])


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task whose prompts are drawn at random; subclasses define one draw."""

    name: str
    title: str
    metric: Metric = field(default=logit_difference, repr=False)

    def drawing(self, tokenizer: Any, rng: random.Random) -> Callable[[], PairTexts]:
        """A function that draws one prompt.

        Raises:
            ValueError: too few of the task's words are single tokens.
        """
        raise NotImplementedError

    def words(self, tokenizer: Any) -> Mapping[str, Sequence[Any]]:
        """The words that prompts are drawn from, by the name of the task's field."""
        return {}

    def describe(self, tokenizer: Any) -> str:
        """A remark on the task under this tokenizer: how many words are left out."""
        counts = []
        for what, usable in self.words(tokenizer).items():
            n_all = len(set(getattr(self, what)))
            if len(usable) < n_all:
                counts.append(f"{n_all - len(usable)} of {n_all} {what} left out")
        return ", ".join(counts)

    @checked
    def pairs(
        self,
        model: HookedModel,
        n: Pairs,
        *,
        seed: Seed = 0,
        prepend_bos: bool | None = None,
        chat: bool = False,
    ) -> PromptPairs:
        """Clean and corrupted prompts, with right and wrong answers as defined by the task.

        Printed pairs say which form the task takes under the model's tokenizer, and how many
        of its words are left out because they are not single tokens.

        Args:
            model: model whose tokenizer is used.
            n: number of pairs.
            seed: random seed for the draws.
            prepend_bos: whether prompts start with the BOS token; by default as the model's own do.
            chat: whether each prompt begins the assistant's answer in a chat, written by the
                tokenizer's own template.

        Raises:
            ValueError: the model has no tokenizer, too few of the task's words are single tokens,
                the tokenizer lacks the chat template, both `prepend_bos` and `chat` are given, or
                `n` is out of range.
        """
        with_bos = prepends_bos(model, prepend_bos, chat=chat)
        draw = self.drawing(model.tokenizer, random.Random(seed))
        prompts = draw_distinct(draw, n)
        pairs = pairs_of_texts(model.tokenizer, prompts, prepend_bos=with_bos, chat=chat)
        return replace(pairs, note=self.describe(model.tokenizer))


def check_templates(templates: Iterable[str], *allowed: str) -> None:
    """Check that each template has one of these sets of slots, each slot once, in any order."""
    for template in templates:
        slots = sorted(re.findall(r"\[([A-Z]+)\]", template))
        if slots not in [sorted(form.split()) for form in allowed]:
            raise ValueError(f"a template has the slots {' or '.join(allowed)}; got {template!r}")


def single_words(tokenizer: Any, words: Iterable[str], needed: int, what: str) -> list[str]:
    """The words that are one token after a space.

    Raises a ValueError if there are fewer than `needed`; `what` is the name of the task's field.
    """
    words = tuple(dict.fromkeys(words))
    rows = single_rows(tokenizer, ((word,) for word in words), 0, what)
    return enough([word for (word,) in rows], words, needed, what)


def single_rows(
    tokenizer: Any, rows: Iterable[tuple[str, ...]], needed: int, what: str
) -> list[tuple[str, ...]]:
    """The rows whose words are all one token after a space; arguments as in `single_words`."""
    rows, encode = tuple(dict.fromkeys(rows)), Encoder(tokenizer)
    before = encode("to")

    def is_known(word: str) -> bool:
        tokens = encode(f"to {word}")
        # Decoding distinguishes known from unknown words, whatever the unknown token is.
        return tokens[:-1] == before and is_token(tokenizer, tokens[-1:], word)

    return enough([row for row in rows if all(map(is_known, row))], rows, needed, what)


def enough(usable: list[Word], words: Sequence[Word], needed: int, what: str) -> list[Word]:
    """The usable words, or a ValueError if there are fewer than `needed`."""
    if len(usable) < needed:
        raise ValueError(
            f"expected at least {needed} {what} that are single tokens after a space; under this "
            f"tokenizer {len(usable)} of {len(words)} are: {usable}. Give the task other "
            f"`{what}`, or use a tokenizer that knows more of them."
        )
    return usable


def draw_distinct(draw: Callable[[], Drawn], n: int) -> list[Drawn]:
    """`n` draws with distinct clean prompts, or with repetitions if there are too few prompts.

    The first field of a draw is its clean prompt.
    """
    drawn: dict[Any, Drawn] = {}
    # Enough tries to find every prompt of a small task, few enough to stop when none is left.
    n_repeated = 0
    while len(drawn) < n and n_repeated < 20 * len(drawn) + 1000:
        prompt = draw()
        n_repeated = n_repeated + 1 if prompt[0] in drawn else 0
        drawn.setdefault(prompt[0], prompt)
    return [*drawn.values(), *(draw() for _ in range(n - len(drawn)))]


def is_token(tokenizer: Any, tokens: tuple[int, ...], word: str) -> bool:
    """Whether there is a single token, which decodes to the word; many compose its accents."""
    if len(tokens) != 1:
        return False
    read, word = (
        unicodedata.normalize("NFC", text)
        for text in (tokenizer.decode(list(tokens)).strip(), word)
    )
    return read == word
