"""Tables of prompt pairs as texts: checked row by row, and tokenised."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sparse_tl.data.known_text import check_known
from sparse_tl.data.prompts import (
    Encoder,
    Tokens,
    continued,
    continues_a_word,
    shown,
    single_token,
)

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("clean", "corrupted", "answer", "wrong")


class PairTexts(NamedTuple):
    """A clean prompt, its corrupted counterpart, and right and wrong single-token answers."""

    clean: str
    corrupted: str
    answers: tuple[str, ...]
    wrong: tuple[str, ...]
    joined: bool = True
    """Whether answers are encoded as continuations of the prompts, or each as its own text."""

    def with_prefix(self, text: str) -> PairTexts:
        """The same pair with a text before both prompts."""
        return self._replace(clean=text + self.clean, corrupted=text + self.corrupted)


def read_records(rows: Sequence[Mapping[str, Any]] | pd.DataFrame) -> list[PairTexts]:
    """The texts in a table of prompt pairs; arguments and errors as in `PromptPairs.from_texts`."""
    import pandas as pd

    if not isinstance(rows, Iterable):
        raise TypeError(f"expected rows of texts as dictionaries, or a data frame; got {rows!r}")
    records: Any = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else list(rows)
    if not records:
        raise ValueError("expected at least one row, to make prompt pairs from; got none")
    pairs = []
    for row, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise ValueError(
                f"expected rows with {', '.join(COLUMNS)}, as dictionaries or a data frame; row "
                f"{row} is {record!r:.200}"
            )
        missing = [name for name in COLUMNS[:3] if name not in record]
        unknown = [name for name in record if name not in COLUMNS]
        if missing or unknown:
            parts = (("lacks", missing), ("also has", unknown))
            faults = [f"{verb} {', '.join(map(repr, names))}" for verb, names in parts if names]
            raise ValueError(
                f"expected rows with {', '.join(COLUMNS)} (wrong may be left out) and nothing "
                f"else; row {row} {' and '.join(faults)}"
            )
        texts = {name: _texts(record.get(name, ()), name, row) for name in COLUMNS}
        for name in COLUMNS[:2]:
            if len(texts[name]) != 1:
                raise ValueError(
                    f"expected one text as {name} in every row; row {row} has {record[name]!r:.200}"
                )
        answers, wrong = texts["answer"], texts["wrong"]
        pairs.append(PairTexts(texts["clean"][0], texts["corrupted"][0], answers, wrong))
    return pairs


def _texts(value: Any, name: str, row: int) -> tuple[str, ...]:
    """One text or several as a tuple; refuses anything else, such as a data frame's empty cell."""
    several = (value,) if isinstance(value, str) else value
    if not isinstance(several, list | tuple) or not all(isinstance(text, str) for text in several):
        raise ValueError(
            f"expected a text as {name} in every row, or a list; row {row} has {value!r:.99}"
        )
    return tuple(several)


def check_prompts(tokenizer: Any, pairs: Sequence[PairTexts], *, prepend_bos: bool) -> None:
    """Check that the tokenizer knows all texts, and that no prompt starts with BOS already.

    Raises:
        ValueError: a text is unknown, or a prompt is empty or starts with a prepended BOS; the
            message names the row.
    """
    known: set[str] = set()
    for row, pair in enumerate(pairs):
        for name, text in zip(COLUMNS[:2], pair[:2], strict=True):
            if not text:
                raise ValueError(f"row {row}: expected a {name} prompt; got an empty text")
            if prepend_bos and text.startswith(tokenizer.bos_token):
                raise ValueError(
                    f"row {row}: expected a {name} prompt without {tokenizer.bos_token!r}, which "
                    f"this model prepends itself; got {text!r:.200}"
                )
            check_known(tokenizer, text, f"row {row}, {name}: ")
        for text in (*pair.answers, *pair.wrong):
            if text not in known:
                check_known(tokenizer, text, f"row {row}, answer: ")
                known.add(text)


def warn_of_joined_words(tokenizer: Any, pairs: Sequence[PairTexts]) -> None:
    """Warn of answers that continue the prompt's last word because a space is missing."""
    encode = Encoder(tokenizer)
    joined = [
        (row, text, pair.clean.split()[-1] + text)
        for row, pair in enumerate(pairs)
        for text in (*pair.answers, *pair.wrong)
        if continues_a_word(encode, pair.clean, text)
    ]
    if joined:
        row, text, word = joined[0]
        others = f", and {len(joined) - 1} more" if joined[1:] else ""
        warnings.warn(
            f"the answer {text!r} of row {row}{others} continues a word: {word!r}. If it is a "
            f"separate word, write {' ' + text!r}, which is a different token.",
            stacklevel=3,
        )


def tokens_of_pairs(
    tokenizer: Any, pairs: Sequence[PairTexts], start: Tokens
) -> Iterator[tuple[Sequence[int], ...]]:
    """The tokens of `PairTexts`, row by row: both prompts, right and wrong answers.

    Args:
        tokenizer: a Hugging Face tokenizer.
        pairs: the texts.
        start: tokens that every prompt starts with.

    Raises:
        ValueError: the prompts of a row differ in token length, or an answer is not the same single
            token after both prompts.
    """
    encode = Encoder(tokenizer)
    for row, pair in enumerate(pairs):
        where = f"row {row}: "
        read = _joined if pair.joined else _apart
        *prompts, answers, wrong = read(encode, pair, where)
        one, other = ((*start, *prompt) for prompt in prompts)
        if len(one) != len(other):
            first, second = (shown(tokenizer, tokens) for tokens in _differing(one, other))
            raise ValueError(
                f"{where}expected clean and corrupted prompts of equal token length, which are "
                f"compared position by position; got {len(one)} and {len(other)} tokens, where "
                f"{first} is compared with {second}: {pair.clean!r:.200} / {pair.corrupted!r:.200}"
            )
        yield one, other, answers, wrong


def _apart(encode: Encoder, pair: PairTexts, where: str) -> tuple[Sequence[int], ...]:
    """The tokens of a row whose answers are encoded by themselves."""
    sides = (
        [single_token(encode, text, where) for text in texts]
        for texts in (pair.answers, pair.wrong)
    )
    return encode(pair.clean), encode(pair.corrupted), *sides


def _joined(encode: Encoder, pair: PairTexts, where: str) -> tuple[Sequence[int], ...]:
    """The tokens of a row whose answers are encoded as continuations of both prompts."""
    answers = (*pair.answers, *pair.wrong)
    encode.prepare(prompt + text for prompt in pair[:2] for text in ("", *answers))
    prompts: dict[str, Tokens] = {}
    by_text: dict[str, int] = {}
    for name, prompt in zip(COLUMNS, pair[:2], strict=False):
        for text in answers:
            before, token = continued(encode, prompt, text, where)
            if prompts.setdefault(name, before) != before:
                raise ValueError(
                    f"{where}expected a {name} prompt that all answers continue; {prompt!r:.200} "
                    f"ends in a space that belongs to {text!r}, but not to others. Move the space "
                    "to the start of the answers"
                )
            if by_text.setdefault(text, token) != token:
                raise ValueError(
                    f"{where}expected an answer that is one token after both prompts; {text!r} is "
                    f"a different one after {prompt!r:.200}"
                )
        prompts.setdefault(name, encode(prompt))
    sides = ([by_text[text] for text in texts] for texts in (pair.answers, pair.wrong))
    return prompts["clean"], prompts["corrupted"], *sides


def _differing(one: Sequence[int], other: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Two rows of tokens without their common start and end."""
    shorter = min(len(one), len(other))
    start = next((i for i in range(shorter) if one[i] != other[i]), shorter)
    end = next((i for i in range(shorter - start) if one[-1 - i] != other[-1 - i]), shorter - start)
    return one[start : len(one) - end], other[start : len(other) - end]
