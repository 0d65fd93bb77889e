"""Prompts as the beginning of an assistant's answer, in the tokenizer's chat template."""

from __future__ import annotations

from typing import Any

REQUEST = "Continue the text."
"""The user's turn, whatever the prompt."""
_ANSWER = "The-Answer"
"""Placeholder for the assistant's answer, to find the text that the template puts before it."""


def chat_start(tokenizer: Any) -> str:
    """The text of a chat up to the assistant's answer, with `REQUEST` as the user's turn.

    A prompt appended to it begins the answer, so the model continues the prompt. transformers
    renders the template in jinja's sandbox.

    Raises:
        ValueError: the tokenizer has no chat template, or one that does not allow this.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "expected a tokenizer with a chat template, to put prompts into a chat; this one has "
            "none. Omit `chat`, or use an instruct model."
        )
    turns = [{"role": "user", "content": REQUEST}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, continue_final_message=True)
    except Exception as error:  # a template can fail in any way
        message, *_ = str(error).splitlines() or [""]
        raise _unusable(f"{type(error).__name__}: {message}") from error
    if not text.endswith(_ANSWER):
        raise _unusable("it changes what the assistant writes")
    return text.removesuffix(_ANSWER)


def _unusable(reason: str) -> ValueError:
    return ValueError(
        "expected a chat template that takes a user's turn and the beginning of an assistant's; "
        f"{reason}"
    )
