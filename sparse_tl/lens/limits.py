"""What a model has and can read: its heads, its tokens, its context."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.data import PromptPairs, TokenBatch
from sparse_tl.lens.adapter import Adapter


def check_tokens(adapter: Adapter, tokens: Int[Tensor, "*batch pos"]) -> None:
    """Check that the model can read these tokens.

    Raises:
        ValueError: there is no token, the tokens exceed the context, or are outside the vocabulary.
    """
    if not tokens.numel():
        raise ValueError(f"expected prompts of at least one token; got shape {[*tokens.shape]}")
    if tokens.shape[-1] > adapter.n_ctx:
        raise ValueError(
            f"expected a prompt of at most {adapter.n_ctx} tokens, the model's context; got "
            f"{tokens.shape[-1]}"
        )
    outside = tokens[(tokens < 0) | (tokens >= adapter.d_vocab)]
    if len(outside):
        raise ValueError(f"expected tokens in 0..{adapter.d_vocab - 1}; got {int(outside[0])}")


def check_labels(adapter: Adapter, labels: Int[Tensor, "*label"]) -> None:
    """Check that the model can predict these tokens.

    Raises:
        ValueError: a label is outside the vocabulary that the model predicts.
    """
    outside = labels[(labels < 0) | (labels >= adapter.d_vocab_out)]
    if len(outside):
        raise ValueError(
            f"expected labels in 0..{adapter.d_vocab_out - 1}, what the model predicts; got "
            f"{int(outside[0])}. Were they made with another tokenizer? A model with d_vocab_out "
            "other than d_vocab numbers what it predicts by itself."
        )


def check_rows(adapter: Adapter, rows: TokenBatch) -> None:
    """Check that the model can read these rows, and predict their labels.

    Raises:
        ValueError: as in `check_tokens` and `check_labels`.
    """
    check_tokens(adapter, rows.tokens)
    check_labels(adapter, rows.loss_labels())


def check_pairs(adapter: Adapter, pairs: PromptPairs) -> None:
    """Check that the model can read these prompts, and predict all answers and wrong answers.

    Raises:
        ValueError: as in `check_tokens` and `check_labels`.
    """
    check_tokens(adapter, torch.cat([pairs.clean, pairs.corrupted]))
    for side in (pairs.answers, pairs.wrong):
        check_labels(adapter, side[side >= 0])


def check_numbers(adapter: Adapter, logits: Float[Tensor, "*_"]) -> None:
    """Check that what the model predicts are numbers.

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
