"""Prompt pairs: a prompt with and without the information that a task needs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparse_tl.calls.arguments import AtLeastOne, checked
from sparse_tl.data.batches import Rows, TokenBatch
from sparse_tl.data.prompts import (
    Encoder,
    ModelWithTokenizer,
    Tokens,
    added_text,
    chat_start,
    check_known,
    continued,
    continues_a_word,
    in_tokens,
    prepends_bos,
    prompt_start,
    single_token,
    start_in_words,
)
from sparse_tl.data.spans import Positions, Span, Spans

if TYPE_CHECKING:
    import pandas as pd

NO_TOKEN = -1
"""Padding value for rows with fewer answers than the longest."""


@checked
@dataclass(frozen=True, eq=False)
class PromptPairs(Rows):
    """Clean prompts with corrupted counterparts of the same length, row by row.

    Prompts of different lengths are padded *on the right*: in a causal model, padding after the
    read position cannot affect it, so it changes no metric and needs no attention mask. Analyses
    recognise padding on the left by the tokenizer's padding token, and refuse it.

    Args:
        clean: tokens of the clean prompts.
        corrupted: tokens with the information removed.
        answers: correct tokens of each pair, padded with `NO_TOKEN`; a token counts once.
        wrong: incorrect tokens of each pair, likewise.
        positions: position of each prompt's last token, where logits are read. Answers at several
            positions of a prompt make several pairs: repeat the prompt, once for each position.
        spans: the span of every token, as from `with_spans`; for scores and circuits by span.
        start: text of the tokens that begin every prompt, such as BOS; ``None`` if unknown, as for
            prompts given as tokens.
        note: a task's remark on its prompts, such as which words it left out.

    Raises:
        ValueError: shapes do not match, there is no pair, a row has no answer, a negative one or
            one that is also wrong, or a position is out of range.
    """

    clean: Int[Tensor, "pair pos"]
    corrupted: Int[Tensor, "pair pos"]
    answers: Int[Tensor, "pair answer"]
    wrong: Int[Tensor, "pair wrong"]
    positions: Int[Tensor, " pair"]
    spans: Spans | None = None
    start: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if len(self.clean) == 0:
            raise ValueError("expected at least one prompt pair; got none")
        for name in ("answers", "wrong"):
            outside = getattr(self, name) < NO_TOKEN
            if outside.any():
                row = int(outside.any(dim=1).int().argmax())
                raise ValueError(
                    f"expected tokens from 0 as {name}, or {NO_TOKEN} as padding; pair {row} has "
                    f"{getattr(self, name)[row].tolist()}"
                )
            again = _repeats(getattr(self, name))
            object.__setattr__(self, name, getattr(self, name).masked_fill(again, NO_TOKEN))
        sides = torch.cat([self.answers, self.wrong], dim=1)
        if (both := _repeats(sides)).any():
            row = int(both.any(dim=1).int().argmax())
            raise ValueError(
                f"expected answers that are not wrong answers too; pair {row} has the tokens "
                f"{sides[row, both[row]].tolist()} as both"
            )
        empty = (self.answers == NO_TOKEN).all(dim=1)
        if empty.any():
            raise ValueError(
                f"expected an answer for every pair; pair {int(empty.int().argmax())} has none"
            )
        outside = (self.positions < 0) | (self.positions >= self.clean.shape[1])
        if outside.any():
            row = int(outside.int().argmax())
            raise ValueError(
                f"expected positions in 0..{self.clean.shape[1] - 1}; pair {row} has "
                f"{int(self.positions[row])}"
            )
        if self.spans is not None and self.spans.at.shape != self.clean.shape:
            raise ValueError(
                f"expected spans with the prompts' shape {tuple(self.clean.shape)}; got "
                f"{tuple(self.spans.at.shape)}"
            )

    @staticmethod
    def from_texts(
        model: ModelWithTokenizer,
        rows: Sequence[Mapping[str, Any]] | pd.DataFrame,
        *,
        prepend_bos: bool | None = None,
        chat: bool = False,
    ) -> PromptPairs:
        """Prompt pairs from a table of texts.

        Prompt and answer are tokenized as one text. The space between them may end both prompts or
        begin the answers.

        Args:
            model: dense or sparse model, whose tokenizer is used.
            rows: dictionaries, or a data frame, with the columns ``clean`` and ``corrupted``, the
                prompts up to the predicted token; ``answer``, the correct continuation (" Mary"),
                one token; and ``wrong``, an incorrect one, which may be left out if no metric
                needs it. The last two may be lists of texts.
            prepend_bos: whether prompts start with the BOS token; by default as the model's own
                prompts do (``model.cfg.default_prepend_bos``, see `load_model`).
            chat: whether each prompt begins the assistant's answer in a chat, written by the
                tokenizer's own template: ``pairs.start`` is the text before it.

        Raises:
            ValueError: there is no row, the model has no tokenizer, its tokenizer lacks the chat
                template, or both `prepend_bos` and `chat` are given. Or, in a row that the message
                names: a column is missing or unknown, a cell is not a text, a prompt is empty, the
                tokenizer does not know part of a text, the clean and the corrupted prompt differ in
                token length, or an answer is not one token, or shares a token with a prompt.

        Warns:
            UserWarning: an answer without a space continues the prompt's last word.
        """
        pairs, with_bos = read_records(rows), prepends_bos(model, prepend_bos, chat=chat)
        made = pairs_of_texts(model.tokenizer, pairs, prepend_bos=with_bos, chat=chat)
        warn_of_joined_words(model.tokenizer, pairs)
        return made

    def with_spans(self, spans: Mapping[str, Span] | Sequence[Mapping[str, Span]]) -> PromptPairs:
        """The same pairs with named spans of tokens, for ``positions="spans"``.

        Args:
            spans: the columns of each span by its name, such as ``{"S1": 3, "END": -1}`` or
                ``{"subject": range(1, 4)}``, where negative columns count from the prompt's last
                token. One mapping for all pairs, or one per pair, all with the same names. Tokens
                in no span form another one, "rest".

        Raises:
            ValueError: spans overlap or exceed the prompt, pairs have different names, or a name is
                a number.
        """
        return replace(self, spans=Spans.named(spans, self.positions, self.clean.shape[1]))

    def spans_of(self, positions: Positions) -> Spans:
        """The spans that an analysis's ``positions=`` asks for.

        Raises:
            ValueError: `positions` is unknown, "tokens" with prompts of different lengths, or
                "spans" with pairs that have none.
        """
        if positions == "tokens":
            return Spans.of_tokens(self.positions, self.clean.shape[1])
        if self.spans is None:
            raise ValueError(
                'expected pairs with spans for positions="spans"; name them by '
                'pairs.with_spans({"S1": 3, "END": -1})'
            )
        return self.spans

    def by_length(self) -> list[PromptPairs]:
        """The pairs of each prompt length, shortest first, without padding."""
        by_length = list[PromptPairs]()
        for end in self.positions.unique().tolist():
            pairs, cut = self.select(self.positions == end), slice(end + 1)
            spans = pairs.spans and replace(pairs.spans, at=pairs.spans.at[:, cut])
            sides = {"clean": pairs.clean[:, cut], "corrupted": pairs.corrupted[:, cut]}
            by_length.append(replace(pairs, **sides, spans=spans))
        return by_length

    def of_one_length(self) -> PromptPairs:
        """The pairs without padding, if all prompts have one length.

        Raises:
            ValueError: the prompts differ in length.
        """
        by_length = self.by_length()
        if len(by_length) > 1:
            lengths = [pairs.clean.shape[1] for pairs in by_length]
            raise ValueError(
                "expected prompts of one length, since their columns are combined; got lengths of "
                f"{lengths} tokens. Take those of one length at a time, from pairs.by_length(), or "
                "align them by spans, with pairs.with_spans(...), where an analysis takes "
                'positions="spans"'
            )
        return by_length[0]

    def answer_rows(self) -> TokenBatch:
        """The clean prompts as rows for training, with a loss on the first answer."""
        first = (self.answers != NO_TOKEN).int().argmax(dim=1, keepdim=True)
        labels = self.clean.roll(-1, dims=1)
        labels = labels.scatter(1, self.positions[:, None], self.answers.gather(1, first))
        read = F.one_hot(self.positions, self.clean.shape[1]).bool()
        return TokenBatch(self.clean, labels, read, self.attention_mask)

    @property
    def attention_mask(self) -> Int[Tensor, "pair pos"] | None:
        """0 at the padding after each prompt; ``None`` if nothing is padded."""
        columns = torch.arange(self.clean.shape[1], device=self.positions.device)
        real = columns <= self.positions[:, None]
        return None if bool(real.all()) else real.long()

    def split(self, size: AtLeastOne) -> list[PromptPairs]:
        """Split into consecutive pieces of at most `size` pairs."""
        return [self.select(slice(start, start + size)) for start in range(0, len(self), size)]

    def read(self, logits: Float[Tensor, "pair pos vocab"]) -> Float[Tensor, "pair vocab"]:
        """The logits at each pair's position.

        Raises:
            ValueError: the logits do not have the prompts' shape.
        """
        if logits.shape[:2] != self.clean.shape:
            raise ValueError(
                f"expected logits of {len(self)} prompts of {self.clean.shape[1]} tokens; got "
                f"the shape {tuple(logits.shape)}"
            )
        return logits[torch.arange(len(logits), device=logits.device), self.positions]

    def to_records(self, tokenizer: Any) -> list[dict[str, Any]]:
        """The pairs as texts: clean and corrupted prompts, and lists of right and wrong answers.

        Prompts include the tokens that they begin with, such as BOS. An answer is the text that its
        token adds to the clean prompt.
        """
        records = []
        for row in range(len(self)):
            end = int(self.positions[row]) + 1
            clean = self.clean[row, :end].tolist()
            sides = (
                [added_text(tokenizer, clean, token) for token in tokens.tolist() if token >= 0]
                for tokens in (self.answers[row], self.wrong[row])
            )
            corrupted = tokenizer.decode(self.corrupted[row, :end].tolist())
            texts = (tokenizer.decode(clean), corrupted, *sides)
            records.append(dict(zip(COLUMNS, texts, strict=True)))
        return records

    def __repr__(self) -> str:
        longest, start = self.clean.shape[1], start_in_words(self.start)
        note = f"; {self.note}" if self.note else ""
        return f"PromptPairs({len(self)} pairs of up to {longest} tokens{start}{note})"


def _repeats(tokens: Int[Tensor, "pair token"]) -> Bool[Tensor, "pair token"]:
    """Where a row repeats one of its earlier tokens."""
    ordered, order = tokens.sort(dim=1, stable=True)
    same = F.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0)) & (ordered != NO_TOKEN)
    return torch.zeros_like(same).scatter(1, order, same)


def pairs_of_texts(
    tokenizer: Any, pairs: Sequence[PairTexts], *, prepend_bos: bool, chat: bool = False
) -> PromptPairs:
    """Tokenize pairs of texts; raises the same ValueErrors as `PromptPairs.from_texts`."""
    check_prompts(tokenizer, pairs, prepend_bos=prepend_bos)
    if chat:  # as one text, since a tokenizer may join a prompt's beginning to the text before it
        start, before = (), chat_start(tokenizer)
        pairs = [pair.with_prefix(before) for pair in pairs]
    else:
        start = prompt_start(tokenizer, prepend_bos)
        before = tokenizer.decode(list(start))
    clean, corrupted, answers, wrong = zip(*tokens_of_pairs(tokenizer, pairs, start), strict=True)
    last = torch.tensor([len(prompt) - 1 for prompt in clean])
    sides = padded(answers, NO_TOKEN), padded([tokens or [NO_TOKEN] for tokens in wrong], NO_TOKEN)
    fill = tokenizer.pad_token_id or 0  # a token that checks recognise as padding
    texts = padded(clean, fill), padded(corrupted, fill)
    return PromptPairs(*texts, *sides, last, start=before)


def padded(rows: Sequence[Sequence[int]] | Tensor, fill: int) -> Int[Tensor, "row column"]:
    """Stack rows of any lengths, padding shorter rows at the end."""
    tensors = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=fill)


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
        read = _continued if pair.joined else _apart
        *prompts, answers, wrong = read(encode, pair, where)
        one, other = ((*start, *prompt) for prompt in prompts)
        if len(one) != len(other):
            first, second = (in_tokens(tokenizer, tokens) for tokens in _differing(one, other))
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


def _continued(encode: Encoder, pair: PairTexts, where: str) -> tuple[Sequence[int], ...]:
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
