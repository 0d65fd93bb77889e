"""How likely the targets are under gated heads: logits where a target is predicted, nowhere else.

Memory does not grow with the vocabulary times the length of the prompts: of all positions only
those of the targets are unembedded, and no more than `LOGITS_AT_ONCE` logits exist at a time, with
or without gradients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import GatedRun, Heads
from sparse_tl.lens import HookedModel, adapt

LOGITS_AT_ONCE = 2**24
"""64 MB in float32."""
ACTIVATIONS_AT_ONCE = 2**25
"""Of one layer, in a pass without gradients: 128 MB in float32."""


def target_losses(
    model: HookedModel, batch: TokenBatch, gates: Float[Tensor, "stack layer head"]
) -> Float[Tensor, "stack label"]:
    """Negative log-probability in nats of every target token under every matrix of gates.

    Args:
        model: dense or sparse.
        batch: prompts; their loss positions predict the targets, row by row.
        gates: on heads; the result is differentiable in them.
    """
    batch = batch.trimmed(causal=adapt(model).causal)
    final = GatedRun(
        model, Heads(), batch.tokens, batch.loss_mask, attention_mask=batch.attention_mask
    ).final(gates)
    return label_losses(model, final, batch.labels[batch.loss_mask])


def label_losses(
    model: HookedModel,
    final: Float[Tensor, "stack label d_model"],
    labels: Int[Tensor, " label"],
) -> Float[Tensor, "stack label"]:
    """Negative log-probability in nats of labels after these final residual streams."""
    n_labels = max(1, LOGITS_AT_ONCE // (len(final) * model.cfg.d_vocab_out))
    losses = []
    for some, of in zip(final.split(n_labels, dim=1), labels.split(n_labels), strict=True):
        if torch.is_grad_enabled() and n_labels < len(labels):
            # Logits are computed again in the backward pass instead of being kept.
            piece = checkpoint(_losses, model, some, of, use_reentrant=False)
            assert isinstance(piece, Tensor)
        else:
            piece = _losses(model, some, of)
        losses.append(piece)
    return torch.cat(losses, dim=1)


@torch.no_grad()
def target_log_probabilities(
    model: HookedModel,
    rows: TokenBatch,
    gates: Float[Tensor, "stack layer head"],
    *,
    rows_at_once: int | None = None,
) -> Float[Tensor, "stack row"]:
    """Log-probability in nats of every row's whole target under every matrix of gates, on the CPU.

    Args:
        model: dense or sparse.
        rows: prompts with their targets.
        gates: on heads.
        rows_at_once: prompts times matrices of one forward pass; as many as keep one layer's
            activations below `ACTIVATIONS_AT_ONCE` when left out.
    """
    if rows_at_once is None:
        rows_at_once = _fitting_rows(model, rows.tokens.shape[1])
    if rows_at_once < 1:
        raise ValueError(f"expected rows_at_once of at least 1; got {rows_at_once}")
    device = adapt(model).device
    n_rows = min(len(rows), 64, rows_at_once)
    n_gates = max(1, rows_at_once // n_rows)
    parts = []
    for batch in rows.split(n_rows):
        batch = batch.to(device)
        row_of = batch.loss_mask.nonzero()[:, 0].cpu()
        stacks = []
        for some in gates.to(device).split(n_gates):
            losses = target_losses(model, batch, some).cpu().double()
            summed = losses.new_zeros(len(some), len(batch))
            stacks.append(summed.index_add_(1, row_of, losses, alpha=-1))
        parts.append(torch.cat(stacks))
    return torch.cat(parts, dim=1)


def _fitting_rows(model: HookedModel, length: int) -> int:
    adapter = adapt(model)
    per_token = adapter.n_heads * length + adapter.activations_per_token
    return max(1, ACTIVATIONS_AT_ONCE // (length * per_token))


def _losses(
    model: HookedModel, final: Float[Tensor, "stack label d_model"], labels: Int[Tensor, " label"]
) -> Float[Tensor, "stack label"]:
    logits = adapt(model).logits(final)
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(precise.flatten(0, 1), labels.repeat(len(final)), reduction="none").view(
        len(final), -1
    )
