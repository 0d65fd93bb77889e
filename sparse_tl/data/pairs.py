"""Prompt pairs: a prompt with and without the information that a task needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparse_tl.calls.arguments import AtLeastOne, checked
from sparse_tl.data.batches import Rows, TokenBatch
from sparse_tl.data.chat import chat_start
from sparse_tl.data.prompts import ModelWithTokenizer, prepends_bos, prompt_start, start_in_words
from sparse_tl.data.records import (
    COLUMNS,
    PairTexts,
    check_prompts,
    read_records,
    tokens_of_pairs,
    warn_of_joined_words,
)
from sparse_tl.data.spans import Positions, Span, Spans
from sparse_tl.data.token_text import added_text

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
