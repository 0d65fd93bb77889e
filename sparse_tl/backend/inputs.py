"""Refuse heads that do not exist, and tokens and padding that a model cannot read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.backend.hooks import without_user_hooks
from sparse_tl.backend.interface import Adapter
from sparse_tl.data import PromptPairs, TokenBatch
from sparse_tl.data.pairs import mask_of_padding
from sparse_tl.graph import HeadGrid

HeadOrName = tuple[int, int] | str
"""A head: (layer, head), or its name, such as "a3.h2"."""


def check_tokens(adapter: Adapter, tokens: Int[Tensor, "*batch pos"]) -> None:
    """Raise a ValueError if the model cannot read these tokens."""
    if not tokens.numel():
        raise ValueError("the prompts hold no token")
    length = tokens.shape[-1]
    if length > adapter.n_ctx:
        raise ValueError(
            f"a prompt may have at most {adapter.n_ctx} tokens, the model's context; got {length}"
        )
    # Dynamic scaling grows with the longest prompt so far, and is reset by shorter ones only.
    if length == adapter.n_ctx and any(
        vars(module).get("max_seq_len_cached", 0) > vars(module).get("original_max_seq_len", inf)
        for module in adapter.core.modules()
    ):
        raise ValueError(
            f"the rotary positions of {adapter.name!r} are still scaled for a longer prompt; run "
            "one that is shorter than its context first"
        )
    _check_vocabulary(tokens, adapter.d_vocab, f"{adapter.name!r} reads")


def _check_vocabulary(tokens: Tensor, size: int, what: str) -> None:
    outside = tokens[(tokens < 0) | (tokens >= size)]
    if len(outside):
        raise ValueError(
            f"{what} tokens in 0..{size - 1}, and {int(outside[0])} is not one. Were the prompts "
            "made with another tokenizer?"
        )


def check_padding(adapter: Adapter, attention_mask: Int[Tensor, "prompt pos"] | None) -> None:
    """Raise a ValueError if padding, 0 in the mask, changes what is computed for a prompt.

    A pass longer than the original context of LongRoPE uses other rotary positions, in all rows.
    """
    if attention_mask is None:
        return
    if adapter.dtype == torch.float64 and not attention_mask[:, 0].all():
        tokens = torch.zeros(1, 2, dtype=torch.long, device=adapter.device)
        with without_user_hooks(adapter.model), torch.no_grad():
            logits = adapter.model(tokens, attention_mask=tokens.new_tensor([[0, 1]]))
        # Some models compute softmax in float32, where the scores of padding are infinite.
        if logits.isnan().any():
            raise ValueError(
                f"{adapter.name!r} in float64 returns NaN for prompts that are padded on the left; "
                "pass prompts of one length, or padded on the right"
            )
    config: Any = getattr(adapter.core, "config", None)
    rotary = getattr(config, "rope_parameters", None) or {}
    for one in (rotary, *rotary.values()):  # layers may differ
        if not isinstance(one, Mapping) or "longrope" not in one.values():
            continue
        name = "original_max_position_embeddings"
        border = one.get(name) or getattr(config, name)
        if int(attention_mask.sum(dim=1).min()) <= border < attention_mask.shape[1]:
            raise ValueError(
                f"{adapter.name!r} uses other rotary positions in passes of more than {border} "
                "tokens, so padding would change the shorter prompts. Run prompts of each length "
                "separately, such as pairs.by_length()"
            )


def check_rows(adapter: Adapter, rows: TokenBatch) -> None:
    """Check that the model can read these rows, and predict their labels."""
    check_tokens(adapter, rows.tokens)
    check_padding(adapter, rows.attention_mask)
    _check_vocabulary(rows.loss_labels(), adapter.d_vocab_out, f"{adapter.name!r} predicts")


def check_pairs(adapter: Adapter, pairs: PromptPairs) -> None:
    """Check that the model can read these prompts, and predict all answers and wrong answers.

    Padding on the left is recognised by the tokenizer's padding token, since tokens alone do not
    show it: a prompt may repeat its first token. A single padding token at the start of every
    prompt counts as BOS.
    """
    rows = pairs.forced
    check_tokens(adapter, torch.cat([rows.clean, rows.corrupted]))
    check_padding(adapter, mask_of_padding(rows.ends, rows.clean.shape[1]))
    if rows.clean.shape[1] > pairs.clean.shape[1] and not adapter.causal:
        raise ValueError(
            f"{adapter.name!r} attends in both directions, and would see the tokens of an answer "
            "that it is to predict: give answers of one token"
        )
    begins = _paddings(adapter, torch.cat([pairs.clean, pairs.corrupted]))
    if int(begins.max()) > 1 or int(begins.min()) != int(begins.max()):
        row = int(begins.argmax())
        raise ValueError(
            f"pair {row % len(pairs)} begins with {int(begins[row])} padding tokens, "
            f"{adapter.model.tokenizer.pad_token!r}, to which the model attends. Pass prompts "
            "padded on the right, after the last token, which positions point to."
        )
    labels = torch.cat([pairs.answers.flatten(), pairs.wrong.flatten()])
    _check_vocabulary(labels[labels >= 0], adapter.d_vocab_out, f"{adapter.name!r} predicts")


def check_reference(adapter: Adapter, prompts: Int[Tensor, "prompt pos"]) -> None:
    """Check that reference prompts have one length, as far as padding tokens show it.

    If the padding token is also EOS or BOS, a single one at either end of a prompt may be text.
    """
    known = adapter.model.tokenizer
    is_text = known is not None and known.pad_token_id in (known.eos_token_id, known.bos_token_id)
    for where, rows in (("begins", prompts), ("ends", prompts.flip(1))):
        found = _paddings(adapter, rows)
        row, least = int(found.argmax()), int(found.min())
        if int(found[row]) > max(least, int(is_text)):
            raise ValueError(
                f"reference prompt {row} {where} with {int(found[row])} padding tokens, another "
                f"with {least}, and their columns are combined. Pass prompts of one length, such "
                "as one of pairs.by_length()"
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
    """Raise a ValueError if a logit is NaN."""
    if logits.isnan().any():
        raise ValueError(
            f"{adapter.name!r} predicts NaN: a weight is NaN or infinite, or activations overflow "
            f"in {logits.dtype}"
        )


def heads_of(adapter: Adapter, heads: Sequence[HeadOrName]) -> list[tuple[int, int]]:
    """Heads as (layer, head) pairs, after checking that the model has them."""
    grid = HeadGrid(adapter.n_layers, adapter.n_heads)
    return [(layer, head) for layer, head in map(grid.index, heads)]
