"""Prompt pairs: a prompt with and without what a task needs; and named spans of its tokens."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonprefix
from typing import Annotated, Any, Literal, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import BaseModel, BeforeValidator, StrictStr, ValidationError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.data.batches import Rows, TokenBatch, refuse_rows
from sparse_tl.data.prompts import (
    Encoder,
    ModelWithTokenizer,
    Tokens,
    added_text,
    chat_start,
    check_known,
    continues_a_word,
    in_tokens,
    prepends_bos,
    prompt_start,
    start_in_words,
    together,
)

NO_TOKEN = -1
"""Padding value for rows with fewer answers than the longest."""
Positions = Literal["tokens", "spans"]
"""The unit of position: each token, in prompts of one length, or a named span."""
Span = int | range | Sequence[int]
"""One or several columns; negative columns count from the end of the prompt."""
REST = "rest"
"""The span of the tokens that belong to no other span."""


@checked
@dataclass(frozen=True, eq=False)
class Spans(Rows):
    """The span of every token, also of answers; padding belongs to the span of the last token.

    Args:
        at: index into `names`.
        names: names of the spans.
    """

    at: Int[Tensor, "pair pos"]
    names: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Spans({', '.join(self.names)})"


@dataclass(frozen=True, eq=False)
class Forced:
    """Prompt pairs as a model runs them: each prompt followed by an answer but for its last token.

    Under this *teacher forcing*, a single pass gives the probability of every token of an answer
    after those before it. A pair has a row for each answer, unless a row of another answer begins
    with the same tokens: answers of one token need no row but the prompt. What the model predicts
    at the positions that are read, row by row, are the *labels*; no two of a pair follow the same
    text.

    Args:
        clean: clean prompts with answers.
        corrupted: corrupted prompts with the same answers.
        pair: the pair of each row.
        ends: position of each row's last token.
        read: the positions that are read.
        where: label of each token of the right answers and, after them, the wrong ones; any label
            at padding.
        spans: the span of every token, if the pairs have spans.
    """

    clean: Int[Tensor, "row pos"]
    corrupted: Int[Tensor, "row pos"]
    pair: Int[Tensor, " row"]
    ends: Int[Tensor, " row"]
    read: Bool[Tensor, "row pos"]
    where: Int[Tensor, "pair answer token"]
    spans: Spans | None

    def per_pair(self, values: Float[Tensor, " label"]) -> Float[Tensor, " pair"]:
        """The mean over the labels of each pair."""
        pairs = self.pair[:, None].expand_as(self.read)[self.read]
        total = values.new_zeros(len(self.where)).index_add(0, pairs, values)
        return total / pairs.bincount()


@checked
@dataclass(frozen=True, eq=False)
class PromptPairs(Rows):
    """Clean prompts with corrupted counterparts of the same length, row by row.

    An answer is a row of tokens. Its probability is that of the whole: the product of those of its
    tokens, each after the ones before it.

    Prompts of different lengths are padded *on the right*: in a causal model, padding after the
    read position cannot affect it, so it changes no metric and needs no attention mask. Analyses
    recognise padding on the left by the tokenizer's padding token, and refuse it.

    Args:
        clean: tokens of the clean prompts.
        corrupted: tokens with the information removed.
        answers: correct answers of each pair: tokens, ``[pair, answer]``, or rows of several
            tokens, ``[pair, answer, token]``; padded with `NO_TOKEN`. An answer counts once.
        wrong: incorrect answers of each pair, likewise.
        positions: position of each prompt's last token, which predicts the answer. Answers at
            several positions of a prompt make several pairs: repeat the prompt, once for each.
        spans: the span of every token, as from `with_spans`; for scores and circuits by span.
        start: text of the tokens that begin every prompt, such as BOS; ``None`` if unknown, as for
            prompts given as tokens.
        note: a task's remark on its prompts, such as which words it left out.

    Raises:
        ValueError: shapes do not match, there is no pair, a row has no answer, a negative token,
            an answer that is also wrong or begins with another one, or a position is out of range.
    """

    clean: Int[Tensor, "pair pos"]
    corrupted: Int[Tensor, "pair pos"]
    answers: Int[Tensor, "pair answer *token"]
    wrong: Int[Tensor, "pair wrong *token"]
    positions: Int[Tensor, " pair"]
    spans: Spans | None = None
    start: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if len(self.clean) == 0:
            raise ValueError("there is no prompt pair")
        for name, tokens in zip(("answers", "wrong"), self.sides, strict=True):
            given = tokens != NO_TOKEN
            faulty = (given & (tokens < 0)).any(dim=2) | (given.diff(dim=2) & given[..., 1:]).any(2)
            fault = f"`{name}` has a token that is negative, or that follows padding"
            refuse_rows(faulty.any(dim=1), fault, tokens)
            once = tokens.masked_fill(_repeats(tokens)[..., None], NO_TOKEN)
            object.__setattr__(self, name, once.view_as(getattr(self, name)))
        both = torch.cat([self.answers, self.wrong], dim=1)
        refuse_rows(_repeats(self.tokens).any(dim=1), "an answer is a wrong answer too", both)
        refuse_rows((self.answers < 0).flatten(1).all(dim=1), "there is no answer", self.answers)
        width, at = self.clean.shape[1], self.positions
        refuse_rows((at < 0) | (at >= width), f"positions are in 0..{width - 1}", at)
        n_more = self.tokens.shape[2] - 1
        if self.spans is not None and self.spans.at.shape != (len(at), width + n_more):
            raise ValueError("spans need the prompts' shape; use pairs.with_spans(...)")
        if n_more:
            _ = self.forced  # refuses answers that begin with another

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
                of any number of tokens; and ``wrong``, an incorrect one, which all rows may leave
                out if no metric needs it. The last two may be lists of texts.
            prepend_bos: whether prompts start with the BOS token; by default as the model's own
                prompts do (``model.cfg.default_prepend_bos``, see `load_model`).
            chat: whether each prompt begins the assistant's answer in a chat, written by the
                tokenizer's own template: ``pairs.start`` is the text before it.

        Raises:
            ValueError: the model has no tokenizer, its tokenizer lacks the chat template, or both
                `prepend_bos` and `chat` are given. Or, in a row that the message names: a column is
                missing or unknown, a cell is not a text, a prompt is empty, the tokenizer does not
                know part of a text, the clean and the corrupted prompt differ in token length, or
                an answer shares a token with a prompt or begins with another answer.

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
                in no span form another one, "rest". Those of answers belong to the span of the
                prompt's last token.

        Raises:
            ValueError: spans overlap or exceed the prompt, pairs have different names, or a name is
                a number.
        """
        ends, width = self.positions.cpu(), self.clean.shape[1] + self.tokens.shape[2] - 1
        rows = [spans] * len(self) if isinstance(spans, Mapping) else spans
        names = tuple(rows[0])
        if any(name.isdigit() for name in names):
            raise ValueError(f"numbers are names of tokens, and cannot name spans, as in {names}")
        at = torch.full((len(self), width), -1)
        for row, (by_name, end) in enumerate(zip(rows, ends.tolist(), strict=True)):
            if by_name.keys() != set(names):
                raise ValueError(
                    f"all pairs need the spans {names} of the first; pair {row} has "
                    f"{tuple(by_name)}"
                )
            for index, name in enumerate(names):
                span = by_name[name]
                for column in [span] if isinstance(span, int) else span:
                    if not -end - 1 <= column <= end:
                        raise ValueError(
                            f"expected columns within the {end + 1} tokens of pair {row}; got "
                            f"{column} in {name!r}"
                        )
                    column %= end + 1
                    if at[row, column] >= 0:
                        raise ValueError(
                            f"spans may not share a token; column {column} of pair {row} is in "
                            f"{names[int(at[row, column])]!r} and in {name!r}"
                        )
                    at[row, column] = index
        others = (at < 0) & (torch.arange(width) <= ends[:, None])
        if bool(others.any()):
            names = tuple(dict.fromkeys([*names, REST]))
            at[others] = names.index(REST)
        at = torch.where(at < 0, at.gather(1, ends[:, None]), at)
        return replace(self, spans=Spans(at.to(self.positions.device), names))

    def spans_of(self, positions: Positions) -> Spans:
        """The spans that an analysis's ``positions=`` asks for."""
        if positions == "tokens":
            n_more = self.tokens.shape[2] - 1
            last = self.of_one_length().clean.shape[1] - 1 + n_more
            columns = torch.arange(self.clean.shape[1] + n_more, device=self.clean.device)
            at = columns.clamp(max=last).repeat(len(self), 1)
            return Spans(at, tuple(map(str, range(last + 1))))
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
            spans = pairs.spans
            if spans is not None:
                spans = replace(spans, at=spans.at[:, : end + self.tokens.shape[2]])
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

    def answer_rows(self, which: Int[Tensor, " pair"] | None = None) -> TokenBatch:
        """The clean prompts with one answer each as rows for training, with a loss on the answer.

        `which` is the column of each pair's answer; by default, it is the first answer.
        """
        rows = torch.arange(len(self), device=self.positions.device)
        if which is None:
            which = (self.sides[0][..., 0] != NO_TOKEN).int().argmax(dim=1)
        answer = self.sides[0][rows, which.to(rows.device)][:, None]
        forced = replace(self, answers=answer, wrong=answer[:, :0], spans=None).forced
        labels = forced.clean.roll(-1, dims=1)
        labels[forced.read] = answer[answer != NO_TOKEN]
        mask = mask_of_padding(forced.ends, labels.shape[1])
        return TokenBatch(forced.clean, labels, forced.read, mask)

    @property
    def attention_mask(self) -> Int[Tensor, "pair pos"] | None:
        """0 at the padding after each prompt; ``None`` if nothing is padded."""
        return mask_of_padding(self.positions, self.clean.shape[1])

    @property
    def sides(self) -> tuple[Int[Tensor, "pair answer token"], Int[Tensor, "pair wrong token"]]:
        """The tokens of the right and of the wrong answers, also if all have one."""
        right, wrong = self.answers, self.wrong
        return (right, wrong) if right.ndim == 3 else (right[..., None], wrong[..., None])

    @property
    def tokens(self) -> Int[Tensor, "pair both token"]:
        """The tokens of the right answers and, after them, the wrong ones."""
        return torch.cat(self.sides, dim=1)

    def split(self, size: AtLeastOne) -> list[PromptPairs]:
        """Split into consecutive pieces of at most `size` pairs."""
        return [self.select(slice(start, start + size)) for start in range(0, len(self), size)]

    @property
    def chance(self) -> float:
        """The mean share of right answers among all answers of a pair."""
        right, wrong = ((side[..., 0] != NO_TOKEN).sum(dim=1) for side in self.sides)
        return (right / (right + wrong)).double().mean().item()

    def of_one_token(self, why: str) -> PromptPairs:
        """The pairs, if all answers have one token; otherwise a ValueError, which says why."""
        if bool((self.tokens[..., 1:] != NO_TOKEN).any()):
            raise ValueError(f"expected answers of a single token, since {why}")
        answers, wrong = (side[..., 0] for side in self.sides)
        return replace(self, answers=answers, wrong=wrong)

    @cached_property
    def forced(self) -> Forced:
        """The rows that a model runs: see `Forced`."""
        device, n_more = self.clean.device, self.tokens.shape[2] - 1
        rows, where, n_labels = list[tuple[int, int, Tokens]](), list[list[int]](), 0
        if not n_more:  # the prompts are the rows, whatever the answers: there can be many
            rows = [(pair, 0, ()) for pair in range(len(self))]
        for pair, both in enumerate(self.tokens.tolist() if n_more else ()):
            answers = [tuple(token for token in answer if token != NO_TOKEN) for answer in both]
            labels = dict[Tokens, int]()  # by the tokens of an answer that come before
            befores = dict.fromkeys(answer[:-1] for answer in answers)
            for before in sorted(befores, key=len, reverse=True):
                new = [n for n in range(len(before) + 1) if before[:n] not in labels]
                if new:
                    rows.append((pair, new[0], before))
                    labels |= {before[:n]: n_labels + i for i, n in enumerate(new)}
                    n_labels += len(new)
            if begun := [[*answer] for answer in answers if answer and answer in labels]:
                raise ValueError(
                    f"row {pair}: an answer begins with another one, {begun[0]}, which includes "
                    "it: leave out one of them"
                )
            for answer in answers:
                at = [labels[answer[:n]] for n in range(len(answer))]
                where.append(at + [0] * (n_more + 1 - len(at)))
        columns = [*zip(*rows, strict=True)]
        pair, first = (torch.tensor(column, device=device) for column in columns[:2])
        before = padded([[*before, NO_TOKEN] for before in columns[2]], NO_TOKEN).to(device)
        length, ends = (before != NO_TOKEN).sum(dim=1), self.positions[pair]
        n = torch.arange(self.clean.shape[1] + n_more, device=device) - ends[:, None]
        added = before.gather(1, (n - 1).clamp(0, before.shape[1] - 1))
        clean, corrupted = (
            added.where((n > 0) & (added != NO_TOKEN), F.pad(prompts[pair], (0, n_more)))
            for prompts in (self.clean, self.corrupted)
        )
        read = (n >= first[:, None]) & (n <= length[:, None])
        shape, spans = self.tokens.shape, self.spans and self.spans.select(pair)
        at = torch.tensor(where).view(shape) if n_more else pair[:, None, None].expand(shape)
        return Forced(clean, corrupted, pair, ends + length, read, at.to(device), spans)

    def read(self, logits: Float[Tensor, "row pos vocab"]) -> Float[Tensor, "label vocab"]:
        """The logits that metrics read, of the rows `forced.clean`.

        Where all answers have one token, these are the clean prompts, read at `positions`.
        """
        n_rows, n_tokens = self.forced.clean.shape
        if logits.shape[:2] != (n_rows, n_tokens):
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} are not those of {n_rows} prompts of "
                f"{n_tokens} tokens"
            )
        return logits[self.forced.read]

    def to_records(self, tokenizer: Any) -> list[dict[str, Any]]:
        """The pairs as texts: clean and corrupted prompts, and lists of right and wrong answers.

        Prompts include the tokens that they begin with, such as BOS. An answer is the text that its
        tokens add to the clean prompt.
        """
        records = []
        for row in range(len(self)):
            end = int(self.positions[row]) + 1
            clean = self.clean[row, :end].tolist()
            sides = (
                [added_text(tokenizer, clean, answer[answer >= 0].tolist()) for answer in given]
                for given in (side[row][side[row, :, 0] >= 0] for side in self.sides)
            )
            corrupted = tokenizer.decode(self.corrupted[row, :end].tolist())
            texts = (tokenizer.decode(clean), corrupted, *sides)
            records.append(dict(zip(COLUMNS, texts, strict=True)))
        return records

    def __repr__(self) -> str:
        longest, start = self.clean.shape[1], start_in_words(self.start)
        note = f"; {self.note}" if self.note else ""
        return f"PromptPairs({len(self)} pairs of up to {longest} tokens{start}{note})"


def _repeats(answers: Int[Tensor, "pair answer token"]) -> Bool[Tensor, "pair answer"]:
    """Where a pair repeats one of its earlier answers."""
    number, *more = answers.unbind(dim=2)
    for column in more:
        number = (number * 2**32 + column).unique(return_inverse=True)[1]
    number = number.masked_fill(answers[..., 0] == NO_TOKEN, NO_TOKEN)
    ordered, order = number.sort(dim=1, stable=True)
    same = F.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0)) & (ordered != NO_TOKEN)
    return torch.zeros_like(same).scatter(1, order, same)


def mask_of_padding(ends: Int[Tensor, " row"], width: int) -> Int[Tensor, "row pos"] | None:
    """0 after the last token of each row; ``None`` if nothing is padded."""
    real = torch.arange(width, device=ends.device) <= ends[:, None]
    return None if bool(real.all()) else real.long()


def pairs_of_texts(
    tokenizer: Any, pairs: Sequence[PairTexts], *, prepend_bos: bool, chat: bool = False
) -> PromptPairs:
    """Tokenize pairs of texts; raises the same ValueErrors as `PromptPairs.from_texts`."""
    check_prompts(tokenizer, pairs, prepend_bos=prepend_bos)
    if chat:  # as one text, since a tokenizer may join a prompt's beginning to the text before it
        start, before = (), chat_start(tokenizer)
        pairs = [
            pair._replace(clean=before + pair.clean, corrupted=before + pair.corrupted)
            for pair in pairs
        ]
    else:
        start = prompt_start(tokenizer, prepend_bos)
        before = tokenizer.decode(list(start))
    clean, corrupted, answers, wrong = zip(*tokens_of_pairs(tokenizer, pairs, start), strict=True)
    last = torch.tensor([len(prompt) - 1 for prompt in clean])
    longest = max(len(answer) for side in (answers, wrong) for row in side for answer in row)
    sides = _answer_tensor(answers, longest), _answer_tensor(wrong, longest)
    fill = tokenizer.pad_token_id or 0  # a token that checks recognise as padding
    texts = padded(clean, fill), padded(corrupted, fill)
    return PromptPairs(*texts, *sides, last, start=before)


def _answer_tensor(
    rows: Sequence[Sequence[Tokens]], longest: int
) -> Int[Tensor, "pair answer *token"]:
    """The answers of pairs as one tensor; a pair without any has one that is only padding."""
    width = max(1, *map(len, rows))
    filled = [answer for row in rows for answer in [*row, *[()] * (width - len(row))]]
    answers = padded([[*answer, *[NO_TOKEN] * (longest - len(answer))] for answer in filled], 0)
    return answers.view(len(rows), width, *[longest] * (longest > 1))


def padded(rows: Sequence[Sequence[int]] | Tensor, fill: int) -> Int[Tensor, "row column"]:
    """Stack rows of any lengths, padding shorter rows at the end."""
    tensors = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=fill)


COLUMNS = ("clean", "corrupted", "answer", "wrong")


class PairTexts(NamedTuple):
    """A clean prompt, its corrupted counterpart, and right and wrong answers."""

    clean: str
    corrupted: str
    answers: tuple[str, ...]
    wrong: tuple[str, ...]
    joined: bool = True
    """Whether answers are encoded as continuations of the prompts, or each as its own text."""

    @property
    def both_sides(self) -> tuple[str, ...]:
        """Right and wrong answers."""
        return *self.answers, *self.wrong


_Texts = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda given: (given,) if isinstance(given, str) else given),
]


class _Record(BaseModel, extra="forbid"):
    """A row of a table of prompt pairs."""

    clean: StrictStr
    corrupted: StrictStr
    answer: _Texts
    wrong: _Texts = ()


def read_records(rows: Sequence[Mapping[str, Any]] | pd.DataFrame) -> list[PairTexts]:
    """The texts in a table of prompt pairs; arguments and errors as in `PromptPairs.from_texts`."""
    records: Any = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else rows
    pairs = []
    for row, record in enumerate(records):
        try:
            read = _Record.model_validate(record)
        except ValidationError as error:
            first = error.errors()[0]
            place = "".join(f"{part!r}: " for part in first["loc"])
            said = first["msg"].replace("valid tuple", "text or a list of texts")
            raise ValueError(
                f"row {row}: {place}{said}; got {first['input']!r:.99}. A row has the texts "
                "`clean`, `corrupted` and `answer`, perhaps `wrong`, and nothing else."
            ) from None
        pairs.append(PairTexts(read.clean, read.corrupted, read.answer, read.wrong))
    if not pairs:
        raise ValueError("there is no prompt pair")
    without = [row for row, pair in enumerate(pairs) if not pair.wrong]
    if 0 < len(without) < len(pairs):
        raise ValueError(f"row {without[0]}: give `wrong` here too, as in other rows, or in none")
    return pairs


def check_prompts(tokenizer: Any, pairs: Sequence[PairTexts], *, prepend_bos: bool) -> None:
    """Check that the tokenizer knows all texts, and that no prompt starts with BOS already."""
    known: set[str] = set()
    for row, pair in enumerate(pairs):
        for name, text in zip(COLUMNS[:2], pair[:2], strict=True):
            if not text:
                raise ValueError(f"row {row}: the {name} prompt is empty")
            if prepend_bos and text.startswith(tokenizer.bos_token):
                raise ValueError(
                    f"row {row}: leave {tokenizer.bos_token!r} out of the {name} prompt; this "
                    "model prepends it itself"
                )
            check_known(tokenizer, text, f"row {row}, {name}: ")
        for text in pair.both_sides:
            if text not in known:
                check_known(tokenizer, text, f"row {row}, answer: ")
                known.add(text)


def warn_of_joined_words(tokenizer: Any, pairs: Sequence[PairTexts]) -> None:
    """Warn of answers that continue the prompt's last word because a space is missing."""
    encode = Encoder(tokenizer)
    joined = [
        (row, text, pair.clean.split()[-1] + text)
        for row, pair in enumerate(pairs)
        for text in pair.both_sides
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
) -> Iterator[tuple[Tokens, Tokens, list[Tokens], list[Tokens]]]:
    """The tokens of `PairTexts`, row by row: both prompts after `start`, right and wrong answers.

    Raises:
        ValueError: the prompts of a row differ in token length, or an answer is not the same tokens
            after both.
    """
    encode = Encoder(tokenizer)
    for row, pair in enumerate(pairs):
        where = f"row {row}: "
        if pair.joined:
            prompts, by_text = _continued(encode, pair, where)
        else:
            prompts = [encode(text) for text in pair[:2]]
            by_text = {text: encode(text) for text in pair.both_sides}
        answers, wrong = ([by_text[text] for text in texts] for texts in pair[2:4])
        for name, side in zip(COLUMNS[2:], (answers or [()], wrong), strict=True):
            if () in side:
                raise ValueError(f"{where}there is no answer in `{name}`")
        one, other = ((*start, *prompt) for prompt in prompts)
        if len(one) != len(other):
            around = slice(max(0, len(commonprefix([one, other])) - 2), None)
            raise ValueError(
                f"{where}expected clean and corrupted prompts of equal token length, which are "
                f"compared position by position; got {len(one)} and {len(other)} tokens, which "
                f"begin to differ in {in_tokens(tokenizer, one[around])} / "
                f"{in_tokens(tokenizer, other[around])}"
            )
        yield one, other, answers, wrong


def _continued(
    encode: Encoder, pair: PairTexts, where: str
) -> tuple[list[Tokens], dict[str, Tokens]]:
    """The tokens of both prompts, and by text those of the answers that continue both of them."""
    encode.prepare(prompt + text for prompt in pair[:2] for text in ("", *pair.both_sides))
    prompts, by_text = list[Tokens](), dict[str, Tokens]()
    for name, prompt in zip(COLUMNS, pair[:2], strict=False):
        known: Tokens | None = None
        for text in pair.both_sides:
            before, tokens = together(encode, prompt, text, f"{where}an answer")
            if known not in (None, before):
                raise ValueError(
                    f"{where}expected a {name} prompt that all answers continue; {prompt!r:.200} "
                    f"ends in a space that belongs to {text!r}, but not to others. Move the space "
                    "to the start of the answers"
                )
            known = before
            if by_text.setdefault(text, tokens) != tokens:
                raise ValueError(
                    f"{where}expected an answer that is the same tokens after both prompts; "
                    f"{text!r} is others after {prompt!r:.200}"
                )
        prompts.append(encode(prompt) if known is None else known)
    return prompts, by_text
