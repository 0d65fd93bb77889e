"""Shared by word tasks: single-token words, distinct prompts, and conversion to `PromptPairs`."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any

from annotated_types import Ge, Le

from sparse_tl.arguments import Seed, checked
from sparse_tl.data.pairs import PromptPairs, pairs_of_texts
from sparse_tl.data.prompts import Encoder, prepends_bos
from sparse_tl.data.records import PairTexts
from sparse_tl.lens import HookedModel

Pairs = Annotated[int, Ge(1), Le(1_000_000)]
"""A number of pairs; drawing so many takes a minute."""
_CONTENT = json.loads(files("sparse_tl.tasks").joinpath("content.json").read_text("utf-8"))


def content(task: str, key: str) -> tuple[str, ...]:
    """A published word list or set of templates, stored next to this module."""
    return tuple(_CONTENT[task][key])


@dataclass(frozen=True, kw_only=True)
class WordTask:
    """A task whose prompts are drawn at random from words; subclasses define one draw."""

    def drawing(self, tokenizer: Any, rng: random.Random) -> Callable[[], PairTexts]:
        """A function that draws one prompt.

        Raises:
            ValueError: too few of the task's words are single tokens.
        """
        raise NotImplementedError

    @checked
    def pairs(
        self, model: HookedModel, n: Pairs, *, seed: Seed = 0, prepend_bos: bool | None = None
    ) -> PromptPairs:
        """Clean and corrupted prompts, with right and wrong answers as defined by the task.

        Args:
            model: model whose tokenizer is used.
            n: number of pairs.
            seed: random seed for the draws.
            prepend_bos: whether prompts start with the BOS token; by default as the model's own do.

        Raises:
            ValueError: the model has no tokenizer, too few of the task's words are single tokens,
                or `n` is out of range.
        """
        with_bos = prepends_bos(model, prepend_bos)
        draw = self.drawing(model.tokenizer, random.Random(seed))
        return to_pairs(model.tokenizer, draw_distinct(draw, n), prepend_bos=with_bos)


def single_words(tokenizer: Any, words: Iterable[str], needed: int, what: str) -> list[str]:
    """The words that are one token after a space.

    Raises if there are fewer than `needed`; `what` is the name of the task's field.
    """
    encode, words = Encoder(tokenizer), tuple(dict.fromkeys(words))
    before, found = encode("to"), []
    for word in words:
        tokens = encode(f"to {word}")
        # Decoding distinguishes known from unknown words, whatever the unknown token is.
        if tokens[:-1] == before and is_token(tokenizer, tokens[-1:], word):
            found.append(word)
    if len(found) < needed:
        raise ValueError(
            f"expected at least {needed} {what} that are single tokens after a space; under this "
            f"tokenizer {len(found)} of {len(words)} are: {found}. Give the task other "
            f"`{what}`, or use a tokenizer that knows more of them."
        )
    return found


def draw_distinct(draw: Callable[[], PairTexts], n: int) -> list[PairTexts]:
    """`n` draws with distinct clean prompts, as far as there are that many."""
    if n < 1:
        raise ValueError(f"expected to draw at least 1 prompt pair; got n={n}")
    found: dict[str, PairTexts] = {}
    # Enough tries to find every prompt of a small task, few enough to stop when none is left.
    in_vain = 0
    while len(found) < n and in_vain < 20 * len(found) + 1000:
        prompt = draw()
        in_vain = in_vain + 1 if prompt.clean in found else 0
        found.setdefault(prompt.clean, prompt)
    return [*found.values(), *(draw() for _ in range(n - len(found)))]


def to_pairs(tokenizer: Any, prompts: Sequence[PairTexts], *, prepend_bos: bool) -> PromptPairs:
    """Prompts as tokens; raises if the tokenizer does not know a word."""
    encode = Encoder(tokenizer)
    for text in (text for prompt in prompts for text in (prompt.clean, prompt.corrupted)):
        if not _is_known(tokenizer, encode(text), text):
            odd = [word for word in text.split() if not _is_known(tokenizer, encode(word), word)]
            raise ValueError(
                f"expected a tokenizer that knows every word of the prompts; it reads {odd} of "
                f"{text!r} as something else. Add them to its vocabulary, or give the task other "
                "words or templates."
            )
    return pairs_of_texts(tokenizer, prompts, prepend_bos=prepend_bos)


def is_token(tokenizer: Any, tokens: tuple[int, ...], word: str) -> bool:
    """Whether these tokens are a single one that decodes to the word."""
    return len(tokens) == 1 and _composed(tokenizer.decode(list(tokens)).strip()) == _composed(word)


def _is_known(tokenizer: Any, tokens: tuple[int, ...], text: str) -> bool:
    # Word-level tokenizers lose the number of spaces, and some lose capitals.
    def bare(some: str) -> str:
        return "".join(_composed(some).split()).casefold()

    return bare(tokenizer.decode(list(tokens))) == bare(text)


def _composed(text: str) -> str:
    """The text with accents as part of their letters, as many tokenizers read it."""
    return unicodedata.normalize("NFC", text)
