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
composed of single operations would keep six tensors of that size. On a CPU, both passes go through
the heads a few at a time, so that intermediate values stay in the cache; on a GPU, `torch.compile`
makes a few kernels of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.calls.devices import SizeByDevice, fastest
from sparse_tl.gates.distributions import logistic_noise
from sparse_tl.gates.sparse.computed_gates import GateSettings
from sparse_tl.gates.sparse.counting import Counted, open_edges, possible_edges

EDGES_AT_ONCE = SizeByDevice(cpu=2**20, elsewhere=2**24)
"""Number of edges whose intermediate values are held at one time."""
_STEEPEST = 80.0
"""Largest query term whose exponential is taken; that of 89 overflows in float32."""


def edge_term(
    scores: Float[Tensor, "*head query key"] | None,
    pattern: Float[Tensor, "*head query key"],
    dtype: torch.dtype,
) -> Float[Tensor, "*head query key"]:
    """An edge's term in the logit of its gate: its score, or the logarithm of its attention."""
    if scores is not None:
        return scores.to(dtype)
    return pattern.to(dtype).clamp_min(torch.finfo(dtype).tiny).log()


def gated_pattern(
    scores: Float[Tensor, "prompt head query key"] | None,
    pattern: Float[Tensor, "prompt head query key"],
    row: Float[Tensor, "#prompt head #query 1"],
    temperature: float,
    now: GateSettings,
    cost: Float[Tensor, "#head #query #key"] | None = None,
    valid: Bool[Tensor, "#prompt #head query key"] | None = None,
) -> tuple[Float[Tensor, "prompt head query key"], Counted]:
    """The pattern under sampled gates, and the counts of `attention_edges_of_layer`.

    Args:
        scores: attention scores, if they are the edges' term; None if the pattern's logarithm is.
        pattern: attention pattern.
        row: each query's term.
        temperature: temperature of the backward pass.
        now: settings, of which the noise's generator and scale and the pressure are used.
        cost: cost per edge.
        valid: pairs of real tokens that the layer's mask allows, which are counted; None to count
            nothing.
    """
    shape = pattern.shape[:2]
    given = None if cost is None else cost.expand(shape[1], *pattern.shape[2:])
    rows = row.expand(*shape, pattern.shape[2], 1).flatten(0, 1)
    scores = None if scores is None else scores.flatten(0, 1)
    gated, expected, weighted, whole = _GatedPattern.apply(
        scores, pattern.flatten(0, 1), rows, shape, temperature, now, given, valid
    )
    gated = gated.view(pattern.shape)
    if valid is None:
        return gated, {}
    counts = {**possible_edges(valid, *shape), **whole, "expected": expected}
    return gated, counts if cost is None else counts | {"cost": weighted}


class _GatedPattern(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        scores: Tensor | None,
        pattern: Tensor,
        row: Tensor,
        shape: torch.Size,
        temperature: float,
        now: GateSettings,
        cost: Tensor | None,
        valid: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        gate, fused = fastest(_gated, pattern.device)
        pieces = list(_pieces(pattern, whole=fused))
        gated, noisy = pattern, None
        if len(pieces) > 1:
            gated = torch.empty_like(pattern)
            noisy = torch.empty_like(pattern, dtype=row.dtype) if now.noise else None
        scale = row.new_full((), now.noise)  # a number would be compiled into the kernel
        sums: dict[str, list[Tensor]] = {}
        for some in pieces:
            p, r = _part(pattern, some), _part(row, some)
            noise = None
            if now.noise:
                noise = logistic_noise(r.expand(p.shape), now.generator)
            here, weights = _counted(shape, some, valid, cost)
            found = gate(_part(scores, some), p, r, noise, scale, here, weights)
            if len(pieces) == 1:
                gated, drawn, counts = found
                noisy = drawn if now.noise else None
            else:
                _part(gated, some).copy_(found[0])
                if noisy is not None:
                    _part(noisy, some).copy_(found[1])
                counts = found[2]
            for name, count in counts.items():
                sums.setdefault(name, []).append(count)
        whole = {name: torch.cat(found).view(shape) for name, found in sums.items()}
        expected = whole.pop("expected", row.new_zeros(shape))
        weighted = whole.pop("cost", row.new_zeros(shape))
        ctx.save_for_backward(scores, pattern, row, noisy, cost, valid)
        ctx.shape, ctx.temperature, ctx.pressure = shape, temperature, now.pressure
        return gated, expected, weighted, whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, *gradients: Any
    ) -> tuple[Any, ...]:
        scores, pattern, row, noisy, cost, valid = ctx.saved_tensors
        by_gated, by_expected, by_cost, _ = gradients
        slopes, fused = fastest(_slopes, pattern.device)
        by_scores = None if scores is None else torch.empty_like(scores)
        by_pattern, by_row = torch.empty_like(pattern), row.new_empty(row.shape)
        for some in _pieces(pattern, whole=fused):
            here, weights = _counted(ctx.shape, some, valid, cost)
            share = None
            if here is not None:
                share = by_expected.flatten()[some, None, None]
                if weights is not None:
                    share = share + by_cost.flatten()[some, None, None] * weights
            parts = [_part(values, some) for values in (scores, pattern, row, noisy, by_gated)]
            found = slopes(*parts, here, share, ctx.temperature, ctx.pressure)
            for total, part in zip((by_scores, by_pattern, by_row), found, strict=True):
                if total is not None:
                    _part(total, some).copy_(part)
        return by_scores, by_pattern, by_row, *[None] * 5


def _gated(
    scores: Float[Tensor, "some query key"] | None,
    pattern: Float[Tensor, "some query key"],
    row: Float[Tensor, "some query 1"],
    noise: Float[Tensor, "some query key"] | None,
    scale: Float[Tensor, ""],
    valid: Bool[Tensor, "#some query key"] | None,
    cost: Float[Tensor, "#some #query #key"] | None,
) -> tuple[Tensor, Tensor, Counted]:
    """The gated pattern, the logits with noise, and the counts of open edges."""
    logits = edge_term(scores, pattern, row.dtype) + row
    noisy = logits if noise is None else torch.addcmul(logits, noise, scale)
    counts: Counted = {}
    if valid is not None:
        counts = open_edges(_positive(logits).mul_(valid), logits.sigmoid().mul_(valid), cost)
    return pattern * _positive(noisy).to(pattern.dtype), noisy, counts


def _slopes(
    scores: Float[Tensor, "some query key"] | None,
    pattern: Float[Tensor, "some query key"],
    row: Float[Tensor, "some query 1"],
    noisy: Float[Tensor, "some query key"] | None,
    by_gated: Float[Tensor, "some query key"],
    valid: Bool[Tensor, "#some query key"] | None,
    share: Float[Tensor, "#some #query #key"] | None,
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


def _part(values: Any, some: slice) -> Any:
    """The values of some prompts and heads, as in `_pieces`."""
    whole = values is None or some.stop - some.start == len(values)
    return values if whole else values[some]


def _pieces(pattern: Float[Tensor, "all query key"], whole: bool) -> Iterator[slice]:
    """A few prompts and heads at a time, as a slice of the flattened axes; or all at once."""
    n, *edges = pattern.shape
    size = max(1, EDGES_AT_ONCE.on(pattern.device) // max(1, edges[0] * edges[1]))
    size = n if whole else size
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def _counted(
    shape: torch.Size, some: slice, valid: Tensor | None, cost: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The valid pairs of some prompts and heads, and the costs of edges that are not all 1."""
    if valid is None:
        return None, None
    if cost is not None:
        cost = cost[[place % shape[1] for place in range(some.start, some.stop)]]
    return _rows(valid, shape, some), cost


def _rows(
    valid: Bool[Tensor, "#prompt #head query key"], shape: torch.Size, some: slice
) -> Bool[Tensor, "#some query key"]:
    """The valid pairs of some prompts and heads, as in `_pieces`."""
    if valid.shape[0] == valid.shape[1] == 1:
        return valid[0]
    if some.stop - some.start == shape.numel():
        return valid.expand(*shape, -1, -1).flatten(0, 1)
    places = torch.arange(some.start, some.stop, device=valid.device)
    return valid.expand(*shape, -1, -1)[places // shape[1], places % shape[1]]
