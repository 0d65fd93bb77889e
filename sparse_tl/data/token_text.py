"""The text of each token of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are no whole character."""
_MOST = 8
"""Maximum number of tokens that are read together; a character has up to four bytes."""


def next_text(tokenizer: Any, before: Sequence[int], token: int) -> str:
    """The text of a token that follows others, and may complete a character that they begin."""
    text = tokenizer.decode([token])
    if INCOMPLETE not in text:
        return text
    return token_texts(tokenizer, [*before[1 - _MOST :], token])[-1]


def added_text(tokenizer: Any, before: Sequence[int], token: int) -> str:
    """What a token adds to the text of others, with the space that it begins with there."""
    start, whole = tokenizer.decode(list(before)), tokenizer.decode([*before, token])
    return whole[len(start) :] if whole.startswith(start) else tokenizer.decode([token])


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text of each token; several that make up a character all show the whole of it.

    Bytes that nothing completes show as U+FFFD.
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
