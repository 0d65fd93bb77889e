"""What a model has and can read: its heads, its tokens, its context."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from sparse_tl.lens.adapter import Adapter


def check_tokens(adapter: Adapter, tokens: Int[Tensor, "*batch pos"]) -> None:
    """Check that the model can read these tokens.

    Raises:
        ValueError: the tokens exceed the context, or are outside the vocabulary.
    """
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
            f"{int(outside[0])}. Were they made with another tokenizer?"
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
