"""Check that heads exist, that a model can read tokens, and that it supports an analysis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.data import PromptPairs, TokenBatch
from sparse_tl.lens.core.adapter import Adapter
from sparse_tl.lens.core.points import Analysis
from sparse_tl.parts.nodes import Node

HeadOrName = tuple[int, int] | str
"""A head: (layer, head), or its name, such as "a3.h2"."""

_NEEDED_FOR: dict[Analysis, str] = {
    "circuits": (
        "a causal model whose parts read the residual stream alone, for circuits: attribution and "
        "exact patching of heads and circuit edges, searches, evaluation and logit attribution"
    ),
    "relp": "a model with rules of relevance propagation for all its parts, for the method 'relp'",
}
_STILL_WORKS: dict[Analysis, str] = {
    "circuits": (
        "Gates on attention edges and heads, post-training, activation patching and attribution "
        "of attention edges need no circuits"
    ),
    "relp": "The other methods, such as 'eap-ig', take the model's own gradient",
}


def check_supported(adapter: Adapter, analysis: Analysis) -> None:
    """Check that an analysis is not refused for this kind of model.

    Raises:
        ValueError: the analysis is refused; the message says why, and what still works.
    """
    why = adapter.unsupported(analysis)
    if why is not None:
        raise ValueError(
            f"expected {_NEEDED_FOR[analysis]}; {adapter.name!r} is refused, since {why}. "
            f"{_STILL_WORKS[analysis]}."
        )


def check_tokens(adapter: Adapter, tokens: Int[Tensor, "*batch pos"]) -> None:
    """Check that the model can read these tokens.

    Raises:
        ValueError: there is no token, the tokens exceed the context, or are outside the vocabulary,
            or an earlier, longer prompt still sets the model's rotary positions.
    """
    if not tokens.numel():
        raise ValueError(f"expected prompts of at least one token; got shape {[*tokens.shape]}")
    if tokens.shape[-1] > adapter.n_ctx:
        raise ValueError(
            f"expected a prompt of at most {adapter.n_ctx} tokens, the model's context; got "
            f"{tokens.shape[-1]}"
        )
    # Dynamic scaling grows with the longest prompt so far, and is reset by shorter ones only.
    if tokens.shape[-1] == adapter.n_ctx and any(
        vars(module).get("max_seq_len_cached", 0) > vars(module).get("original_max_seq_len", inf)
        for module in adapter.core.modules()
    ):
        raise ValueError(
            f"expected rotary positions that do not depend on earlier prompts; {adapter.name!r} "
            "still scales them for a longer one. Run one shorter than its context first."
        )
    outside = tokens[(tokens < 0) | (tokens >= adapter.d_vocab)]
    if len(outside):
        raise ValueError(f"expected tokens in 0..{adapter.d_vocab - 1}; got {int(outside[0])}")


def check_padding(adapter: Adapter, attention_mask: Int[Tensor, "prompt pos"] | None) -> None:
    """Check that padding, 0 in the mask, does not change what the model computes for a prompt.

    A pass longer than the original context of LongRoPE uses other rotary positions, in all rows.

    Raises:
        ValueError: the padding makes a prompt longer than that, or as in `Adapter.check_mask`.
    """
    adapter.check_mask(attention_mask)
    config: Any = getattr(adapter.core, "config", None)
    # The second name is that before transformers 5. Layers may differ.
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    name = "original_max_position_embeddings"
    for one in (rotary, *rotary.values()):
        if attention_mask is None or not isinstance(one, Mapping) or "longrope" not in one.values():
            continue
        border = one.get(name) or getattr(config, name)
        if int(attention_mask.sum(dim=1).min()) <= border < attention_mask.shape[1]:
            raise ValueError(
                f"expected prompts of at most {border} tokens with padding, or longer ones alone: "
                f"{adapter.name!r} uses other rotary positions in longer passes. Run prompts of "
                "each length separately, such as pairs.by_length()"
            )


def check_labels(adapter: Adapter, labels: Int[Tensor, "*label"]) -> None:
    """Check that the model can predict these tokens.

    Raises:
        ValueError: a label is outside the vocabulary that the model predicts.
    """
    outside = labels[(labels < 0) | (labels >= adapter.d_vocab_out)]
    if len(outside):
        raise ValueError(
            f"expected labels in 0..{adapter.d_vocab_out - 1}, what the model predicts; got "
            f"{int(outside[0])}. Were they made with another tokenizer? A model whose d_vocab_out "
            "differs from d_vocab has its own numbering of the tokens that it predicts."
        )


def check_rows(adapter: Adapter, rows: TokenBatch) -> None:
    """Check that the model can read these rows, and predict their labels.

    Raises:
        ValueError: as in `check_tokens`, `check_padding` and `check_labels`.
    """
    check_tokens(adapter, rows.tokens)
    check_padding(adapter, rows.attention_mask)
    check_labels(adapter, rows.loss_labels())


def check_pairs(adapter: Adapter, pairs: PromptPairs) -> None:
    """Check that the model can read these prompts, and predict all answers and wrong answers.

    Padding on the left is recognised by the tokenizer's padding token, since tokens alone do not
    show it: a prompt may repeat its first token. A single padding token at the start of every
    prompt counts as BOS.

    Raises:
        ValueError: prompts begin with padding, or as in `check_rows`.
    """
    both = torch.cat([pairs.clean, pairs.corrupted])
    check_tokens(adapter, both)
    check_padding(adapter, pairs.attention_mask)
    begins = _paddings(adapter, both)
    if int(begins.max()) > 1 or int(begins.min()) != int(begins.max()):
        row, least = int(begins.argmax()), int(begins.min())
        raise ValueError(
            f"expected prompts padded on the right; pair {row % len(pairs)} begins with "
            f"{int(begins[row])} padding tokens, {adapter.model.tokenizer.pad_token!r}, and the "
            f"fewest are {least}. The model attends to padding before a prompt: put it after each "
            "prompt's last token, which positions point to."
        )
    for side in (pairs.answers, pairs.wrong):
        check_labels(adapter, side[side >= 0])


def check_reference(adapter: Adapter, prompts: Int[Tensor, "prompt pos"]) -> None:
    """Check that reference prompts have the same length, as far as padding tokens show it.

    Padding is recognised by the tokenizer's padding token. If that token is also EOS or BOS, a
    single one at either end of a prompt may be text.

    Raises:
        ValueError: prompts begin or end with different numbers of padding tokens.
    """
    tokenizer = adapter.model.tokenizer
    is_text = tokenizer is not None and tokenizer.pad_token_id in (
        tokenizer.eos_token_id,
        tokenizer.bos_token_id,
    )
    for where, rows in (("begins", prompts), ("ends", prompts.flip(1))):
        found = _paddings(adapter, rows)
        row, least = int(found.argmax()), int(found.min())
        if int(found[row]) > max(least, int(is_text)):
            raise ValueError(
                f"expected reference prompts of one length, since their columns are combined; "
                f"prompt {row} {where} with {int(found[row])} padding tokens, another with "
                f"{least}. Pass prompts of one length, such as one of pairs.by_length()"
            )


def _paddings(adapter: Adapter, prompts: Int[Tensor, "prompt pos"]) -> Int[Tensor, " prompt"]:
    """The number of padding tokens that each prompt begins with; 0 if the tokenizer cannot tell.

    It cannot if its padding token is also its mask token, which is text.
    """
    tokenizer = adapter.model.tokenizer
    pad = None if tokenizer is None else tokenizer.pad_token_id
    if pad is None or pad == tokenizer.mask_token_id:
        return prompts.new_zeros(len(prompts))
    return (prompts == pad).cumprod(dim=1).sum(dim=1)


def check_numbers(adapter: Adapter, logits: Float[Tensor, "*_"]) -> None:
    """Check that no logit is NaN.

    Raises:
        ValueError: a logit is NaN.
    """
    if logits.isnan().any():
        raise ValueError(
            f"expected a model whose logits are numbers; {adapter.name!r} predicts NaN: a weight "
            f"is NaN or infinite, or activations overflow in {logits.dtype}"
        )


def check_head(adapter: Adapter, layer: int, head: int) -> None:
    """Check that a head exists.

    Raises:
        ValueError: the model has no such head.
    """
    if not (0 <= layer < adapter.n_layers and 0 <= head < adapter.n_heads):
        raise ValueError(
            f"expected heads (layer, head) of {adapter.n_layers} layers of {adapter.n_heads} "
            f"heads; got ({layer}, {head})"
        )


def heads_of(adapter: Adapter, heads: Sequence[HeadOrName]) -> list[tuple[int, int]]:
    """Heads as (layer, head) pairs.

    Raises:
        ValueError: a name is not that of a head, or the model has no such head.
    """
    found = [_named(head) if isinstance(head, str) else head for head in heads]
    for layer, head in found:
        check_head(adapter, layer, head)
    return found


def _named(name: str) -> tuple[int, int]:
    node = Node.parse(name)
    if node.kind != "head":
        raise ValueError(f'expected a head such as "a3.h2", or (layer, head); got {name!r}')
    return node.layer, node.head
