"""A prompt as the beginning of an assistant's answer, written by the tokenizer's chat template."""

from __future__ import annotations

from typing import Any

REQUEST = "Continue the text."
"""What the user asks for, whatever the prompt."""
_ANSWER = "The-Answer"
"""What the assistant writes while the template is asked what stands before it."""


def chat_start(tokenizer: Any) -> str:
    """The text of a chat up to the assistant's answer: the user's `REQUEST`, and all around it.

    A prompt that is written behind it begins the answer, so that the model continues the prompt.
    transformers renders the template in jinja's sandbox.

    Raises:
        ValueError: the tokenizer has no chat template, or one that cannot be used like this.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "expected a tokenizer with a chat template, to put prompts into a chat; this one has "
            "none. Leave `chat` out, or use an instruct model."
        )
    turns = [{"role": "user", "content": REQUEST}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, continue_final_message=True)
    except Exception as error:  # a template can fail in any way
        said, *_ = str(error).splitlines() or [""]
        raise _unusable(f"{type(error).__name__}: {said}") from error
    if not text.endswith(_ANSWER):
        raise _unusable("it changes what the assistant writes")
    return text.removesuffix(_ANSWER)


def _unusable(said: str) -> ValueError:
    return ValueError(
        "expected a chat template that takes a turn of the user and the beginning of one of the "
        f"assistant; {said}"
    )
