"""Short texts as training rows: the beginnings of sentences, alone, after BOS, and in a chat.

Windows of text have most of their losses far from the beginning, and tasks ask for one token. Gates
that are trained on these alone close what any other short prompt needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from sparse_tl.calls.arguments import Seed, checked
from sparse_tl.data import TokenBatch
from sparse_tl.data.pairs import padded
from sparse_tl.data.prompts import chat_start
from sparse_tl.data.streams import check_window

TOKENS = (4, 64)
"""Least and largest number of tokens of a row, besides those that precede the text."""
_CHARACTERS = 16
"""Characters per token to tokenise; more than text has, so that a row's last token is whole."""
_STARTS = re.compile(r"""\A\s*|[.!?]["'”’)\]]*\s+|[。！？]|\n\s*""")
"""What precedes a sentence: the beginning of a document, the end of a sentence, or of a line."""


@checked
def short_rows(
    windows: Int[Tensor, "window pos"], tokenizer: Any, *, seed: Seed = 0
) -> dict[str, TokenBatch]:
    """The sentences of a text as rows of three kinds: alone, after BOS, and in a chat.

    A row starts where a sentence, a line or a document does, and goes on for 4 to 64 tokens (the
    logarithm is uniform), or to the end of its document or window. Each of its positions has a
    loss, including that before its first token.

    Args:
        windows: tokens of a text, as from `token_windows` or `sampled_windows`.
        tokenizer: a Hugging Face tokenizer.
        seed: random seed for the numbers of tokens.

    Returns:
        The rows of each kind by name, each of every sentence: "short"; "short after BOS", if the
        tokenizer has a BOS token; and "short in a chat", after a request to continue the text, if
        it has a chat template.

    Raises:
        ValueError: there is no tokenizer, or the windows hold no sentence of 4 tokens.
    """
    check_window(tokenizer, windows.shape[1])
    before = {"short": ""}
    if tokenizer.bos_token is not None:
        before["short after BOS"] = tokenizer.bos_token
    if getattr(tokenizer, "chat_template", None):
        before["short in a chat"] = chat_start(tokenizer)
    sentences = list(_sentences(windows, tokenizer))
    found = {
        name: _rows(sentences, tokenizer, text, np.random.default_rng([seed, number]))
        for number, (name, text) in enumerate(before.items())
    }
    if not all(found.values()):
        raise ValueError(
            f"expected windows with sentences of at least {TOKENS[0]} tokens; {len(windows)} "
            "windows have none. Use more or longer windows."
        )
    return {name: _as_batch(rows, tokenizer) for name, rows in found.items()}


def _sentences(windows: Int[Tensor, "window pos"], tokenizer: Any) -> Iterator[str]:
    """The text from each start of a sentence to the end of its document or window."""
    special = torch.tensor(tokenizer.all_special_ids)
    for window in windows:
        ends = torch.isin(window, special).nonzero()[:, 0].tolist()
        for start, stop in zip([0, *(end + 1 for end in ends)], [*ends, len(window)], strict=True):
            text = tokenizer.decode(window[start:stop].tolist(), clean_up_tokenization_spaces=False)
            text = text.rstrip("\ufffd")  # a character that the window cuts
            for match in _STARTS.finditer(text):
                yield text[match.end() : match.end() + _CHARACTERS * (TOKENS[1] + 1)]


def _rows(
    sentences: list[str], tokenizer: Any, before: str, random: np.random.Generator
) -> list[tuple[list[int], int]]:
    """Tokens of each long enough sentence, and how many of them precede it."""
    if not sentences:
        return []
    least, most = np.log([TOKENS[0], TOKENS[1] + 1])
    n_tokens = np.exp(random.uniform(least, most, len(sentences)))
    shorter = [
        before + text[: _CHARACTERS * (int(n) + 1)]
        for text, n in zip(sentences, n_tokens, strict=True)
    ]
    how = {"add_special_tokens": False, "verbose": False}
    start = tokenizer(before, **how)["input_ids"] if before else []
    rows = []
    for tokens, n in zip(tokenizer(shorter, **how)["input_ids"], n_tokens, strict=True):
        tokens = tokens[: len(start) + int(n) + 1]
        if len(tokens) > len(start) + TOKENS[0] and tokens[: len(start)] == start:
            rows.append((tokens, len(start)))
    return rows


def _as_batch(rows: list[tuple[list[int], int]], tokenizer: Any) -> TokenBatch:
    """Rows with a loss at every position from the one before the text on."""
    tokens = padded([tokens[:-1] for tokens, _ in rows], getattr(tokenizer, "pad_token_id", 0) or 0)
    labels = padded([tokens[1:] for tokens, _ in rows], 0)
    n_tokens = torch.tensor([[len(tokens) - 1] for tokens, _ in rows])
    n_before = torch.tensor([[max(before - 1, 0)] for _, before in rows])
    at = torch.arange(tokens.shape[1])
    real = at < n_tokens
    return TokenBatch(tokens, labels, real & (at >= n_before), real.long())
