"""Results of circuit evaluation: the explained effect, or faithfulness, by circuit size."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.calls.arguments import Share, checked
from sparse_tl.circuits.intervals import effect_draws, interval_ends
from sparse_tl.metrics import explained_effect
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Evaluation(Result):
    """The metric of every pair under every circuit.

    Args:
        sizes: number of parts that each circuit keeps.
        total: number of parts in the model.
        values: metric under each circuit.
        clean: metric of the whole model.
        none: metric with everything patched.
        prompt_start: text that every prompt started with, such as BOS; ``None`` if not known.
    """

    sizes: tuple[int, ...]
    total: int
    values: Float[Tensor, "circuit pair"]
    clean: Float[Tensor, " pair"]
    none: Float[Tensor, " pair"]
    prompt_start: str | None = None

    @property
    def effect(self) -> Float[Tensor, " circuit"]:
        """The explained effect (faithfulness) of each circuit.

        Raises:
            NoEffectError: the metric is the same with everything patched.
        """
        return explained_effect(self.values, self.clean, self.none)

    def interval(
        self, level: float = 0.95, resamples: int = 1000, seed: int = 0
    ) -> tuple[Float[Tensor, " circuit"], Float[Tensor, " circuit"]]:
        """Lower and upper ends of a bootstrap interval of the explained effect over pairs.

        Pairs are drawn with replacement; the ends are percentiles of the explained effect.

        Args:
            level: share of draws inside the interval, between 0 and 1.
            resamples: number of draws, at least 1.
            seed: random seed.

        Raises:
            ValueError: an argument is out of range, or as in `effect`.
        """
        ends = torch.tensor(interval_ends(level), dtype=self.clean.dtype)
        effect = self.effect
        drawn = effect_draws(self.values, self.clean, self.none, resamples=resamples, seed=seed)
        low, high = drawn.quantile(ends, dim=0) if len(drawn) else (effect, effect)
        # With few pairs, a percentile interval may exclude the effect: widen it to include it.
        return torch.minimum(low, effect), torch.maximum(high, effect)

    @checked
    def size_interval(
        self, effect: Share = 0.9, *, level: float = 0.95, resamples: int = 1000, seed: int = 0
    ) -> tuple[float | None, float | None]:
        """Lower and upper ends of a bootstrap interval of `EffectCurve.size_at` over pairs.

        The sizes must be increasing.

        Args:
            effect: explained effect to reach, above 0 and at most 1.
            level: share of draws inside the interval, between 0 and 1.
            resamples: number of draws, at least 1.
            seed: random seed.

        Returns:
            Number of parts at either end; ``None`` if the draw at that end misses the effect.

        Raises:
            ValueError: an argument is out of range, or as in `effect`.
        """
        low, high = interval_ends(level)
        drawn = effect_draws(self.values, self.clean, self.none, resamples=resamples, seed=seed)
        curves = [EffectCurve("", self.sizes, *[draw] * 3) for draw in drawn.tolist()]
        sizes = [curve.size_at(effect) for curve in [*curves, self.curve("")]]
        reached = torch.tensor(
            [math.inf if size is None else size for size in sizes], dtype=torch.float64
        )
        ends = (
            reached.quantile(low, interpolation="lower").item(),
            reached.quantile(high, interpolation="higher").item(),
        )
        return tuple(end if math.isfinite(end) else None for end in ends)  # type: ignore[return-value]

    def curve(self, name: str) -> EffectCurve:
        """The explained effect with its interval, for plotting; sizes must be increasing."""
        low, high = self.interval()
        return EffectCurve(name, self.sizes, self.effect.tolist(), low.tolist(), high.tolist())

    def to_pandas(self) -> pd.DataFrame:
        """One row per circuit: size, explained effect with its interval, and mean metric."""
        import pandas as pd

        low, high = self.interval()
        return pd.DataFrame(
            {
                "size": self.sizes,
                "explained_effect": self.effect,
                "low": low,
                "high": high,
                "metric": self.values.mean(dim=1),
            }
        )

    def __repr__(self) -> str:
        by_size = ", ".join(
            f"{size}: {effect:.2f}"
            for size, effect in zip(self.sizes, self.effect.tolist(), strict=True)
        )
        return f"Evaluation(explained effect of {len(self.clean)} pairs by size: {by_size})"


@dataclass(frozen=True)
class EffectCurve(Result):
    """The explained effect of circuits of growing size, for one model on one task.

    Lists and arrays are converted to tuples of plain numbers.

    Args:
        name: name of the model.
        sizes: number of parts that each circuit keeps, increasing.
        mean: explained effect at each size; 1: that of the whole model.
        low: lower end of the interval at each size.
        high: upper end of the interval at each size.

    Raises:
        ValueError: there is no size, lengths differ, sizes are not increasing whole numbers from 0
            on, a number is not finite, or the ends of an interval are swapped.
    """

    name: str
    sizes: Sequence[int]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]

    def __post_init__(self) -> None:
        sizes = tuple(int(size) for size in self.sizes)
        whole = all(size == given for size, given in zip(sizes, self.sizes, strict=True))
        rising = all(first < second for first, second in pairwise((-1, *sizes)))
        if not (sizes and whole and rising):
            raise ValueError(
                "expected at least one size, whole numbers from 0, increasing, in the curve "
                f"{self.name!r}; got {list(self.sizes)}. Count the parts that each circuit keeps, "
                "sort the circuits by size, and keep one of each size."
            )
        # Unlike arrays and tensors, tuples compare, print and serialise.
        object.__setattr__(self, "sizes", sizes)
        for field in ("mean", "low", "high"):
            values = tuple(float(value) for value in getattr(self, field))
            if len(values) != len(sizes) or not all(map(math.isfinite, values)):
                raise ValueError(
                    f"expected one finite number per size in {field!r} of the curve "
                    f"{self.name!r}; got {list(values)} for {len(sizes)} sizes. Leave out prompts "
                    "whose clean and corrupted metric are equal: they have no explained effect."
                )
            object.__setattr__(self, field, values)
        for size, low, high in zip(self.sizes, self.low, self.high, strict=True):
            if low > high:
                raise ValueError(
                    f"expected low <= high in the curve {self.name!r}; got {low} and {high} at "
                    f"size {size}. Pass the ends of the interval, not its half-widths."
                )

    @checked
    def size_at(self, level: Share = 0.9) -> float | None:
        """The size from which the mean is at or above a level, interpolated in the logarithm.

        With n_i the largest size whose effect e_i is below the level, and n_j the next size,
        ``log n = log n_i + (level - e_i) / (e_j - e_i) * (log n_j - log n_i)``; a size of 0 counts
        as 1. If all effects reach the level, this is the smallest measured size.

        Args:
            level: explained effect, above 0 and at most 1.

        Returns:
            Number of parts, at least 1 and usually fractional; ``None`` if the effect of the
            largest size is below the level.

        Raises:
            ValueError: the level is out of range.
        """
        below = [index for index, effect in enumerate(self.mean) if effect < level]
        if not below:
            return float(max(self.sizes[0], 1))
        before = below[-1]
        if before + 1 == len(self.sizes):
            return None
        start, end = (math.log(max(size, 1)) for size in self.sizes[before : before + 2])
        rise = self.mean[before + 1] - self.mean[before]
        return math.exp(start + (level - self.mean[before]) / rise * (end - start))

    def effect_at(self, size: float) -> float:
        """The mean at a size, interpolated between measured sizes as in `size_at`.

        Raises:
            ValueError: the size is outside the measured range.
        """
        after = bisect_left(self.sizes, size)
        if after < len(self.sizes) and self.sizes[after] == size:
            return self.mean[after]
        if not self.sizes[0] <= size <= self.sizes[-1]:
            raise ValueError(
                f"expected a size in {self.sizes[0]:,}..{self.sizes[-1]:,}, the measured range of "
                f"the curve {self.name!r}; got {size:,}"
            )
        start, middle, end = (
            math.log(max(n, 1)) for n in (self.sizes[after - 1], size, self.sizes[after])
        )
        share = (middle - start) / (end - start) if end > start else 1.0
        return self.mean[after - 1] + share * (self.mean[after] - self.mean[after - 1])

    def to_pandas(self) -> pd.DataFrame:
        """One row per size: name, size, mean, low, high."""
        import pandas as pd

        columns = {"size": self.sizes, "mean": self.mean, "low": self.low, "high": self.high}
        return pd.DataFrame({"name": [self.name] * len(self.sizes), **columns})


@checked
def multiplier(dense: EffectCurve, sparse: EffectCurve, level: Share = 0.9) -> float | None:
    """How many times as many parts the dense model needs: ``dense.size_at / sparse.size_at``.

    Args:
        dense: curve of the dense model.
        sparse: curve of the sparse model on the same task.
        level: explained effect, above 0 and at most 1.

    Returns:
        Above 1 if the sparse model needs fewer parts; ``None`` if a curve does not reach the level.

    Raises:
        ValueError: the level is out of range.
    """
    of_dense, of_sparse = dense.size_at(level), sparse.size_at(level)
    return None if of_dense is None or of_sparse is None else of_dense / of_sparse
