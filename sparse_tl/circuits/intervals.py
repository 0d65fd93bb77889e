"""How much a measurement depends on the choice of prompts.

Bootstrap draws of the explained effect:

1. Draw as many pairs as there are, with replacement; each draw is a row of weights over pairs.
2. The explained effect of a draw is a ratio of two weighted means, so no model is run again.
3. The ends of an interval are percentiles over draws.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from jaxtyping import Float
from torch import Tensor


def interval_ends(level: float) -> tuple[float, float]:
    """The percentiles, as shares, at the ends of an interval with a share `level` of the draws.

    Raises:
        ValueError: the level is not between 0 and 1.
    """
    if not 0 < level < 1:
        raise ValueError(f"expected a level between 0 and 1; got {level}")
    return (1 - level) / 2, (1 + level) / 2


def effect_draws(
    circuit: Float[Tensor, "*circuit pair"],
    clean: Float[Tensor, " pair"],
    none: Float[Tensor, " pair"],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Float[Tensor, " draw *circuit"]:
    """The explained effect on pairs drawn with replacement, for each draw.

    Draws in which the patch has no effect, or the opposite effect, have no meaningful ratio and are
    left out.

    Args:
        circuit: metric of every pair under a circuit, or under several.
        clean: metric of the whole model.
        none: metric with everything patched.
        resamples: number of draws, at least 1.
        seed: random seed.

    Raises:
        ValueError: `resamples` is less than 1.
    """
    if resamples < 1:
        raise ValueError(f"expected at least 1 draw as resamples; got {resamples}")
    generator = torch.Generator().manual_seed(seed)
    n_pairs = len(clean)
    pairs = torch.randint(n_pairs, (resamples, n_pairs), generator=generator)
    weights = torch.zeros(resamples, n_pairs, dtype=clean.dtype)
    weights.scatter_add_(1, pairs, torch.ones_like(weights))
    total = weights @ (clean - none)
    usable = total.sign() == (clean - none).mean().sign()
    explained = torch.tensordot(weights[usable], circuit - none, dims=([1], [-1]))
    return explained / total[usable].view(-1, *[1] * (explained.ndim - 1))


def mean_interval(values: Float[Tensor, " pair"], level: float = 0.95) -> tuple[float, float]:
    """Lower and upper ends of a bootstrap interval of a mean over pairs; includes the mean."""
    drawn = effect_draws(values, torch.ones_like(values), torch.zeros_like(values))
    low, high = drawn.quantile(torch.tensor(interval_ends(level)).to(values)).tolist()
    mean = values.mean().item()
    return min(low, mean), max(high, mean)


def wilson_interval(n_true: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Lower and upper ends of Wilson's interval of a share, 0 to 1.

    Reference: Wilson (1927), Journal of the American Statistical Association 22, 209-212.
    """
    z = NormalDist().inv_cdf(interval_ends(level)[1])
    half = z * math.sqrt(n_true * (n - n_true) / n + z**2 / 4)
    middle, total = n_true + z**2 / 2, n + z**2
    return max(0.0, (middle - half) / total), min(1.0, (middle + half) / total)


def sign_test(lost: int, won: int) -> float:
    """The two-sided p of as unequal a split of the pairs that only one of two models has right.

    Reference: McNemar (1947), Psychometrika 12, 153-157, with exact probabilities.
    """
    tail = sum(math.comb(lost + won, k) for k in range(min(lost, won) + 1))
    return min(1.0, 2 * tail / 2 ** (lost + won))
