"""The tokens of prompts and answers: what a prompt begins with, and how an answer continues it."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

Tokens = tuple[int, ...]
_SHOWN = 12
"""Maximum number of tokens that a message shows."""
_LONGEST = 40
"""Maximum number of characters shown of a prompt's beginning."""


@runtime_checkable
class ModelWithTokenizer(Protocol):
    """What tokenizing texts needs from a model, dense or sparse; the tokenizer may be None."""

    @property
    def cfg(self) -> Any: ...

    @property
    def tokenizer(self) -> Any: ...


class Encoder:
    """Encodes texts without the tokens that the tokenizer adds around every text.

    Results are kept, since the same few words are encoded repeatedly.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.unknown = tokenizer, tokenizer.unk_token_id
        self._known: dict[str, Tokens] = {}

    def __call__(self, text: str) -> Tokens:
        if text not in self._known:
            self._known[text] = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return self._known[text]

    def prepare(self, texts: Iterable[str]) -> None:
        """Encode several texts at once, which is faster."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        with suppress(Exception):  # as in `_joined`
            encoded = self.tokenizer(new, add_special_tokens=False)["input_ids"]
            self._known.update(zip(new, map(tuple, encoded), strict=True))


def check_tokenizer(tokenizer: Any) -> None:
    """Raise a ValueError if there is no tokenizer."""
    if tokenizer is None:
        raise ValueError(
            "this model has no tokenizer. Build it with one, or give prompts as tokens."
        )


# ---- what a prompt begins with -------------------------------------------------------------------


def prepends_bos(
    model: ModelWithTokenizer, prepend_bos: bool | None = None, *, chat: bool = False
) -> bool:
    """Whether the prompts of a model start with its tokenizer's BOS token.

    `prepend_bos` overrides the model's default; in a chat, the template decides.

    Raises:
        ValueError: the model has no tokenizer, its tokenizer lacks the requested BOS token, or
            both `prepend_bos` and `chat` are given.
    """
    check_tokenizer(model.tokenizer)
    if chat:
        if prepend_bos is not None:
            raise ValueError("give prepend_bos or chat: a chat template adds BOS by itself")
        return False
    known = model.tokenizer.bos_token_id is not None
    if prepend_bos is None:
        return bool(model.cfg.default_prepend_bos) and known
    if prepend_bos and not known:
        raise _no_bos()
    return prepend_bos


def prompt_start(tokenizer: Any, prepend_bos: bool | None) -> Tokens:
    """The tokens that every prompt starts with, as in TransformerLens's `to_tokens`.

    They are those that the tokenizer itself puts before a text, with or without BOS; ``None``
    leaves BOS to the tokenizer. Raises a ValueError if it lacks the requested BOS token.
    """
    check_tokenizer(tokenizer)
    start, bos = tuple[int, ...](), tokenizer.bos_token_id
    if tokenizer("")["input_ids"]:  # it adds tokens to a text: before it, or after it
        full = tuple(tokenizer("a")["input_ids"])
        alone = tuple(tokenizer("a", add_special_tokens=False)["input_ids"])
        ends = range(len(full) - len(alone) + 1)
        start = full[: next(at for at in ends if full[at : at + len(alone)] == alone)]
    if prepend_bos and bos is None:
        raise _no_bos()
    has_bos = bos is not None and start[:1] == (bos,)
    if prepend_bos is None or prepend_bos == has_bos:
        return start
    return (bos, *start) if prepend_bos else start[1:]


def _no_bos() -> ValueError:
    return ValueError("the tokenizer has no BOS token to prepend")


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
            "the tokenizer has no chat template to put prompts into. Omit `chat`, or use an "
            "instruct model."
        )
    turns = [{"role": "user", "content": REQUEST}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, continue_final_message=True)
    except Exception as error:  # a template can fail in any way
        raise ValueError(f"the chat template does not begin an answer: {error}") from error
    if not text.endswith(_ANSWER):
        raise ValueError("the chat template changes what the assistant writes")
    return text.removesuffix(_ANSWER)


def start_of_prompts(
    model: ModelWithTokenizer, prepend_bos: bool | None = None, *, chat: bool = False
) -> tuple[Tokens, str]:
    """The tokens that prompts start with, and their text; both empty without a tokenizer.

    Arguments and errors are those of `prepends_bos` and `chat_start`.
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


def start_in_words(start: str | None) -> str:
    """The end of a sentence that says what prompts start with; empty if that is unknown."""
    if start is None:
        return ""
    if len(start) > _LONGEST:  # a chat
        start = f"{start[: _LONGEST // 2]}...{start[-_LONGEST // 2 :]}"
    return f", beginning with {start!r}" if start else ", without BOS"


def ordinary_tokens(model: ModelWithTokenizer) -> Tokens:
    """The tokens that text consists of: not BOS, padding, or tokens added for chats."""
    tokenizer: Any = model.tokenizer
    if tokenizer is None:
        return tuple(range(model.cfg.d_vocab))
    n_vocab = min(len(tokenizer), getattr(model.cfg, "d_vocab", len(tokenizer)))
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return tuple(token for token in range(n_vocab) if token not in special)


# ---- how an answer continues a prompt ------------------------------------------------------------


def together(
    encode: Encoder, prompt: str, answer: str, what: str = "an answer"
) -> tuple[Tokens, Tokens]:
    """The tokens of a prompt, and those by which an answer continues it.

    Both are encoded as one text, since that is what the model has learned to predict. White space
    at the end of the prompt therefore belongs to the answer if the tokenizer puts it there: "Once
    upon a " and "time" are the prompt "Once upon a" and the answer " time".

    Raises:
        ValueError: the answer, which the message calls `what`, begins inside a token.
    """
    split = _split(encode, prompt, answer)
    if split is not None:
        return split
    alone, joined = encode(prompt), _joined(encode, prompt, answer)
    same = next((i for i, (a, b) in enumerate(zip(alone, joined, strict=False)) if a != b), 0)
    raise ValueError(
        f"{what} begins inside a token: {prompt[-40:]!r} and {answer!r} together are "
        f"{in_tokens(encode.tokenizer, joined[same:])}, and the prompt alone ends in "
        f"{in_tokens(encode.tokenizer, alone[same:])}. Split the text elsewhere; in most "
        "vocabularies, a word begins with its space"
    )


def continued(encode: Encoder, prompt: str, answer: str) -> tuple[Tokens, int]:
    """As `together`, for an answer of a single token."""
    before, tokens = together(encode, prompt, answer)
    if len(tokens) == 1:
        return before, tokens[0]
    # In most vocabularies, a word begins with its space.
    other = answer[1:] if answer.startswith(" ") else f" {answer}"
    better = _split(encode, prompt, other) if other.strip() else None
    hint = f"; {other!r} is one" if better is not None and len(better[1]) == 1 else ""
    raise _several_tokens(encode, answer, tokens, hint)


def single_token(encode: Encoder, text: str, prompt: str) -> int:
    """The token of a text that follows a prompt, or else by itself; a ValueError if it is neither.

    By itself, " was" is two tokens to tokenizers that put a space before every text.
    """
    before, tokens = _split(encode, prompt, text) or ((), ())
    if len(tokens) != 1 or before != encode(prompt):  # white space that the text took over
        tokens = encode(text)
    if len(tokens) != 1:
        raise _several_tokens(encode, text, tokens)
    return tokens[0]


def _several_tokens(encode: Encoder, text: str, tokens: Tokens, hint: str = "") -> ValueError:
    return ValueError(
        f"expected answers of a single token; {text!r} has {len(tokens)}, "
        f"{in_tokens(encode.tokenizer, tokens)}{hint}"
    )


def continues_a_word(encode: Encoder, prompt: str, answer: str) -> bool:
    """Whether an answer continues the prompt's last word because a space is missing."""
    if not (prompt[-1].isalpha() and answer[:1].isalpha()):
        return False
    if unicodedata.east_asian_width(answer[0]) == "W":  # written without spaces between words
        return False
    glued, spaced = (_split(encode, prompt, text) for text in (answer, f" {answer}"))
    if glued is None or spaced is None:
        return False
    return len(spaced[1]) <= len(glued[1]) and glued != spaced


def in_tokens(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The first tokens for a message: their texts, or names where there is no whole character."""
    texts = [_text(tokenizer, [token]) for token in tokens[:_SHOWN]]
    for at, text in enumerate(texts):
        if not text or _INCOMPLETE in text:
            texts[at] = tokenizer.convert_ids_to_tokens(tokens[at])
    return repr([*texts, "..."] if len(tokens) > _SHOWN else texts)


def _split(encode: Encoder, prompt: str, answer: str) -> tuple[Tokens, Tokens] | None:
    """The tokens of prompt and answer as one text; ``None`` if a token has parts of both."""
    joined = _joined(encode, prompt, answer)
    for end in range(len(prompt), max(len(prompt.rstrip()), 1) - 1, -1):
        before = encode(prompt[:end])
        if joined[: len(before)] == before:
            return before, joined[len(before) :]
    return None


def _joined(encode: Encoder, prompt: str, answer: str) -> Tokens:
    """The tokens of prompt and answer as one text.

    A word-level vocabulary drops the spaces between words, and does not know two words without a
    space between them. There, a space is added.
    """
    for text in (prompt + answer, f"{prompt} {answer}"):
        with suppress(Exception):  # vocabularies without an unknown token raise a bare Exception
            joined = encode(text)
            if encode.unknown not in joined:
                return joined
    return encode(prompt + answer)


# ---- texts of tokens -----------------------------------------------------------------------------

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""The text of bytes that do not form a complete character."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How vocabularies of SentencePiece write a space."""
_MOST = 8
"""Maximum number of tokens to decode together; a character has up to four bytes."""


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens, with the spaces that decoders of SentencePiece drop at its start."""
    text = tokenizer.decode(list(tokens))
    first = tokenizer.convert_ids_to_tokens(tokens[0]) or ""  # None for an output that is no token
    if text.startswith(_SPACE):  # here, the character stands for itself
        return text
    n_spaces = len(first) - len(first.lstrip(_SPACE))
    return " " * n_spaces + text.lstrip(" ") if n_spaces else text


def next_text(tokenizer: Any, before: Sequence[int], token: int) -> str:
    """The text of a token after others; it may complete a character that they begin."""
    text = _text(tokenizer, [token])
    if _INCOMPLETE not in text:
        return text
    return decode_tokens(tokenizer, [*before[1 - _MOST :], token])[-1]


def added_text(tokenizer: Any, before: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that tokens add after others, including a leading space."""
    start, full = tokenizer.decode(list(before)), tokenizer.decode([*before, *tokens])
    return full[len(start) :] if full.startswith(start) else tokenizer.decode(list(tokens))


def decode_tokens(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text of each token; tokens that make up one character all show that character.

    Bytes of an incomplete character show as U+FFFD.
    """
    texts = [_text(tokenizer, [token]) for token in tokens]
    start = 0
    while start < len(texts):
        end = start + 1
        if _INCOMPLETE in texts[start]:
            for stop in range(start + 2, min(start + _MOST, len(texts)) + 1):
                together = _text(tokenizer, tokens[start:stop])
                if _INCOMPLETE not in together:
                    texts[start:stop], end = [together] * (stop - start), stop
                    break
        start = end
    return texts


# ---- what a tokenizer knows ----------------------------------------------------------------------


def check_known(tokenizer: Any, text: str, where: str = "") -> None:
    """Check that every part of a text has its own token.

    Tokenizers replace unknown parts with an unknown or special token, or drop them. Either way, the
    model would run on a text other than the one shown.

    Raises:
        ValueError: a part has no token; the message begins with `where` and names the part.
    """
    try:
        unknown = _unknown_part(tokenizer, text)
    except Exception as error:  # tokenizers without an unknown token raise a bare Exception
        raise ValueError(f"{where}the tokenizer cannot encode {text!r:.200}: {error}") from error
    if unknown is not None:
        known = sorted(tokenizer.get_vocab())
        listed = f"; it knows {' '.join(known)}" if len(known) <= 40 else ""
        raise ValueError(
            f"{where}expected a text that the tokenizer can encode; it has no token for "
            f"{unknown!r:.200}{listed}"
        )


def _unknown_part(tokenizer: Any, text: str) -> str | None:
    """The first part of a text without a token in the tokenizer; ``None`` if there is none."""
    if not getattr(tokenizer, "is_fast", False):  # does not report what a token covers
        read = tokenizer(text, add_special_tokens=False)["input_ids"]
        return text if tokenizer.unk_token_id in read else None
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
