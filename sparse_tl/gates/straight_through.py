"""Sampled binary gates on an attention pattern, with a backward pass of their own.

With pattern ``p``, logits ``l = s + b``, logistic noise ``n`` and costs ``c`` of the edges,

    A = [l + n > 0],    gated = A p,    expected = sum_(valid) sigmoid(l),    cost likewise

    d gated / d p  =  A
    d gated / d l  =  p sigmoid'((l + n) / temperature) / temperature
    d expected / d l  =  sigmoid'(l) + pressure [l > 0] at valid pairs

as in `BernoulliGate` and `press`. For the backward pass only ``s``, ``p`` and ``l + n`` are kept;
composed of single operations, the same keeps six tensors of that size. Both passes go through the
heads a few at a time, so that intermediate values stay small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.gates.distributions import logistic_noise
from sparse_tl.gates.layer_counts import open_edges, possible_edges
from sparse_tl.gates.passes import Counted, GateSettings

EDGES_AT_ONCE = 2**20
"""Edges of which intermediate values are held at one time."""


def gated_pattern(
    scores: Float[Tensor, "prompt head query key"],
    pattern: Float[Tensor, "prompt head query key"],
    bias: Float[Tensor, " head"],
    temperature: float,
    now: GateSettings,
    cost: Float[Tensor, "#head #query #key"] | None = None,
    valid: Bool[Tensor, "#prompt #head query key"] | None = None,
) -> tuple[Float[Tensor, "prompt head query key"], Counted]:
    """The pattern under sampled gates, and the counts of `attention_edges_of_layer`.

    Args:
        scores: attention scores.
        pattern: attention pattern.
        bias: gate bias of every head.
        temperature: that of the backward pass.
        now: generator and scale of the noise, and pressure.
        cost: cost per edge.
        valid: pairs of real tokens that the layer's mask allows, which are counted; None to count
            nothing.
    """
    shape = scores.shape[:2]
    given = None if cost is None else cost.expand(shape[1], *scores.shape[2:])
    gated, expected, weighted, whole = _GatedPattern.apply(
        scores, pattern, bias, temperature, now, given, valid
    )
    if valid is None:
        return gated, {}
    counts = {**possible_edges(valid, *shape), **whole, "expected": expected}
    return gated, counts if cost is None else counts | {"cost": weighted}


class _GatedPattern(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        scores: Tensor,
        pattern: Tensor,
        bias: Tensor,
        temperature: float,
        now: GateSettings,
        cost: Tensor | None,
        valid: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        shape = scores.shape[:2]
        gated, noisy = torch.empty_like(pattern), None
        if now.noise:
            noisy = torch.empty_like(scores, dtype=bias.dtype)
        sums: dict[str, list[Tensor]] = {}
        for some, heads in _pieces(scores):
            logits = _flat(scores)[some].to(bias.dtype) + bias[heads, None, None]
            drawn = logits if noisy is None else _flat(noisy)[some]
            if noisy is not None:
                noise = logistic_noise(logits, now.generator)
                torch.add(logits, noise, alpha=now.noise, out=drawn)
            torch.mul(_flat(pattern)[some], drawn > 0, out=_flat(gated)[some])
            if valid is not None:
                here, weights = _rows(valid, shape, some), None if cost is None else cost[heads]
                chance = torch.sigmoid(logits).mul_(here)
                for name, found in open_edges((logits > 0) & here, chance, weights).items():
                    sums.setdefault(name, []).append(found)
        whole = {name: torch.cat(found).view(shape) for name, found in sums.items()}
        expected = whole.pop("expected", bias.new_zeros(shape))
        weighted = whole.pop("cost", bias.new_zeros(shape))
        ctx.save_for_backward(scores, pattern, bias, noisy, cost, valid)
        ctx.temperature, ctx.pressure = temperature, now.pressure
        return gated, expected, weighted, whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, *gradients: Any
    ) -> tuple[Any, ...]:
        scores, pattern, bias, noisy, cost, valid = ctx.saved_tensors
        by_gated, by_expected, by_cost, _ = gradients
        by_scores, by_pattern = torch.empty_like(scores), torch.empty_like(pattern)
        by_bias = torch.zeros_like(bias)
        for some, heads in _pieces(scores):
            logits = _flat(scores)[some].to(bias.dtype) + bias[heads, None, None]
            drawn = logits if noisy is None else _flat(noisy)[some]
            torch.mul(_flat(by_gated)[some], drawn > 0, out=_flat(by_pattern)[some])
            soft = torch.sigmoid(drawn / ctx.temperature)
            found = soft.mul_(1 - soft).div_(ctx.temperature)
            found *= _flat(by_gated)[some] * _flat(pattern)[some]
            if valid is not None:
                share = by_expected.flatten()[some, None, None]
                if cost is not None:
                    share = share + by_cost.flatten()[some, None, None] * cost[heads]
                chance = torch.sigmoid(logits)
                slope = chance.mul_(1 - chance).add_(logits > 0, alpha=ctx.pressure).mul_(share)
                found += slope.mul_(_rows(valid, scores.shape[:2], some))
            _flat(by_scores)[some] = found.to(scores.dtype)
            by_bias.index_add_(0, heads, found.sum(dim=(-2, -1)))
        return by_scores, by_pattern, by_bias, None, None, None, None


def _flat(values: Tensor) -> Tensor:
    return values.flatten(0, 1)


def _pieces(scores: Float[Tensor, "prompt head query key"]) -> Iterator[tuple[slice, Tensor]]:
    """Some prompts and heads at a time: their places when these are flattened, and the heads."""
    n_prompts, n_heads, *edges = scores.shape
    size = max(1, EDGES_AT_ONCE // max(1, edges[0] * edges[1]))
    for start in range(0, n_prompts * n_heads, size):
        stop = min(start + size, n_prompts * n_heads)
        yield slice(start, stop), torch.arange(start, stop, device=scores.device) % n_heads


def _rows(
    valid: Bool[Tensor, "#prompt #head query key"], shape: torch.Size, some: slice
) -> Bool[Tensor, "#some query key"]:
    """The valid pairs of some prompts and heads, as in `_pieces`."""
    if valid.shape[0] == valid.shape[1] == 1:
        return valid[0]
    places = torch.arange(some.start, some.stop, device=valid.device)
    return valid.expand(*shape, -1, -1)[places // shape[1], places % shape[1]]
