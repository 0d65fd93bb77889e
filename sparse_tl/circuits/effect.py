"""Results of circuit evaluation: the explained effect of circuits of growing size."""

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

from sparse_tl.arguments import Share, checked
from sparse_tl.circuits.intervals import effect_draws, effect_interval, interval_ends
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
        """The explained effect of each circuit.

        Raises:
            NoEffectError: the metric is the same with everything patched.
        """
        return explained_effect(self.values, self.clean, self.none)

    def interval(
        self, level: float = 0.95, resamples: int = 1000, seed: int = 0
    ) -> tuple[Float[Tensor, " circuit"], Float[Tensor, " circuit"]]:
        """Bootstrap interval of the explained effect over pairs: lower and upper ends.

        Pairs are drawn with replacement; the ends are percentiles of the resampled ratio.

        Args:
            level: share of draws inside the interval, between 0 and 1.
            resamples: number of draws, at least 1.
            seed: random seed.

        Raises:
            ValueError: an argument is out of range, or as in `effect`.
        """
        return effect_interval(
            *(self.values, self.clean, self.none), level=level, resamples=resamples, seed=seed
        )

    @checked
    def size_interval(
        self, effect: Share = 0.9, *, level: float = 0.95, resamples: int = 1000, seed: int = 0
    ) -> tuple[float | None, float | None]:
        """Bootstrap interval of `EffectCurve.size_at` over pairs; sizes must be increasing.

        Args:
            effect: explained effect that is to be reached, above 0 and at most 1.
            level: share of draws inside the interval, between 0 and 1.
            resamples: number of draws, at least 1.
            seed: random seed.

        Returns:
            Lower and upper end; ``None`` where a draw there does not reach the effect.

        Raises:
            ValueError: an argument is out of range, or as in `effect`.
        """
        low, high = interval_ends(level)
        own = self.curve("").size_at(effect)
        drawn = effect_draws(
            *(self.values, self.clean, self.none), resamples=resamples, seed=seed
        ).tolist()
        found = [EffectCurve("", self.sizes, *[draw] * 3).size_at(effect) for draw in drawn]
        reached = torch.tensor(
            [math.inf if size is None else size for size in [*found, own]], dtype=torch.float64
        )
        ends = (
            reached.quantile(low, interpolation="lower").item(),
            reached.quantile(high, interpolation="higher").item(),
        )
        return tuple(end if math.isfinite(end) else None for end in ends)  # type: ignore[return-value]

    def curve(self, name: str) -> EffectCurve:
        """Means and intervals for plotting; sizes must be increasing."""
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
        said = ", ".join(
            f"{size}: {effect:.2f}"
            for size, effect in zip(self.sizes, self.effect.tolist(), strict=True)
        )
        return f"Evaluation(explained effect of {len(self.clean)} pairs by size: {said})"


@dataclass(frozen=True)
class EffectCurve(Result):
    """The explained effect of circuits of growing size, for one model on one task.

    Lists and arrays are converted to tuples of plain numbers.

    Args:
        name: name of the model.
        sizes: number of parts that each circuit keeps, increasing.
        mean: explained effect at each size; 1 means that the circuit recovers the full effect.
        low: lower end of the interval at each size.
        high: upper end of the interval at each size.

    Raises:
        ValueError: there is no size, lengths differ, sizes are not increasing whole numbers from
            0, a number is not finite, or an interval has its ends swapped.
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
                f"{self.name!r}; got {list(self.sizes)}; count the parts that each circuit keeps, "
                "sort the circuits by size, and keep one of each size"
            )
        # Unlike arrays and tensors, tuples compare, print and serialise.
        object.__setattr__(self, "sizes", sizes)
        for field in ("mean", "low", "high"):
            values = tuple(float(value) for value in getattr(self, field))
            if len(values) != len(sizes) or not all(map(math.isfinite, values)):
                raise ValueError(
                    f"expected one finite number per size in {field!r} of the curve "
                    f"{self.name!r}; got {list(values)} for {len(sizes)} sizes; an effect is "
                    "undefined where clean and corrupted metric are equal: leave such prompts out"
                )
            object.__setattr__(self, field, values)
        for size, low, high in zip(self.sizes, self.low, self.high, strict=True):
            if low > high:
                raise ValueError(
                    f"expected low <= high in the curve {self.name!r}; got {low} and {high} at "
                    f"size {size}; pass the ends of the interval, not its half-widths"
                )

    @checked
    def size_at(self, level: Share = 0.9) -> float | None:
        """The size at which the mean reaches a level and stays at or above it.

        With n_i the largest size whose effect e_i is below the level, and n_j the next size,
        ``log n = log n_i + (level - e_i) / (e_j - e_i) * (log n_j - log n_i)``; a size of 0 counts
        as 1. If the smallest measured size already suffices, that size is returned.

        Args:
            level: explained effect, above 0 and at most 1.

        Returns:
            Number of parts, at least 1 and in general fractional; ``None`` if the last measured
            effect is below the level.

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
                f"expected a size in {self.sizes[0]:,}..{self.sizes[-1]:,}, as measured in the "
                f"curve {self.name!r}; got {size:,}"
            )
        start, at, end = (
            math.log(max(some, 1)) for some in (self.sizes[after - 1], size, self.sizes[after])
        )
        share = (at - start) / (end - start) if end > start else 1.0
        return self.mean[after - 1] + share * (self.mean[after] - self.mean[after - 1])

    def to_pandas(self) -> pd.DataFrame:
        """One row per size: name, size, mean, low, high."""
        import pandas as pd

        columns = {"size": self.sizes, "mean": self.mean, "low": self.low, "high": self.high}
        return pd.DataFrame({"name": [self.name] * len(self.sizes), **columns})


@checked
def multiplier(dense: EffectCurve, sparse: EffectCurve, level: Share = 0.9) -> float | None:
    """How many times more parts the dense model needs: ``dense.size_at / sparse.size_at``.

    Args:
        dense: curve of the dense model.
        sparse: curve of the sparse model on the same task.
        level: explained effect, above 0 and at most 1.

    Returns:
        Above 1 if the sparse model needs fewer parts; ``None`` if a curve does not reach the
        level.

    Raises:
        ValueError: the level is out of range.
    """
    needed = dense.size_at(level), sparse.size_at(level)
    return None if needed[0] is None or needed[1] is None else needed[0] / needed[1]
