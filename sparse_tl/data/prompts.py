"""The tokens of prompts and answers: what a prompt begins with, and how an answer continues it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from sparse_tl.data.token_text import token_texts

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
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
            self._known[text] = tuple(tokens)
        return self._known[text]

    def prepare(self, texts: Iterable[str]) -> None:
        """Encode several texts at once, which is faster."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        with suppress(Exception):  # as in `_joined`
            encoded = self.tokenizer(new, add_special_tokens=False)["input_ids"]
            self._known.update(zip(new, map(tuple, encoded), strict=True))


def check_tokenizer(tokenizer: Any) -> None:
    """Raise a ValueError if there is no tokenizer, or a model in its place."""
    if tokenizer is None or isinstance(tokenizer, ModelWithTokenizer):
        raise ValueError(
            "expected a model with a tokenizer to read text; "
            f"{'this one has none' if tokenizer is None else 'pass model.tokenizer, not the model'}"
        )


# ---- what a prompt begins with -------------------------------------------------------------------


def prepends_bos(
    model: ModelWithTokenizer, prepend_bos: bool | None = None, *, chat: bool = False
) -> bool:
    """Whether the prompts of a model start with its tokenizer's BOS token.

    Args:
        model: dense or sparse model; `load_model` makes it follow its tokenizer.
        prepend_bos: overrides the model's default.
        chat: whether prompts are put into a chat, whose template decides.

    Raises:
        ValueError: the model has no tokenizer, its tokenizer lacks the requested BOS token, or
            both `prepend_bos` and `chat` are given.
    """
    if model.tokenizer is None:
        raise ValueError(
            "expected a model with a tokenizer; this one has none. Build it with one, or give "
            "prompts as tokens."
        )
    if chat:
        if prepend_bos is not None:
            raise ValueError(
                f"expected prepend_bos or chat, since a chat template adds BOS by itself; got "
                f"prepend_bos={prepend_bos} and chat=True"
            )
        return False
    known = model.tokenizer.bos_token_id is not None
    if prepend_bos is None:
        return bool(model.cfg.default_prepend_bos) and known
    if prepend_bos and not known:
        raise _no_bos()
    return prepend_bos


def prompt_start(tokenizer: Any, prepend_bos: bool | None) -> Tokens:
    """The tokens that every prompt starts with, as in TransformerLens's `to_tokens`.

    They are those that the tokenizer itself puts before a text, with or without BOS.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prepend_bos: whether BOS is among them; ``None`` leaves that to the tokenizer.

    Raises:
        ValueError: the tokenizer lacks the requested BOS token.
    """
    check_tokenizer(tokenizer)
    start, bos = _added_start(tokenizer), tokenizer.bos_token_id
    if prepend_bos and bos is None:
        raise _no_bos()
    has_bos = bos is not None and start[:1] == (bos,)
    if prepend_bos is None or prepend_bos == has_bos:
        return start
    return (bos, *start) if prepend_bos else start[1:]


def start_in_words(start: str | None) -> str:
    """The end of a sentence that says what prompts start with; empty if that is unknown."""
    if start is None:
        return ""
    if len(start) > _LONGEST:  # a chat
        start = f"{start[: _LONGEST // 2]}...{start[-_LONGEST // 2 :]}"
    return f", beginning with {start!r}" if start else ", without BOS"


def _added_start(tokenizer: Any, text: str = "a") -> Tokens:
    """The tokens that a tokenizer adds before a text, without those that it adds after the text.

    An empty text does not tell the two apart.
    """
    if not tokenizer("")["input_ids"]:
        return ()
    full = tuple(tokenizer(text)["input_ids"])
    alone = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    starts = range(len(full) - len(alone) + 1)
    return full[: next(at for at in starts if full[at : at + len(alone)] == alone)]


def _no_bos() -> ValueError:
    return ValueError("expected a tokenizer with a BOS token, to prepend it; it has none")


# ---- how an answer continues a prompt ------------------------------------------------------------


def together(
    encode: Encoder, prompt: str, answer: str, where: str = "", what: str = "an answer"
) -> tuple[Tokens, Tokens]:
    """The tokens of a prompt, and those by which an answer continues it.

    Both are encoded as one text, since that is what the model has learned to predict. White space
    at the end of the prompt therefore belongs to the answer if the tokenizer puts it there: "Once
    upon a " and "time" are the prompt "Once upon a" and the answer " time".

    Args:
        encode: the tokenizer's encoder.
        prompt: text up to the first predicted token.
        answer: text that follows.
        where: beginning of the message.
        what: name of the answer in the message.

    Raises:
        ValueError: the answer begins inside a token.
    """
    split = _split(encode, prompt, answer)
    if split is not None:
        return split
    alone, joined = encode(prompt), _joined(encode, prompt, answer)
    same = next((i for i, (a, b) in enumerate(zip(alone, joined, strict=False)) if a != b), 0)
    raise ValueError(
        f"{where}expected {what} to begin where a token begins; {prompt[-40:]!r} followed by "
        f"{answer!r} has the tokens {shown(encode.tokenizer, joined[same:])}, where the prompt "
        f"alone ends in {shown(encode.tokenizer, alone[same:])}. Split the text elsewhere; in most "
        "vocabularies, a word begins with its space"
    )


def continued(encode: Encoder, prompt: str, answer: str, where: str = "") -> tuple[Tokens, int]:
    """As `together`, for an answer of a single token; the message begins with `where`.

    Raises:
        ValueError: as in `together`, or the answer has no token or several.
    """
    before, tokens = together(encode, prompt, answer, where)
    if len(tokens) == 1:
        return before, tokens[0]
    # In most vocabularies, a word begins with its space.
    other = answer[1:] if answer.startswith(" ") else f" {answer}"
    better = _split(encode, prompt, other) if other.strip() else None
    hint = f"; {other!r} is one" if better is not None and len(better[1]) == 1 else ""
    raise ValueError(
        f"{where}expected answers of a single token; {answer!r} has {len(tokens)}, "
        f"{shown(encode.tokenizer, tokens)}{hint}"
    )


def continues_a_word(encode: Encoder, prompt: str, answer: str) -> bool:
    """Whether an answer continues the prompt's last word because a space is missing."""
    if not (prompt[-1].isalpha() and answer[:1].isalpha()):
        return False
    glued, spaced = (_split(encode, prompt, text) for text in (answer, f" {answer}"))
    return spaced is not None and len(spaced[1]) == 1 and glued != spaced


def single_token(encode: Encoder, text: str, where: str = "") -> int:
    """The token of a text by itself.

    Raises:
        ValueError: the text has no token or several; the message begins with `where`.
    """
    tokens = encode(text)
    if len(tokens) != 1:
        raise ValueError(
            f"{where}expected answers of a single token; {text!r} has {len(tokens)}, "
            f"{shown(encode.tokenizer, tokens)}"
        )
    return tokens[0]


def shown(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The texts of tokens for a message; only the first ones if there are many."""
    texts = token_texts(tokenizer, tokens[:_SHOWN])
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
