"""Prompt pairs as texts: tables of records, checked row by row, and their tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from sparse_tl.data.known_text import check_known

if TYPE_CHECKING:
    import pandas as pd

Encode = Callable[[str], Sequence[int]]
"""Text to tokens, with those that every prompt starts with."""

COLUMNS = ("clean", "corrupted", "answer", "wrong")
_SHOWN = 12
"""Maximum number of tokens that a message shows."""


@runtime_checkable
class ModelWithTokenizer(Protocol):
    """What texts need from a model, dense or sparse; its tokenizer may be None."""

    @property
    def cfg(self) -> Any: ...

    @property
    def tokenizer(self) -> Any: ...


class PairTexts(NamedTuple):
    """A clean prompt, its corrupted counterpart, and right and wrong single-token answers."""

    clean: str
    corrupted: str
    answers: tuple[str, ...]
    wrong: tuple[str, ...]


def read_records(rows: Sequence[Mapping[str, Any]] | pd.DataFrame) -> list[PairTexts]:
    """The texts in a table of prompt pairs; arguments and errors as in `PromptPairs.from_texts`."""
    import pandas as pd

    records: Any = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else list(rows)
    if not records:
        raise ValueError("expected at least one row, to make prompt pairs of; got none")
    found = []
    for row, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise ValueError(
                f"expected rows with {', '.join(COLUMNS)}, as dictionaries or a data frame; row "
                f"{row} is {record!r}"
            )
        missing = [name for name in COLUMNS[:3] if name not in record]
        unknown = [name for name in record if name not in COLUMNS]
        if missing or unknown:
            parts = (("lacks", missing), ("also has", unknown))
            said = [f"{verb} {', '.join(map(repr, names))}" for verb, names in parts if names]
            raise ValueError(
                f"expected rows with {', '.join(COLUMNS)} (wrong may be left out) and nothing "
                f"else; row {row} {' and '.join(said)}"
            )
        texts = {name: _texts(record.get(name, ()), name, row) for name in COLUMNS}
        for name in COLUMNS[:2]:
            if len(texts[name]) != 1:
                raise ValueError(
                    f"expected one text as {name} in every row; row {row} has {record[name]!r}"
                )
        answers, wrong = texts["answer"], texts["wrong"]
        found.append(PairTexts(texts["clean"][0], texts["corrupted"][0], answers, wrong))
    return found


def _texts(value: Any, name: str, row: int) -> tuple[str, ...]:
    """One text or several; anything else, such as a missing cell of a data frame, is refused."""
    several = (value,) if isinstance(value, str) else value
    if not isinstance(several, list | tuple) or not all(isinstance(text, str) for text in several):
        raise ValueError(
            f"expected a text as {name} in every row, or a list of texts; row {row} has {value!r}"
        )
    return tuple(several)


def prepends_bos(model: ModelWithTokenizer) -> bool:
    """Whether a model prepends a BOS token to every text by itself.

    Raises:
        ValueError: it has no tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError(
            "expected a model with a tokenizer; this one has none. Build it with one, or make "
            "prompts of tokens."
        )
    return bool(model.cfg.default_prepend_bos) and model.tokenizer.bos_token_id is not None


def encoder(tokenizer: Any, *, prepend_bos: bool = False) -> Callable[[str], tuple[int, ...]]:
    """A cached function from text to tokens, since the same few words are encoded repeatedly."""
    start = (int(tokenizer.bos_token_id),) if prepend_bos else ()

    @cache
    def encode(text: str) -> tuple[int, ...]:
        return start + tuple(tokenizer.encode(text, add_special_tokens=False))

    return encode


def check_prompts(tokenizer: Any, pairs: Sequence[PairTexts], *, prepend_bos: bool) -> None:
    """Check that the tokenizer can represent all prompts, and that none has a BOS of its own.

    Raises:
        ValueError: it is not so; the message names the row.
    """
    for row, pair in enumerate(pairs):
        for name, text in zip(COLUMNS[:2], pair[:2], strict=True):
            if not text:
                raise ValueError(f"row {row}: expected a {name} prompt; got an empty text")
            if prepend_bos and text.startswith(tokenizer.bos_token):
                raise ValueError(
                    f"row {row}: expected a {name} prompt without {tokenizer.bos_token!r}, which "
                    f"this model prepends by itself; got {text!r}"
                )
            try:
                check_known(tokenizer, text)
            except ValueError as error:
                raise ValueError(f"row {row}, {name}: {error}") from error


def warn_of_joined_words(encode: Encode, pairs: Sequence[PairTexts]) -> None:
    """Warn of answers that would be part of the prompt's last word, for want of a space."""
    start, joined = len(encode("")), []
    for row, pair in enumerate(pairs):
        for text in (*pair.answers, *pair.wrong):
            one_word = pair.clean[-1].isalpha() and text[:1].isalpha()
            # Where texts begin with a space by themselves, this has a token more.
            alone, spaced = encode(text), encode(f" {text}")
            if one_word and len(alone) == len(spaced) == start + 1 and alone != spaced:
                joined.append((row, text, pair.clean.split()[-1] + text))
    if joined:
        row, text, whole = joined[0]
        others = f", and {len(joined) - 1} more" if joined[1:] else ""
        warnings.warn(
            f"the answer {text!r} of row {row}{others} continues a word: {whole!r}. If it is a "
            f"word by itself, write {' ' + text!r}, which is another token.",
            stacklevel=3,
        )


def tokens_of_pairs(
    encode: Encode, pairs: Sequence[PairTexts], tokenizer: Any
) -> Iterator[tuple[Sequence[int], ...]]:
    """The tokens of `PairTexts`, row by row; what all prompts start with is taken off answers.

    Raises:
        ValueError: prompts of a row differ in token length, or an answer is not one token.
    """
    for row, (clean, corrupted, answers, wrong) in enumerate(pairs):
        one, other = encode(clean), encode(corrupted)
        if len(one) != len(other):
            first, second = (_shown(tokenizer, some) for some in _differing(one, other))
            raise ValueError(
                f"row {row}: expected clean and corrupted prompts of equal token length, which are "
                f"compared position by position; got {len(one)} and {len(other)} tokens, where "
                f"{first} is compared with {second}: {clean!r} / {corrupted!r}"
            )
        sides = [
            [single_token(encode, text, tokenizer, f"row {row}: ") for text in texts]
            for texts in (answers, wrong)
        ]
        yield one, other, *sides


def _shown(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The texts of tokens, of many the first ones."""
    texts = [tokenizer.decode([token]) for token in tokens[:_SHOWN]]
    return repr([*texts, "..."] if len(tokens) > _SHOWN else texts)


def _differing(one: Sequence[int], other: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Two rows of tokens without the start and the end that they share."""
    shorter = min(len(one), len(other))
    start = next((i for i in range(shorter) if one[i] != other[i]), shorter)
    end = next((i for i in range(shorter - start) if one[-1 - i] != other[-1 - i]), shorter - start)
    return one[start : len(one) - end], other[start : len(other) - end]


def single_token(encode: Encode, text: str, tokenizer: Any, where: str = "") -> int:
    """The token of an answer, without those that every prompt begins with.

    Raises:
        ValueError: it has none or several; the message begins with `where`.
    """
    start = len(encode(""))
    tokens = list(encode(text))[start:]
    if len(tokens) != 1:
        # In most vocabularies a word begins with its space; in some, a text by itself does.
        spaced = text[1:] if text.startswith(" ") else f" {text}"
        better = bool(spaced) and len(encode(spaced)) == start + 1
        hint = f"; {spaced!r} is one" if text and better else ""
        raise ValueError(
            f"{where}expected answers of a single token; {text!r} has {len(tokens)}, "
            f"{_shown(tokenizer, tokens)}{hint}"
        )
    return tokens[0]
