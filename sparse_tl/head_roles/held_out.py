"""Measure fitted gates on held-out prompts, all in one stack of gate matrices.

The cost of removing a head is measured as well, because gates do not show it. Where a normalisation
undoes scale, a gate of 0.2 can be as good as one of 1, and even an essential head can end with a
small gate when pushed shut.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.data.batches import TokenBatch
from sparse_tl.head_roles.likelihood import LARGEST_LOGIT
from sparse_tl.head_roles.measuring import target_log_probabilities
from sparse_tl.head_roles.roles import THRESHOLD, HeadRoles, role_scores
from sparse_tl.lens import HookedModel


def measured_roles(
    model: HookedModel,
    rows: TokenBatch,
    trajectories: Float[Tensor, "stage seed record layer head"],
    *,
    seeds: tuple[int, ...],
    lambda_: float,
    recorded_at: tuple[int, ...],
    checkpoint: Path | None = None,
    progress: bool = False,
) -> HeadRoles:
    """Head roles from fitted gates, with their losses and removal costs on held-out prompts.

    Checkpoint and progress bar are those of `target_log_probabilities`.
    """
    gates = trajectories[:, :, -1]
    _, g_plus, g_minus = gates
    n_stages, n_seeds, n_layers, n_heads = gates.shape
    every_head = torch.ones(1, n_layers, n_heads, dtype=gates.dtype)
    alone = every_head.repeat(n_layers * n_heads, 1, 1)
    alone.flatten(1).fill_diagonal_(0)
    scores = role_scores(g_plus, g_minus).values()
    others = torch.stack([score < THRESHOLD for score in scores]).to(gates.dtype)
    together = torch.stack([others, others * g_plus])
    sizes = [n_stages * n_seeds, 1, len(alone), together[..., 0, 0].numel()]
    stack = torch.cat([gates.flatten(0, 1), every_head, alone, together.flatten(0, 2)])
    log_probabilities = target_log_probabilities(
        *(model, rows, stack),
        checkpoint=checkpoint,
        title="removing heads",
        progress=progress,
    )
    n_labels = int(rows.loss_mask.sum())
    losses = (-log_probabilities.sum(dim=1) / n_labels).split(sizes)
    fitted_losses = losses[0].view(n_stages, n_seeds)
    dense_loss = losses[1].item()
    before = torch.stack([losses[1].expand(n_seeds), fitted_losses[1]])[:, None]
    by_row = log_probabilities.split(sizes)
    return HeadRoles(
        seeds=seeds,
        lambda_=lambda_,
        trajectories=trajectories,
        recorded_at=recorded_at,
        losses=fitted_losses.clone(),
        dense_loss=dense_loss,
        fitted=has_fitted(by_row[1] - by_row[0].view(n_stages, n_seeds, -1)[1:], n_labels, lambda_),
        removed=losses[2].view(n_layers, n_heads) - dense_loss,
        removed_together=losses[3].view(together.shape[:3]) - before,
    )


def has_fitted(
    excess: Float[Tensor, "stage seed row"], n_labels: int, lambda_: float
) -> Bool[Tensor, " seed"]:
    """Whether G+ and G- are as good as minimisers of their objectives must be.

    The model without gates is among the settings that a fit can choose. It beats every setting
    whose loss exceeds its own by more than the penalty can compensate, and the penalty
    ``-lambda mean(clamp(theta, -4, 4))`` ranges over ``8 |lambda|`` nats. So

        NLL(G) - NLL(no gates) > 8 |lambda|

    implies that G is not a minimiser: the fit is stuck, and its gates are not informative. For G+
    any difference above 0 would imply this; the margin allows for incomplete optimisation. Sampling
    of prompts is allowed for by two standard errors of the difference, paired by prompt.

    Args:
        excess: NLL of every held-out target under G+ and G- minus that without gates, in nats.
        n_labels: total number of target tokens.
        lambda_: coefficient of the penalty.
    """
    n_rows = excess.shape[-1]
    mean = excess.sum(dim=-1) / n_labels
    error = torch.zeros_like(mean)
    if n_rows > 1:
        error = excess.std(dim=-1) * math.sqrt(n_rows) / n_labels
    return (mean - 2 * error <= 2 * LARGEST_LOGIT * abs(lambda_)).all(dim=0)
