"""Fitted gates, measured on held-out prompts in one stack of gate matrices.

The cost of removing heads is measured as well, because gates do not show it: where a normalisation
cancels scale, a gate of 0.2 can be as good as a gate of 1, so that even an essential head can end
with a small gate when pushed shut.
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
    """Head roles from fitted gates, with losses and costs of removal on held-out prompts.

    `checkpoint` and `progress` are those of `target_log_probabilities`.
    """
    gates = trajectories[:, :, -1]
    _, g_plus, g_minus = gates
    n_stages, n_seeds, n_layers, n_heads = gates.shape
    all_heads = torch.ones(1, n_layers, n_heads, dtype=gates.dtype)
    without_head = all_heads.repeat(n_layers * n_heads, 1, 1)
    without_head.flatten(1).fill_diagonal_(0)
    scores = role_scores(g_plus, g_minus).values()
    others = torch.stack([score < THRESHOLD for score in scores]).to(gates.dtype)
    without_role = torch.stack([others, others * g_plus])
    sizes = [n_stages * n_seeds, 1, len(without_head), without_role[..., 0, 0].numel()]
    stack = torch.cat([gates.flatten(0, 1), all_heads, without_head, without_role.flatten(0, 2)])
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
        removed_together=losses[3].view(without_role.shape[:3]) - before,
    )


def has_fitted(
    excess: Float[Tensor, "stage seed row"], n_labels: int, lambda_: float
) -> Bool[Tensor, " seed"]:
    """Whether G+ and G- of each seed are as good as minimisers of their objectives must be.

    A fit can choose to open all gates, which gives the model without gates. The penalty
    ``-lambda mean(clamp(theta, -4, 4))`` has a range of ``8 |lambda|`` nats. So

        NLL(G) - NLL(no gates) > 8 |lambda|

    implies that opening all gates would be better than G: the fit is stuck, and its gates are not
    informative. For G+, any difference above 0 implies this; the margin allows for incomplete
    optimisation. Two standard errors of the difference, paired by prompt, allow for the choice of
    prompts.

    Args:
        excess: NLL of each held-out target under G+ and G-, minus that without gates, in nats.
        n_labels: total number of target tokens.
        lambda_: coefficient of the penalty.
    """
    n_rows = excess.shape[-1]
    mean = excess.sum(dim=-1) / n_labels
    error = torch.zeros_like(mean)
    if n_rows > 1:
        error = excess.std(dim=-1) * math.sqrt(n_rows) / n_labels
    return (mean - 2 * error <= 2 * LARGEST_LOGIT * abs(lambda_)).all(dim=0)
