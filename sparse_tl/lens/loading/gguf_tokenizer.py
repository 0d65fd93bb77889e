"""Give the tokenizer of a GGUF file the rules that its `tokenizer.ggml.pre` stands for.

The name says how byte-level BPE splits a text before merging; the merges are right for that split
alone. transformers knows some of these names and splits by GPT-2's rule wherever it does not, which
gives other tokens: SmolLM separates every digit first, and so keeps a blank line in one token.

Reference: `llm_tokenizer_bpe` in llama.cpp, and the tokenizer.json files that the models' authors
published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import normalizers, pre_tokenizers

_GPT2 = {"gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion"}
_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Every digit on its own, then GPT-2's rule."""
_COMPOSED = {"olmo", "mpt", "command-r", "qwen2", "deepseek-r1-qwen", "megrez", "qwen35"}
"""Characters are composed first (NFC)."""
_WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"}
"""A word that is a token is taken as it is, even if merging would not lead to it."""


def follow_file(tokenizer: Any, fields: Mapping[str, Any]) -> None:
    """Make a tokenizer split texts as the metadata of its GGUF file says.

    Raises:
        ValueError: the file does not say how, or in a way that this package does not know.
    """
    # Versions of transformers that cannot read such files do not have it.
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind = fields.get("tokenizer.ggml.model")
    if kind == "llama" and _adds_space(tokenizer) != fields.get(
        "tokenizer.ggml.add_space_prefix", True
    ):
        raise ValueError(
            "transformers ignores its tokenizer.ggml.add_space_prefix, so that prompts would get "
            "other tokens. Pass the model's own tokenizer: tokenizer=..."
        )
    if kind != "gpt2":
        return
    name, backend = fields.get("tokenizer.ggml.pre"), tokenizer.backend_tokenizer
    if name in _DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif name not in _GPT2 | GGUF_PRE_TOKENIZER_SPLITS.keys():
        said = "does not say" if name is None else f"says by the unknown name {str(name)[:80]!r}"
        raise ValueError(
            f"it {said} how it splits texts into words (tokenizer.ggml.pre), so that prompts could "
            "get other tokens. Pass the model's own tokenizer: tokenizer=..."
        )
    if name in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    if name in _WHOLE_WORDS:
        backend.model.ignore_merges = True


def _adds_space(tokenizer: Any) -> bool:
    """Whether a text begins with a space that it does not have."""
    (first, *_) = tokenizer.tokenize("a")
    return first.startswith("\u2581")
