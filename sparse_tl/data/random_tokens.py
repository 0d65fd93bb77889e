"""Prompts of random tokens: what they begin with, and which tokens are drawn."""

from __future__ import annotations

from typing import Any

from sparse_tl.data.chat import chat_start
from sparse_tl.data.prompts import ModelWithTokenizer, Tokens, prepends_bos, prompt_start


def start_of_prompts(
    model: ModelWithTokenizer, prepend_bos: bool | None = None, *, chat: bool = False
) -> tuple[Tokens, str]:
    """The tokens that prompts start with, and their text; both empty without a tokenizer.

    Args:
        model: dense or sparse model.
        prepend_bos: whether BOS is among them; by default as in the model's own prompts.
        chat: whether prompts begin the assistant's answer in a chat.

    Raises:
        ValueError: the model has no tokenizer for the requested start, the tokenizer lacks the BOS
            token or the chat template, or both are requested.
    """
    tokenizer: Any = model.tokenizer
    if tokenizer is None and prepend_bos is None and not chat:
        return (), ""
    with_bos = prepends_bos(model, prepend_bos, chat=chat)
    if chat:
        text = chat_start(tokenizer)
        return tuple(tokenizer.encode(text, add_special_tokens=False)), text
    start = prompt_start(tokenizer, with_bos)
    return start, tokenizer.decode(list(start))


def ordinary_tokens(model: ModelWithTokenizer) -> Tokens:
    """The tokens that text consists of: not BOS, padding, or tokens added for chats."""
    tokenizer: Any = model.tokenizer
    if tokenizer is None:
        return tuple(range(model.cfg.d_vocab))
    n_vocab = min(len(tokenizer), getattr(model.cfg, "d_vocab", len(tokenizer)))
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return tuple(token for token in range(n_vocab) if token not in special)
