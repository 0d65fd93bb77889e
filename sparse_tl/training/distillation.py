"""Cross-entropy with labels and with the dense model's predictions, in few passes over the logits.

With the log-probabilities ``l = log softmax(logits)``, the dense model's probabilities ``q``, a
label ``y`` and the share ``d`` of the prediction,

    loss = -l_y,    minimised = (1 - d) loss - d sum_v q_v l_v
    d minimised / d logits_v  =  exp(l_v) - (1 - d) [v = y] - d q_v

At tens of thousands of words, these tensors are the largest of a step, and each operation reads
and writes one in main memory. Here the labels are taken a few at a time, so that intermediate
values stay in the cache, and the gradient is written over the dense model's logits.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.data.batches import log_probabilities

LOGITS_AT_ONCE = 2**19
"""Logits of which intermediate values are held at one time."""


def distilled(
    logits: Float[Tensor, "label vocab"],
    dense: Float[Tensor, "label vocab"],
    labels: Int[Tensor, " label"],
    share: float,
) -> tuple[Float[Tensor, " label"], Float[Tensor, " label"]]:
    """What is minimised for every label, which has a gradient, and its loss; both in nats.

    Args:
        logits: of the model that is trained.
        dense: logits of the dense model; overwritten.
        labels: labels.
        share: share of the dense model's prediction in what is minimised; the rest is the label's.
    """
    return _Distilled.apply(logits, dense, labels, share)


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, dense: Tensor, labels: Tensor, share: float
    ) -> tuple[Tensor, Tensor]:
        by_logits = dense if dense.dtype == logits.dtype else torch.empty_like(logits)
        size = max(1, LOGITS_AT_ONCE // logits.shape[1])
        losses, crossed = [], []
        for some in torch.arange(len(labels), device=labels.device).split(size):
            rows = slice(int(some[0]), int(some[-1]) + 1)
            label = (some - some[0], labels[rows])
            log_p = log_probabilities(logits[rows])
            q = dense[rows].to(log_p).softmax(dim=-1)
            losses.append(-log_p[label])
            crossed.append(-(q * log_p).sum(dim=-1))
            slope = log_p.exp_().sub_(q, alpha=share)
            slope[label] -= 1 - share
            by_logits[rows] = slope
        loss = torch.cat(losses)
        ctx.by_logits = by_logits
        ctx.mark_non_differentiable(loss)
        return (1 - share) * loss + share * torch.cat(crossed), loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_minimised: Tensor, _by_loss: Tensor) -> Any:  # type: ignore[override]
        by_logits = ctx.by_logits
        ctx.by_logits = None
        if by_logits is None:
            raise RuntimeError(
                "expected one backward pass for each forward pass; the gradient by the logits, "
                "which is kept once, is used up"
            )
        return by_logits.mul_(by_minimised[:, None]), None, None, None
