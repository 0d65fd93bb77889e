"""Sampled binary gates on an attention pattern, with a backward pass of their own.

With the pattern ``p``, logits ``l = e + r`` (an edge's term and a query's term), logistic noise
``n`` and edge costs ``c``,

    A = [l + n > 0],    gated = A p,    expected = sum_(valid) sigmoid(l),    cost likewise

    d gated / d p  =  A
    d gated / d l  =  p sigmoid'((l + n) / temperature) / temperature
    d expected / d l  =  sigmoid'(l) + pressure [l > 0] at valid pairs

as in `BernoulliGate` and `with_pressure`. The edge's term is its score, or ``log p``. For
``log p``, the factor ``d l / d p = 1 / p`` is applied in a form that does not overflow for small p:
``p`` cancels in the derivative of the gated pattern, and with ``t = exp(-r)``,
``sigmoid'(l) / p = sigmoid(-l) / (p + t)``.

The backward pass needs only ``p``, ``l + n`` and, if they are read, the scores; the same formula
composed of single operations would keep six tensors of that size. On a GPU, `torch.compile` makes
a few kernels of each pass.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.devices import fastest
from sparse_tl.gates.distributions import GateSettings, logistic, uniform_noise
from sparse_tl.gates.sparse.counting import (
    Counted,
    EdgeCost,
    Pairs,
    Pattern,
    QueryTerm,
    counted_edges,
)

_STEEPEST = 80.0
"""Largest query term whose exponential is taken; that of 89 overflows in float32."""


def edge_term(
    scores: Float[Tensor, "*pattern"] | None, pattern: Float[Tensor, "*pattern"], dtype: torch.dtype
) -> Float[Tensor, "*pattern"]:
    """An edge's term in the logit of its gate: its score, or the logarithm of its attention."""
    if scores is not None:
        return scores.to(dtype)
    return pattern.to(dtype).clamp_min(torch.finfo(dtype).tiny).log()


def gated_pattern(
    scores: Pattern | None,
    pattern: Pattern,
    row: QueryTerm,
    temperature: float,
    now: GateSettings,
    cost: EdgeCost | None = None,
    valid: Pairs | None = None,
) -> tuple[Pattern, Counted]:
    """The pattern under sampled gates, and the counts of `counted_edges` at valid pairs, if given.

    The edges' term is the scores, or if these are None, the pattern's logarithm; `row` is each
    query's. Of the settings, the noise and the pressure are used.
    """
    row = row.expand(*pattern.shape[:3], 1)
    gated, expected, weighted, others = _GatedPattern.apply(
        scores, pattern, row, temperature, now, cost, valid
    )
    smooth = {"expected": expected, "cost": weighted}
    return gated, others | {name: sums for name, sums in smooth.items() if sums is not None}


class _GatedPattern(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        scores: Tensor | None,
        pattern: Tensor,
        row: Tensor,
        temperature: float,
        now: GateSettings,
        cost: Tensor | None,
        valid: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Counted]:
        # On a GPU, what follows the drawing is compiled into the same kernels as the gates.
        uniform = uniform_noise(row.expand(pattern.shape), now.generator) if now.noise else None
        scale = row.new_full((), now.noise)  # a number would be compiled into the kernel
        gate = fastest(_gated, pattern.device)
        gated, noisy, counts = gate(scores, pattern, row, uniform, scale, valid, cost)
        noisy = noisy if now.noise else None
        ctx.save_for_backward(scores, pattern, row, noisy, cost, valid)
        ctx.temperature, ctx.pressure = temperature, now.pressure
        return gated, counts.pop("expected", None), counts.pop("cost", None), counts

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:  # type: ignore[override]
        *inputs, cost, valid = ctx.saved_tensors
        by_gated, by_expected, by_cost, _ = gradients
        share = None
        if valid is not None:
            share = by_expected[..., None, None]
            if cost is not None:
                share = share + by_cost[..., None, None] * cost
        slopes = fastest(_slopes, by_gated.device)
        found = slopes(*inputs, by_gated, valid, share, ctx.temperature, ctx.pressure)
        return *found, None, None, None, None


def _gated(
    scores: Tensor | None,
    pattern: Tensor,
    row: Tensor,
    uniform: Tensor | None,
    scale: Tensor,
    valid: Tensor | None,
    cost: Tensor | None,
) -> tuple[Tensor, Tensor, Counted]:
    """The gated pattern, the logits with noise, and the counts."""
    logits = edge_term(scores, pattern, row.dtype) + row
    noisy = logits
    if uniform is not None:
        noisy = torch.addcmul(logits, logistic(uniform).to(logits.dtype), scale)
    counts: Counted = {}
    if valid is not None:
        is_open, chance = _positive(logits).mul_(valid), logits.sigmoid().mul_(valid)
        counts = counted_edges(valid, is_open, chance, cost)
    return pattern * _positive(noisy).to(pattern.dtype), noisy, counts


def _slopes(
    scores: Tensor | None,
    pattern: Tensor,
    row: Tensor,
    noisy: Tensor | None,
    by_gated: Tensor,
    valid: Tensor | None,
    share: Tensor | None,
    temperature: float,
    pressure: float,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of the scores, the pattern and the query terms; `share` is that of every count."""
    p = pattern.to(row.dtype)
    logits = edge_term(scores, pattern, row.dtype) + row
    drawn = logits if noisy is None else noisy
    soft = torch.sigmoid(drawn if temperature == 1 else drawn / temperature)
    # The derivative with respect to the logit, and the same divided by p.
    over_p = soft.mul_(1 - soft).mul_(by_gated)
    if temperature != 1:
        over_p.div_(temperature)
    by_logit = over_p * p
    if valid is not None and share is not None:
        chance, is_open, share = torch.sigmoid(logits), _positive(logits), share * valid
        if scores is None:
            over = (1 - chance) / (p + torch.exp(-row.clamp(max=_STEEPEST)))
            over += pressure * (is_open / p.clamp_min(torch.finfo(p.dtype).tiny))
            over_p += over * share
        by_logit += chance.mul_(1 - chance).add_(is_open, alpha=pressure).mul_(share)
    by_pattern = by_gated * _positive(drawn)
    if scores is None:
        by_pattern = by_pattern + over_p
    by_scores = None if scores is None else by_logit.to(scores.dtype)
    return by_scores, by_pattern.to(pattern.dtype), by_logit.sum(dim=-1, keepdim=True)


def _positive(values: Tensor) -> Tensor:
    """1 where a value is above 0, else 0; as floats, since CPUs multiply by booleans slowly."""
    return values.sign().clamp_min_(0)
