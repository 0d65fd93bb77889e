"""The given tokens of sampled windows: the tokenizer's separator, and beginnings of texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl.data import TokenBatch
from sparse_tl.data.documents import separator
from sparse_tl.data.prompts import check_known
from sparse_tl.data.windows import check_window
from sparse_tl.lens import Adapter, check_tokens

GIVEN = 1 / 4
"""Largest share of a window that a beginning may fill."""
_BEGINNINGS = files("sparse_tl.training").joinpath("beginnings.json")


@dataclass(frozen=True)
class Starts:
    """The given tokens of every window.

    Args:
        window: tokens per window.
        alone: the separator; empty if the tokenizer has none.
        continued: the separator and a beginning, in the order of the windows.
    """

    window: int
    alone: list[int]
    continued: list[list[int]]

    @staticmethod
    def of(adapter: Adapter, window: int, texts: Sequence[str] | None, seed: int) -> Starts:
        """Tokenise the beginnings; checks that model, tokenizer and window allow sampling."""
        tokenizer = adapter.model.tokenizer
        check_window(tokenizer, window)
        if window > adapter.n_ctx:
            raise ValueError(
                f"expected a window of at most {adapter.n_ctx} tokens, the model's context; got "
                f"{window}"
            )
        if not adapter.causal or adapter.d_vocab != adapter.d_vocab_out:
            raise ValueError(
                f"expected a causal model that predicts the tokens that it reads; {adapter.name!r} "
                + ("predicts other tokens" if adapter.causal else "is not causal")
            )
        first = separator(tokenizer)
        if first is None and not texts:
            raise ValueError(
                "expected a tokenizer with a BOS or EOS token, with which windows start; this one "
                "has neither. Set one (tokenizer.bos_token = ...), or give beginnings."
            )
        alone = [] if first is None else [first]
        for text in texts or ():
            check_known(tokenizer, text, "beginnings: ")
        texts = json.loads(_BEGINNINGS.read_text("utf-8")) if texts is None else texts
        longest = int(GIVEN * window)
        how = {"add_special_tokens": False, "verbose": False}
        continued = [alone + list(tokenizer(text, **how)["input_ids"][:longest]) for text in texts]
        if not all(continued):
            raise ValueError(
                f"expected beginnings of at least one token, cut to {longest}, a quarter of the "
                f"window, since the tokenizer has neither BOS nor EOS; got "
                f"{texts[continued.index([])]!r}"
            )
        for tokens in continued or [alone]:
            check_tokens(adapter, torch.tensor(tokens))
        order = np.random.default_rng(seed).permutation(len(continued))
        return Starts(window, alone, [continued[i] for i in order])

    def __getitem__(self, row: int) -> list[int]:
        """The given tokens of a window."""
        if not self.continued or (self.alone and row % 2 == 0):
            return self.alone
        return self.continued[(row // 2 if self.alone else row) % len(self.continued)]

    def as_rows(self, tokens: Int[Tensor, "window pos"]) -> TokenBatch:
        """Rows with a loss on the tokens that the model wrote."""
        rows = TokenBatch.next_token(tokens)
        n_given = torch.tensor([[len(self[row])] for row in range(len(tokens))])
        written = torch.arange(1, self.window + 1) >= n_given
        return replace(rows, loss_mask=rows.loss_mask & written)
