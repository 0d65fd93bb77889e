"""Checks that a tokenizer can represent a text: unknown characters would silently change it."""

from __future__ import annotations

import unicodedata
from typing import Any


def check_known(tokenizer: Any, text: str, where: str = "") -> None:
    """Check that every part of a text has its own token.

    Tokenizers replace unknown parts with an unknown or special token, or drop them. Either way, the
    model would run on a text other than the one shown.

    Args:
        tokenizer: a Hugging Face tokenizer.
        text: a prompt or an answer.
        where: beginning of the message.

    Raises:
        ValueError: a part has no token; the message names it.
    """
    try:
        unknown = _unknown_part(tokenizer, text)
    except Exception as error:  # tokenizers without an unknown token raise a bare Exception
        raise ValueError(
            f"{where}expected a text that the tokenizer can encode; got {text!r:.200}: {error}"
        ) from error
    if unknown is not None:
        known = sorted(tokenizer.get_vocab())
        listed = f"; it knows {' '.join(known)}" if len(known) <= 40 else ""
        raise ValueError(
            f"{where}expected a text that the tokenizer can encode; it has no token for "
            f"{unknown!r:.200}{listed}"
        )


def _unknown_part(tokenizer: Any, text: str) -> str | None:
    """The first part of a text without a token in the tokenizer; ``None`` if there is none."""
    if not getattr(tokenizer, "is_fast", False):
        return _first_unknown_piece(tokenizer, text)
    text = _as_read(tokenizer, text)
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    # The tokenizer's model may have an unknown token that is not declared as special.
    inner = tokenizer.backend_tokenizer
    unknown = inner.token_to_id(getattr(inner.model, "unk_token", None) or "")
    special = {*tokenizer.all_special_ids, unknown}
    end = 0
    for token, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        if text[end:start].strip():  # dropped
            return text[end:start].strip()
        part = text[start:stop]
        written = tokenizer.convert_ids_to_tokens(token)
        if token in special and part and part.strip() != written.strip():
            return part.strip() or part
        end = max(end, stop)
    return text[end:].strip() or None


def _as_read(tokenizer: Any, text: str) -> str:
    """The text with its accents composed, if the tokenizer composes them.

    Such a tokenizer reports that a token covers the letter, but not its separate accent.
    """
    composed = unicodedata.normalize("NFC", text)
    if composed == text:
        return text
    read, as_composed = tokenizer([text, composed], add_special_tokens=False)["input_ids"]
    return composed if read == as_composed else text


def _first_unknown_piece(tokenizer: Any, text: str) -> str | None:
    """As `_unknown_part`, for tokenizers that do not report which characters a token covers."""
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in tokenizer(text, add_special_tokens=False)["input_ids"]:
        return None
    pieces = tokenizer.tokenize(text)
    return next((p for p in pieces if tokenizer.convert_tokens_to_ids(p) == unknown), text)
