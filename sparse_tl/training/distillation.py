"""Cross-entropy and divergence from the dense model's predictions, in few passes over the logits.

With the log-probabilities ``l = log softmax(logits)``, the dense model's probabilities ``q``, a
label ``y`` and the share ``d`` of the prediction,

    loss = -l_y,    minimised = (1 - d) loss - d sum_v q_v l_v
    d minimised / d logits_v  =  exp(l_v) - (1 - d) [v = y] - d q_v

With a vocabulary of tens of thousands of tokens, these tensors are the largest of a step, and each
operation reads and writes one in main memory. Here the labels are processed in small chunks, so
that intermediate values stay in the cache, and the gradient overwrites the dense model's logits. If
the unembedding is frozen, no logits are kept: each chunk's gradient with respect to the final
residual stream is computed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.calls.autograd import autograd
from sparse_tl.calls.devices import SizeByDevice
from sparse_tl.data.batches import log_probabilities

LOGITS_PER_CHUNK = SizeByDevice(cpu=2**19, elsewhere=2**25)
"""Logits per chunk of labels; on a CPU, its intermediate values fit into the cache."""
LOGITS_AT_ONCE = SizeByDevice(cpu=2**22, elsewhere=2**28)
"""Logits that are computed at once from the residual stream, each of which reads all weights."""

Unembed = Callable[[Tensor], Tensor]
"""Function from the final residual stream ``[label, d_model]`` to logits ``[label, vocab]``."""


def distilled_from(
    final: Float[Tensor, "label d_model"],
    unembed: Unembed,
    dense: Float[Tensor, "label d_model"],
    dense_unembed: Unembed,
    labels: Int[Tensor, " label"],
    share: float,
) -> tuple[Float[Tensor, " label"], Float[Tensor, " label"]]:
    """As `distilled`, from the final residual stream of both models."""
    one = unembed(final[:1].detach())
    if one.requires_grad or not len(labels):  # it is trained
        return distilled(unembed(final), dense_unembed(dense), labels, share)
    size = LOGITS_AT_ONCE.on(final.device) // one.shape[1]
    return _FromFinal.apply(final, unembed, dense, dense_unembed, labels, share, size)


def distilled(
    logits: Float[Tensor, "label vocab"],
    dense: Float[Tensor, "label vocab"],
    labels: Int[Tensor, " label"],
    share: float,
) -> tuple[Float[Tensor, " label"], Float[Tensor, " label"]]:
    """The minimised value of every label, which has a gradient, and its loss; both in nats.

    Args:
        logits: logits of the trained model.
        dense: logits of the dense model; overwritten.
        labels: labels.
        share: share of the dense model's prediction in the minimised value; the rest is the
            label's.
    """
    return _Distilled.apply(logits, dense, labels, share)


def losses_and_divergences(
    logits: Float[Tensor, "label vocab"],
    dense: Float[Tensor, "label vocab"],
    labels: Int[Tensor, " label"],
) -> tuple[Float[Tensor, " label"], Float[Tensor, " label"]]:
    """Loss and divergence ``sum_v q_v (log q_v - l_v)`` of every label, in nats; no gradients.

    Args:
        logits: logits of the measured model.
        dense: logits of the dense model.
        labels: labels.
    """
    losses, divergences = [], []
    for rows in _chunks(logits):
        log_p, log_q = log_probabilities(logits[rows]), log_probabilities(dense[rows])
        losses.append(-log_p.gather(1, labels[rows, None])[:, 0])
        divergences.append((log_q.exp() * log_q.sub_(log_p)).sum(dim=-1))
    return torch.cat(losses), torch.cat(divergences)


def _chunks(logits: Float[Tensor, "label vocab"]) -> Iterator[slice]:
    return _slices(len(logits), LOGITS_PER_CHUNK.on(logits.device) // logits.shape[1])


def _slices(n: int, size: int) -> Iterator[slice]:
    size = max(1, size)
    return (slice(start, start + size) for start in range(0, max(1, n), size))


class _FromFinal(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        final: Tensor,
        unembed: Unembed,
        dense: Tensor,
        dense_unembed: Unembed,
        labels: Tensor,
        share: float,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        by_final = torch.empty_like(final)
        found = []
        for rows in _slices(len(final), size):
            with autograd(True):
                read = final[rows].detach().requires_grad_()
                logits = unembed(read)
                pair = distilled(logits, dense_unembed(dense[rows]), labels[rows], share)
                (by_final[rows],) = torch.autograd.grad(pair[0].sum(), read)
            found.append([values.detach() for values in pair])
        minimised, loss = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(by_final)
        ctx.mark_non_differentiable(loss)
        return minimised, loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, by_minimised: Tensor, _by_loss: Tensor
    ) -> Any:
        (by_final,) = ctx.saved_tensors
        return by_final * by_minimised[:, None].to(by_final.dtype), *[None] * 6


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, dense: Tensor, labels: Tensor, share: float
    ) -> tuple[Tensor, Tensor]:
        by_logits = dense if dense.dtype == logits.dtype else torch.empty_like(logits)
        losses, crossed = [], []
        for rows in _chunks(logits):
            label = labels[rows, None]
            log_p = log_probabilities(logits[rows])
            q = dense[rows].to(log_p).softmax(dim=-1)
            losses.append(-log_p.gather(1, label)[:, 0])
            crossed.append(-(q * log_p).sum(dim=-1))
            slope = log_p.exp_().sub_(q, alpha=share)
            slope.scatter_add_(1, label, torch.full_like(label, share - 1, dtype=slope.dtype))
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
                "expected one backward pass per forward pass; the gradient with respect to the "
                "logits is overwritten by the first"
            )
        return by_logits.mul_(by_minimised[:, None]), None, None, None
