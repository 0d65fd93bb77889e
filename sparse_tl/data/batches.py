"""Batches of tokens that say what is to be predicted where, and the loss on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Tokens with the label of every position and the positions that count.

    The logits at position ``p`` predict ``labels[:, p]``; the loss is the mean cross-entropy in
    nats over the positions where `loss_mask` is true.

    Args:
        tokens: what the model reads.
        labels: what is predicted at each position (the next token, for a language model).
        loss_mask: which positions count.
        attention_mask: 0 at padding; ``None`` where nothing is padded.
    """

    tokens: Int[Tensor, "batch pos"]
    labels: Int[Tensor, "batch pos"]
    loss_mask: Bool[Tensor, "batch pos"]
    attention_mask: Int[Tensor, "batch pos"] | None = None

    def __post_init__(self) -> None:
        for name in ("labels", "loss_mask", "attention_mask"):
            value = getattr(self, name)
            if value is not None and value.shape != self.tokens.shape:
                raise ValueError(
                    f"expected {name} of the tokens' shape {tuple(self.tokens.shape)}; "
                    f"got {tuple(value.shape)}"
                )
        if not self.loss_mask.any():
            raise ValueError(
                f"expected at least one position with a loss in a batch of shape "
                f"{tuple(self.tokens.shape)}; `loss_mask` is false everywhere"
            )

    @staticmethod
    def next_token(tokens: Int[Tensor, "batch pos"]) -> TokenBatch:
        """Language modelling: every position but the last predicts the token after it."""
        labels = tokens.roll(-1, dims=1)
        loss_mask = torch.ones_like(tokens, dtype=torch.bool)
        loss_mask[:, -1] = False
        return TokenBatch(tokens, labels, loss_mask)

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device | str) -> TokenBatch:
        """The batch on another device."""
        return self._each(lambda tensor: tensor.to(device))

    def select(self, index: Tensor | slice) -> TokenBatch:
        """Some rows of the batch."""
        return self._each(lambda tensor: tensor[index])

    def split(self, size: int) -> list[TokenBatch]:
        """Consecutive pieces of `size` rows; more rows where a piece would have no label."""
        ends = []
        for end in range(size, len(self), size):
            start = ends[-1] if ends else 0
            if self.loss_mask[start:end].any() and self.loss_mask[end:].any():
                ends.append(end)
        return [
            self.select(slice(start, end))
            for start, end in zip([0, *ends], [*ends, len(self)], strict=True)
        ]

    def trimmed(self, *, causal: bool) -> TokenBatch:
        """The batch without columns that cannot matter to the loss.

        To a causal model these are the columns at the start that are padding in every row, and
        those after the last loss position. Where attention is bidirectional every column matters.

        Args:
            causal: whether the model's positions see earlier ones alone.
        """
        if not causal:
            return self
        stop = int(self.loss_mask.any(dim=0).nonzero()[-1]) + 1
        mask = self.attention_mask
        start = 0 if mask is None else int(mask.any(dim=0).nonzero()[0])
        return self._each(lambda tensor: tensor[:, start:stop])

    def _each(self, change: Callable[[Tensor], Tensor]) -> TokenBatch:
        mask = self.attention_mask
        tokens, labels, loss_mask = map(change, (self.tokens, self.labels, self.loss_mask))
        return TokenBatch(tokens, labels, loss_mask, None if mask is None else change(mask))

    @property
    def model_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of a forward pass beside the tokens."""
        return {} if self.attention_mask is None else {"attention_mask": self.attention_mask}


def concatenate(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Several batches of one length as one; the opposite of `TokenBatch.split`."""
    masks = [b.attention_mask for b in batches if b.attention_mask is not None]
    if masks and len(masks) != len(batches):
        raise ValueError("expected an attention mask in every batch or in none")
    return TokenBatch(
        torch.cat([b.tokens for b in batches]),
        torch.cat([b.labels for b in batches]),
        torch.cat([b.loss_mask for b in batches]),
        torch.cat(masks) if masks else None,
    )


def cross_entropy(logits: Float[Tensor, "batch pos vocab"], batch: TokenBatch) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats over the batch's loss positions, in float32 at least."""
    return per_label_loss(logits, batch).mean()


def per_label_loss(
    logits: Float[Tensor, "batch pos vocab"], batch: TokenBatch
) -> Float[Tensor, " label"]:
    """Cross-entropy in nats at each loss position, in row-major order."""
    chosen = logits[batch.loss_mask]
    precise = chosen if chosen.dtype == torch.float64 else chosen.float()
    return F.cross_entropy(precise, batch.labels[batch.loss_mask], reduction="none")


def exact_rows(
    logits: Float[Tensor, "batch pos vocab"], batch: TokenBatch
) -> Bool[Tensor, " batch"]:
    """Whether every loss position of a row has its label as the most likely token."""
    right = logits.argmax(dim=-1) == batch.labels
    return (right | ~batch.loss_mask).all(dim=-1)
