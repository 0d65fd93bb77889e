"""The text of each token of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""The text of bytes that do not form a complete character."""
_MOST = 8
"""Maximum number of tokens to decode together; a character has up to four bytes."""


def next_text(tokenizer: Any, before: Sequence[int], token: int) -> str:
    """The text of a token after others; it may complete a character that they begin."""
    text = tokenizer.decode([token])
    if INCOMPLETE not in text:
        return text
    return token_texts(tokenizer, [*before[1 - _MOST :], token])[-1]


def added_text(tokenizer: Any, before: Sequence[int], token: int) -> str:
    """The text that a token adds after others, including a leading space."""
    start, full = tokenizer.decode(list(before)), tokenizer.decode([*before, token])
    return full[len(start) :] if full.startswith(start) else tokenizer.decode([token])


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text of each token; tokens that make up one character all show that character.

    Bytes of an incomplete character show as U+FFFD.
    """
    texts = [tokenizer.decode([token]) for token in tokens]
    start = 0
    while start < len(texts):
        end = start + 1
        if INCOMPLETE in texts[start]:
            for stop in range(start + 2, min(start + _MOST, len(texts)) + 1):
                together = tokenizer.decode(list(tokens[start:stop]))
                if INCOMPLETE not in together:
                    texts[start:stop], end = [together] * (stop - start), stop
                    break
        start = end
    return texts
