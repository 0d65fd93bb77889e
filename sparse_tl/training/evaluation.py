"""Held-out measurements, dense and sparse through the same code, gates deterministic."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from sparse_tl.data.batches import TokenBatch, exact_rows, per_label_loss
from sparse_tl.gates import AttentionEdgeCounts, SparseTransformer
from sparse_tl.lens import Model, only_at
from sparse_tl.results import Result

LOGITS_AT_ONCE = 2**26
"""Logits of one forward pass at most: 256 MB in float32, and a few copies of them."""


@dataclass(frozen=True, repr=False)
class HeldOut(Result):
    """A model on held-out examples.

    Args:
        loss: mean cross-entropy in nats over all loss positions.
        accuracy: share of examples with every loss position right.
        active_attention_edges: open ones per example; all possible ones for a dense model.
        active_attention_edges_per_token: the same per token.
        possible_attention_edges: causal attention edges per example.
        active_heads: heads with at least one active edge in some example.
    """

    loss: float
    accuracy: float
    active_attention_edges: float
    active_attention_edges_per_token: float
    possible_attention_edges: float
    active_heads: int

    @property
    def active_share(self) -> float:
        """Active edges as a share of the possible ones."""
        return self.active_attention_edges / self.possible_attention_edges

    def __repr__(self) -> str:
        return (
            f"HeldOut(loss {self.loss:.4g} nats, {self.accuracy:.1%} of the examples right, "
            f"{self.active_attention_edges:.2f} of {self.possible_attention_edges:.0f} attention "
            f"edges active, {self.active_heads} heads in use)"
        )


@torch.no_grad()
def evaluate_held_out(
    model: Model | SparseTransformer, examples: TokenBatch, *, batch_size: int | None = None
) -> HeldOut:
    """Loss, accuracy and attention edges of a dense or sparse model on held-out examples.

    Args:
        model: a dense model or a SparseTransformer.
        examples: the held-out rows.
        batch_size: rows per forward pass; as many as keep the logits below `LOGITS_AT_ONCE` when
            left out.
    """
    fitting = LOGITS_AT_ONCE // (examples.tokens.shape[1] * model.cfg.d_vocab_out)
    pieces = examples.split(batch_size or max(1, min(256, fitting)))
    # A dense model is one whose gates are all open: wrap it for the length of the measurement.
    wrapped = model if isinstance(model, SparseTransformer) else SparseTransformer(model)
    losses, exact, counts = [], [], []
    try:
        with wrapped.opened() if wrapped is not model else nullcontext():
            for batch in pieces:
                batch = batch.to(wrapped.gates.bias.device)
                with only_at(wrapped, batch.loss_mask):
                    logits, counted = wrapped.run_with_counts(batch.tokens, **batch.model_kwargs)
                losses.append(per_label_loss(logits, batch).double())
                exact.append(exact_rows(logits, batch))
                counts.append(counted)
    finally:
        if wrapped is not model:
            wrapped.unwrap()
    edges = AttentionEdgeCounts.concatenate(counts)
    return HeldOut(
        loss=torch.cat(losses).mean().item(),
        accuracy=torch.cat(exact).double().mean().item(),
        active_attention_edges=edges.active_per_prompt,
        active_attention_edges_per_token=edges.active_per_token,
        possible_attention_edges=edges.possible_per_prompt,
        active_heads=edges.active_heads,
    )
