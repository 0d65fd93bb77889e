"""Tokenizers of the common kinds, made on the spot: byte-level ones and those of SentencePiece."""

from __future__ import annotations

from typing import Any

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def byte_level(
    *words: str,
    before: str | None = None,
    behind: str | None = None,
    normalizer: Any = None,
    words_alone: bool = True,
    digits: str | None = None,
) -> Any:
    """As GPT-2's: every byte is a token, and so are some words, with the space before them.

    Args:
        words: texts of one token.
        before: special token that it puts before every text.
        behind: special token that it puts behind every text.
        normalizer: what is done to texts first.
        words_alone: whether no token has parts of two words.
        digits: pattern of the digits that are read together, with no space before them.
    """
    split: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words_alone)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if digits is not None:
        alone = pre_tokenizers.Split(Regex(digits), "isolated")
        split = pre_tokenizers.Sequence([alone, split])
    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary, merges = {name: number for number, name in enumerate(names)}, []
    for word in words:
        ((written, _),) = whole.pre_tokenize_str(word)
        for end in range(2, len(written) + 1):
            if written[:end] not in vocabulary:
                vocabulary[written[:end]] = len(vocabulary)
                merges.append((written[: end - 1], written[end - 1]))
    # With `digits`, as Llama 3's: what is a token as a whole is not merged from parts.
    inner = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=digits is not None))
    inner.pre_tokenizer, inner.decoder = split, decoders.ByteLevel()
    if normalizer is not None:
        inner.normalizer = normalizer
    return _with_special(inner, before, behind)


def sentencepiece(*words: str, before: str | None = "<s>") -> Any:
    """As Llama's: a space is put before every text, and unknown characters are bytes."""
    pieces = [("<unk>", -50.0), ("<s>", -50.0), ("</s>", -50.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces += [(letter, -10.0) for letter in (SPACE, *"abcdefghijklmnopqrstuvwxyz0123456789.()")]
    pieces += [(word.replace(" ", SPACE), -5.0) for word in words]
    inner = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _with_special(inner, before, None, unk_token="<unk>")


def word_level(*words: str, unknown: str | None = None, **special: str) -> Any:
    """Words between spaces; all others are the unknown one, if there is one."""
    numbers = {word: number for number, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(numbers, unk_token=unknown))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def whole_words(*words: str) -> Any:
    """Words and marks, without the spaces between them; all others are ``[UNK]``."""
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]"), "removed", invert=True)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")


def _with_special(inner: Any, before: str | None, behind: str | None, **names: str) -> Any:
    around = [name for name in (before, behind) if name is not None]
    if around:
        inner.post_processor = processors.TemplateProcessing(
            single=" ".join([*filter(None, [before]), "$A", *filter(None, [behind])]),
            special_tokens=[(name, inner.token_to_id(name)) for name in dict.fromkeys(around)],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>", **names
    )
