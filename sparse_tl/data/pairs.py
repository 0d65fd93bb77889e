"""Prompt pairs: a prompt with and without the information that a task needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparse_tl.arguments import Count, checked
from sparse_tl.data.batches import Rows
from sparse_tl.data.spans import Positions, Span, Spans

NO_TOKEN = -1
"""Padding value for rows with fewer answers than the longest."""


@checked
@dataclass(frozen=True, eq=False)
class PromptPairs(Rows):
    """Clean prompts with corrupted counterparts of the same length, row by row.

    Prompts of different lengths are padded *on the right*: in a causal model, padding after the
    read position cannot reach it, so it changes no metric and needs no attention mask.

    Args:
        clean: tokens of the clean prompts.
        corrupted: tokens with the information removed.
        answers: correct tokens of each pair, padded with `NO_TOKEN`.
        wrong: incorrect tokens of each pair, padded with `NO_TOKEN`.
        positions: position of each prompt's last token, where logits are read.
        spans: the span of every token, as from `with_spans`; for scores and circuits by span.

    Raises:
        ValueError: shapes do not match, there is no pair, a row has no answer, a prompt has
            several positions, or a position is out of range.
    """

    clean: Int[Tensor, "pair pos"]
    corrupted: Int[Tensor, "pair pos"]
    answers: Int[Tensor, "pair answer"]
    wrong: Int[Tensor, "pair wrong"]
    positions: Int[Tensor, " pair"]
    spans: Spans | None = None

    def __post_init__(self) -> None:
        if self.clean.shape != self.corrupted.shape:
            raise ValueError(
                f"expected clean and corrupted prompts of one shape; got "
                f"{tuple(self.clean.shape)} and {tuple(self.corrupted.shape)}"
            )
        if len(self.clean) == 0:
            raise ValueError("expected at least one prompt pair; got none")
        if self.positions.ndim > 1:
            raise ValueError(
                f"expected one position per pair; got positions of shape "
                f"{tuple(self.positions.shape)}. Answers at several positions of a prompt are "
                "several pairs: repeat the prompt, once for each position."
            )
        for name in ("answers", "wrong", "positions"):
            if len(getattr(self, name)) != len(self.clean):
                raise ValueError(
                    f"expected {name} for {len(self.clean)} pairs; got {len(getattr(self, name))}"
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
                f"expected spans of the prompts' shape {tuple(self.clean.shape)}; got "
                f"{tuple(self.spans.at.shape)}"
            )

    @staticmethod
    def from_texts(
        tokenize: Callable[[str], Sequence[int]],
        clean: Sequence[str],
        corrupted: Sequence[str],
        answers: Sequence[Sequence[str]],
        wrong: Sequence[Sequence[str]],
    ) -> PromptPairs:
        """Tokenize texts into pairs.

        Args:
            tokenize: function from text to tokens, including tokens that all prompts start with;
                answers are tokenized by `single_token`, without those.
            clean: clean prompts, up to the predicted token.
            corrupted: corrupted prompts.
            answers: correct continuations of each pair, one token each (" Mary").
            wrong: incorrect continuations of each pair, one token each.

        Raises:
            ValueError: a pair differs in token length, an answer has several tokens, or a single
                text is given instead of a list.
        """
        for name, texts in {"answers": answers, "wrong": wrong}.items():
            for row, some in enumerate(texts):
                if isinstance(some, str):
                    raise ValueError(
                        f"expected a list of texts for each pair in {name}; pair {row} has "
                        f"{some!r}, whose characters would be taken for {name}. Write [{some!r}]."
                    )
        lists = (clean, corrupted, answers, wrong)
        if len({len(some) for some in lists}) != 1 or not clean:
            raise ValueError(
                f"expected as many clean as corrupted prompts, answers and wrong answers, at least "
                f"one of each; got {[len(some) for some in lists]}"
            )
        first, second = ([list(tokenize(text)) for text in texts] for texts in (clean, corrupted))
        for row, (one, other) in enumerate(zip(first, second, strict=True)):
            if len(one) != len(other):
                raise ValueError(
                    f"expected clean and corrupted prompts of equal token length; pair {row} has "
                    f"{len(one)} and {len(other)}: {clean[row]!r} / {corrupted[row]!r}"
                )
        start = len(tokenize(""))

        def tokens_of(texts: Sequence[str]) -> list[int]:
            return [single_token(tokenize, text, start) for text in texts]

        return PromptPairs(
            padded(first, 0),
            padded(second, 0),
            padded([tokens_of(texts) for texts in answers], NO_TOKEN),
            padded([tokens_of(texts) for texts in wrong], NO_TOKEN),
            torch.tensor([len(one) - 1 for one in first]),
        )

    def with_spans(self, spans: Mapping[str, Span] | Sequence[Mapping[str, Span]]) -> PromptPairs:
        """The same pairs with named spans of tokens, for ``positions="spans"``.

        Args:
            spans: the columns of each span by its name, such as ``{"S1": 3, "END": -1}`` or
                ``{"subject": range(1, 4)}``, where negative columns count from the prompt's last
                token. One mapping for all pairs, or one per pair with the same names. Tokens in
                no span belong to a further one, "rest".

        Raises:
            ValueError: spans share a token or leave the prompt, pairs differ in names, or a name
                is a number.
        """
        return replace(self, spans=Spans.named(spans, self.positions, self.clean.shape[1]))

    def spans_of(self, positions: Positions | str) -> Spans:
        """The spans that ``positions=`` of an analysis asks for.

        Raises:
            ValueError: `positions` is unknown; "tokens" for prompts that differ in length; "spans"
                for pairs without.
        """
        if positions == "tokens":
            return Spans.of_tokens(self.positions, self.clean.shape[1])
        if positions != "spans":
            raise ValueError(
                f"expected positions of {get_args(Positions)}, or None; got {positions!r}"
            )
        if self.spans is None:
            raise ValueError(
                'expected pairs with spans for positions="spans"; name them by '
                'pairs.with_spans({"S1": 3, "END": -1})'
            )
        return self.spans

    @checked
    def split(self, size: Count) -> list[PromptPairs]:
        """Split into consecutive pieces of at most `size` pairs.

        Raises:
            ValueError: the size is below 1.
        """
        if size < 1:
            raise ValueError(f"expected a batch size of at least 1; got {size}")
        return [self.select(slice(start, start + size)) for start in range(0, len(self), size)]

    def read(self, logits: Float[Tensor, "pair pos vocab"]) -> Float[Tensor, "pair vocab"]:
        """The logits at each pair's position."""
        return logits[torch.arange(len(logits), device=logits.device), self.positions]

    def to_records(self, tokenizer: Any) -> list[dict[str, Any]]:
        """Human-readable texts of the pairs: clean, corrupted, answers, wrong."""
        records = []
        for row in range(len(self)):
            end = int(self.positions[row]) + 1
            records.append(
                {
                    "clean": tokenizer.decode(self.clean[row, :end].tolist()),
                    "corrupted": tokenizer.decode(self.corrupted[row, :end].tolist()),
                    "answers": [
                        tokenizer.decode([t]) for t in self.answers[row].tolist() if t >= 0
                    ],
                    "wrong": [tokenizer.decode([t]) for t in self.wrong[row].tolist() if t >= 0],
                }
            )
        return records

    def __repr__(self) -> str:
        return f"PromptPairs({len(self)} pairs of up to {self.clean.shape[1]} tokens)"


def single_token(tokenize: Callable[[str], Sequence[int]], text: str, start: int = 0) -> int:
    """The single token of a text, after the `start` tokens that every prompt begins with.

    Raises:
        ValueError: the text does not have exactly one token.
    """
    tokens = list(tokenize(text))[start:]
    if len(tokens) != 1:
        raise ValueError(f"expected an answer of a single token; {text!r} has {len(tokens)}")
    return tokens[0]


def padded(rows: Sequence[Sequence[int]] | Tensor, fill: int) -> Int[Tensor, "row column"]:
    """Stack rows of any lengths, padding shorter rows at the end."""
    tensors = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=fill)
