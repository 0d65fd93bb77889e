"""Prompts with target tokens, from token ids, texts, tables, files or prompt pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl.arguments import Count, Seed, checked
from sparse_tl.data.batches import Rows, TokenBatch, refuse_rows
from sparse_tl.data.documents import json_rows
from sparse_tl.data.pairs import NO_TOKEN, PromptPairs, padded
from sparse_tl.data.prompts import Encoder, added_text, prompt_start, start_in_words, together


@checked
@dataclass(frozen=True, eq=False)
class TargetDataset(Rows):
    """Prompts with targets, as rows in which the target tokens carry the loss.

    Args:
        rows: token batch; ``loss_mask`` is true where the logits predict a target token, and
            ``labels`` holds that token.
        start: text of the tokens that begin every row, such as BOS; ``None`` if unknown, as for
            rows given as tokens.

    Raises:
        ValueError: a row has no target, or a target lies on padding.
    """

    rows: TokenBatch
    start: str | None = None

    def __post_init__(self) -> None:
        masked, attention = self.rows.loss_mask, self.rows.attention_mask
        refuse_rows(~masked.any(dim=1), "there is no target")
        if attention is not None:
            refuse_rows((masked & (attention == 0)).any(dim=1), "its target is on padding")

    @staticmethod
    def from_tokens(
        tokens: Sequence[Sequence[Count]] | Int[Tensor, "row pos"],
        spans: Sequence[tuple[int, int]],
        *,
        pad_token: int | None = None,
    ) -> TargetDataset:
        """Rows from token ids, each with the span of its target.

        Args:
            tokens: prompt and target of each row, of any lengths.
            spans: ``(start, stop)`` of each target; the first token of a row cannot be predicted.
            pad_token: padding token, which fills shorter rows; it is masked at the ends of a row,
                and not allowed in a target.

        Raises:
            ValueError: there is no row, a span does not fit its row, or a target contains padding.
        """
        if len(tokens) != len(spans) or len(tokens) == 0:
            raise ValueError(f"give each row one span, not {len(spans)} to {len(tokens)} rows")
        filled = padded(tokens, 0 if pad_token is None else pad_token)
        labels, attention = torch.zeros_like(filled), torch.zeros_like(filled)
        loss_mask = torch.zeros_like(filled, dtype=torch.bool)
        for row, (start, stop) in enumerate(spans):
            length = len(tokens[row])
            if not 0 < start < stop <= length:
                raise ValueError(
                    f"the target span ({start}, {stop}) of row {row} must hold a token, lie in "
                    f"1..{length}, and have one before it"
                )
            is_text = filled[row, :length] != (NO_TOKEN if pad_token is None else pad_token)
            if not is_text[start:stop].all():
                raise ValueError(f"the target of row {row} has padding in it")
            text = is_text.nonzero()[:, 0].tolist()
            attention[row, text[0] : text[-1] + 1] = 1
            labels[row, start - 1 : stop - 1] = filled[row, start:stop]
            loss_mask[row, start - 1 : stop - 1] = True
        same = bool(attention.all())
        return TargetDataset(TokenBatch(filled, labels, loss_mask, None if same else attention))

    @staticmethod
    def from_texts(
        tokenizer: Any,
        texts: Sequence[str],
        targets: Sequence[str],
        *,
        prepend_bos: bool | None = None,
    ) -> TargetDataset:
        """Rows from texts and the targets that follow them.

        Text and target are tokenized together. The space between them may end the text or begin
        the target.

        Args:
            tokenizer: a Hugging Face tokenizer.
            texts: prompts.
            targets: target of each prompt.
            prepend_bos: whether rows start with the BOS token; by default, the tokenizer decides. A
                model may differ: pass ``model.cfg.default_prepend_bos``.

        Raises:
            ValueError: a target is empty, or begins inside a token.
        """
        start, encode = prompt_start(tokenizer, prepend_bos), Encoder(tokenizer)
        both = list(zip(texts, targets, strict=True))
        encode.prepare(text + end for text, target in both for end in ("", target))
        rows, spans = [], []
        for row, (text, target) in enumerate(both):
            if not target.strip():
                raise ValueError(f"the target of row {row} is {target!r:.99}, without a text")
            before, tokens = together(encode, text, target, f"the target of row {row}")
            rows.append([*start, *before, *tokens])
            spans.append((len(rows[-1]) - len(tokens), len(rows[-1])))
        dataset = TargetDataset.from_tokens(rows, spans)
        return replace(dataset, start=tokenizer.decode(list(start)))

    @staticmethod
    def from_records(
        tokenizer: Any,
        records: Iterable[Mapping[str, Any]] | pd.DataFrame,
        *,
        text: str = "text",
        target: str = "target",
        **options: Any,
    ) -> TargetDataset:
        """Rows from a table: dictionaries, such as those of a dataset, or a data frame.

        Args:
            tokenizer: a Hugging Face tokenizer.
            records: dictionaries with a text and a target, or a data frame. A file of JSON lines
                is read by ``pandas.read_json(file, lines=True, dtype=False)``.
            text: key of the text.
            target: key of the target.
            **options: further arguments of `from_texts`.

        Raises:
            ValueError: a record lacks a text; otherwise as in `from_texts`.
        """
        rows = records.to_dict("records") if isinstance(records, pd.DataFrame) else records
        texts, targets = [], []
        for row, record in enumerate(rows):
            for key, column in ((text, texts), (target, targets)):
                if not (isinstance(record, Mapping) and isinstance(record.get(key), str)):
                    raise ValueError(f"record {row} has no text as {key!r}: {record!r:.200}")
                column.append(record[key])
        return TargetDataset.from_texts(tokenizer, texts, targets, **options)

    @staticmethod
    def from_pairs(pairs: PromptPairs, *, seed: Seed = 0) -> TargetDataset:
        """The clean prompts with one answer each, drawn at random if there are several."""
        generator = torch.Generator().manual_seed(seed)
        weights = (pairs.sides[0][..., 0] != NO_TOKEN).float()
        drawn = torch.multinomial(weights, 1, generator=generator)[:, 0]
        return TargetDataset(pairs.answer_rows(drawn), pairs.start)

    @staticmethod
    def from_windows(windows: Int[Tensor, "window pos"]) -> TargetDataset:
        """Rows of running text, in which every token after the first of a window is a target."""
        return TargetDataset(TokenBatch.next_token(windows))

    @property
    def n_targets(self) -> int:
        """Total number of target tokens."""
        return int(self.rows.loss_mask.sum())

    def split(self, held_out: float, *, seed: Seed = 0) -> tuple[TargetDataset, TargetDataset]:
        """Shuffle the rows and split them into two parts.

        Args:
            held_out: fraction of the rows in the second part; each part gets at least one row.
            seed: random seed for the shuffling.

        Raises:
            ValueError: the fraction is not between 0 and 1, or there are fewer than two rows.
        """
        if not 0 < held_out < 1 or len(self) < 2:
            raise ValueError(
                f"a share of {held_out} of {len(self)} rows leaves one of the parts empty: give at "
                "least two rows and 0 < held_out < 1, or, to fit_head_gates, a dataset as held_out"
            )
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        n_held_out = min(max(1, round(held_out * len(self))), len(self) - 1)
        return self.select(order[n_held_out:]), self.select(order[:n_held_out])

    def to_records(self, tokenizer: Any) -> list[dict[str, str]]:
        """Human-readable rows: the text before the first target token, and what the target adds."""
        records = []
        for row in range(len(self)):
            one = self.rows.select(slice(row, row + 1)).trimmed(causal=True)
            read = one.loss_mask[0].nonzero()[:, 0]
            before = one.tokens[0, : int(read[0]) + 1].tolist()
            target = added_text(tokenizer, before, one.labels[0, read].tolist())
            records.append({"text": tokenizer.decode(before), "target": target})
        return records

    def __repr__(self) -> str:
        return (
            f"TargetDataset({len(self)} prompts of up to {self.rows.tokens.shape[1]} tokens, "
            f"{self.n_targets} of them targets{start_in_words(self.start)})"
        )


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object per line; empty lines are skipped."""
    records = []
    for line, record in json_rows(Path(path)):
        if not isinstance(record, dict):
            raise ValueError(f"expected a JSON object, {{...}}, in {line}; got {record!r:.99}")
        records.append(record)
    return records
