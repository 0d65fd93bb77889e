"""What all tasks in words share: single-token words, distinct prompts, prompts as `PromptPairs`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from sparse_tl.data.pairs import PromptPairs
from sparse_tl.lens import HookedModel

_CONTENT = json.loads(files("sparse_tl.tasks").joinpath("content.json").read_text("utf-8"))


def content(task: str, key: str) -> tuple[str, ...]:
    """A published word list or templates, kept beside this module."""
    return tuple(_CONTENT[task][key])


class Prompt(NamedTuple):
    """A clean prompt, its corrupted counterpart, and right and wrong single-token answers."""

    clean: str
    corrupted: str
    answers: tuple[str, ...]
    wrong: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WordTask:
    """A task whose prompts are drawn at random from words; a subclass says how one is drawn."""

    def drawing(self, tokenizer: Any, rng: random.Random) -> Callable[[], Prompt]:
        """What draws one prompt.

        Raises:
            ValueError: the tokenizer knows too few of the task's words as single tokens.
        """
        raise NotImplementedError

    def pairs(self, model: HookedModel, n: int, *, seed: int = 0) -> PromptPairs:
        """Clean and corrupted prompts, with right and wrong answers as the task describes them.

        Args:
            model: whose tokens the prompts are in, behind the BOS token where it prepends one.
            n: how many.
            seed: the same seed gives the same pairs.

        Raises:
            ValueError: a model without a tokenizer; too few of the task's words are single tokens;
                no pair asked for.
        """
        begins_with_bos = prepends_bos(model)
        draw = self.drawing(model.tokenizer, random.Random(seed))
        return to_pairs(model.tokenizer, draw_distinct(draw, n), prepend_bos=begins_with_bos)


def prepends_bos(model: HookedModel) -> bool:
    """Whether the model itself puts a BOS token before every text that it reads."""
    if model.tokenizer is None:
        raise ValueError(
            "expected a model with a tokenizer; this one has none. Build it with one, or make "
            "prompts of tokens."
        )
    return bool(model.cfg.default_prepend_bos) and model.tokenizer.bos_token_id is not None


def encoder(tokenizer: Any, *, prepend_bos: bool = False) -> Callable[[str], tuple[int, ...]]:
    """A text to its tokens, remembered, since tasks ask for the same few words again and again."""
    start = (int(tokenizer.bos_token_id),) if prepend_bos else ()

    @cache
    def encode(text: str) -> tuple[int, ...]:
        return start + tuple(tokenizer.encode(text, add_special_tokens=False))

    return encode


def single_words(tokenizer: Any, words: Iterable[str], needed: int, what: str) -> dict[str, str]:
    """The words that are one token after a space, and how each is written as a text of its own.

    Mostly that is " Mary". Tokenizers of the SentencePiece kind begin every text with a space
    themselves: there " Mary" alone is two tokens, and "Mary" the one that follows in a prompt.
    Fewer than `needed` are refused; `what` is the name of the task's field.
    """
    encode, words = encoder(tokenizer), tuple(dict.fromkeys(words))
    before, found = encode("to"), {}
    for word in words:
        tokens = encode(f"to {word}")
        # What is decoded tells a known word from an unknown one, whatever the unknown token is.
        if tokens[:-1] != before or not is_token(tokenizer, tokens[-1:], word):
            continue
        alone = [text for text in (f" {word}", word) if encode(text) == tokens[-1:]]
        if alone:
            found[word] = alone[0]
    if len(found) < needed:
        raise ValueError(
            f"expected at least {needed} {what} that are single tokens after a space; under this "
            f"tokenizer {len(found)} of {len(words)} are: {list(found)}. Give the task other "
            f"`{what}`, or use a tokenizer that knows more of them."
        )
    return found


def draw_distinct(draw: Callable[[], Prompt], n: int) -> list[Prompt]:
    """`n` draws with distinct clean prompts, as far as there are as many."""
    if n < 1:
        raise ValueError(f"expected to draw at least 1 prompt pair; got n={n}")
    found: dict[str, Prompt] = {}
    # Enough tries to meet every prompt of a small task, few enough to notice that none is left.
    for _ in range(20 * n + 1000):
        if len(found) == n:
            break
        prompt = draw()
        found.setdefault(prompt.clean, prompt)
    return [*found.values(), *(draw() for _ in range(n - len(found)))]


def to_pairs(tokenizer: Any, prompts: Sequence[Prompt], *, prepend_bos: bool) -> PromptPairs:
    """Prompts as tokens; one with a word that the tokenizer does not know is refused."""
    encode = encoder(tokenizer)
    for text in (text for prompt in prompts for text in (prompt.clean, prompt.corrupted)):
        if not _is_known(tokenizer, encode(text), text):
            odd = [word for word in text.split() if not _is_known(tokenizer, encode(word), word)]
            raise ValueError(
                f"expected a tokenizer that knows every word of the prompts; it reads {odd} of "
                f"{text!r} as something else. Add them to its vocabulary, or give the task other "
                "words or templates."
            )
    clean, corrupted, answers, wrong = zip(*prompts, strict=True)
    encode = encoder(tokenizer, prepend_bos=prepend_bos)
    return PromptPairs.from_texts(encode, clean, corrupted, answers, wrong)


def is_token(tokenizer: Any, tokens: tuple[int, ...], word: str) -> bool:
    """Whether these tokens are one, and read as the word."""
    return len(tokens) == 1 and tokenizer.decode(list(tokens)).strip() == word


def _is_known(tokenizer: Any, tokens: tuple[int, ...], text: str) -> bool:
    # Tokenizers of words forget how many spaces there were, and some forget capitals.
    def bare(some: str) -> str:
        return "".join(some.split()).casefold()

    return bare(tokenizer.decode(list(tokens))) == bare(text)
