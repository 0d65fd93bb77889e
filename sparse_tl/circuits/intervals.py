"""Bootstrap intervals of the explained effect: how far it depends on which pairs were drawn.

1. Draw as many pairs as there are, with replacement; each draw is a row of weights over pairs.
2. The explained effect of a draw is the ratio of two weighted means, so no model is run again.
3. The ends of the interval are percentiles of the draws.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.metrics import explained_effect


def effect_interval(
    circuit: Float[Tensor, "*circuit pair"],
    clean: Float[Tensor, " pair"],
    corrupted: Float[Tensor, " pair"],
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[Float[Tensor, "*circuit"], Float[Tensor, "*circuit"]]:
    """Bootstrap interval of `explained_effect` over pairs: lower and upper ends.

    Args:
        circuit: metric of every pair under a circuit, or under several.
        clean: metric of the whole model.
        corrupted: metric with everything patched.
        level: share of draws inside the interval, between 0 and 1.
        resamples: number of draws, at least 1.
        seed: random seed.

    Raises:
        NoEffectError: the metric is the same with everything patched.
        ValueError: an argument is out of range.
    """
    at = torch.tensor(interval_ends(level), dtype=clean.dtype)
    effect = explained_effect(circuit, clean, corrupted)
    drawn = effect_draws(circuit, clean, corrupted, resamples=resamples, seed=seed)
    low, high = drawn.quantile(at, dim=0) if len(drawn) else (effect, effect)
    # With few pairs, a percentile interval may exclude the mean; widen it to include the mean.
    return torch.minimum(low, effect), torch.maximum(high, effect)


def interval_ends(level: float) -> tuple[float, float]:
    """The shares of draws below the ends of an interval that holds a share `level` of them.

    Raises:
        ValueError: the level is not between 0 and 1.
    """
    if not 0 < level < 1:
        raise ValueError(f"expected a level between 0 and 1; got {level}")
    return (1 - level) / 2, (1 + level) / 2


def effect_draws(
    circuit: Float[Tensor, "*circuit pair"],
    clean: Float[Tensor, " pair"],
    corrupted: Float[Tensor, " pair"],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Float[Tensor, " draw *circuit"]:
    """The explained effect of pairs drawn with replacement, once per draw.

    Draws in which the corruption has no effect, or the opposite one, have no ratio and are left
    out.

    Raises:
        ValueError: `resamples` is less than 1.
    """
    if resamples < 1:
        raise ValueError(f"expected at least 1 draw as resamples; got {resamples}")
    generator = torch.Generator().manual_seed(seed)
    n_pairs = len(clean)
    drawn = torch.randint(n_pairs, (resamples, n_pairs), generator=generator)
    weights = torch.zeros(resamples, n_pairs, dtype=clean.dtype)
    weights.scatter_add_(1, drawn, torch.ones_like(weights))
    whole = clean - corrupted
    of_draws = weights @ whole
    usable = of_draws.sign() == whole.mean().sign()
    kept = torch.tensordot(weights[usable], circuit - corrupted, dims=([1], [-1]))
    return kept / of_draws[usable].view(-1, *[1] * (kept.ndim - 1))
