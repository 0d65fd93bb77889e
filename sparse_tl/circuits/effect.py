"""Results of circuit evaluation: the explained effect, or faithfulness, by circuit size.

How much it depends on the choice of prompts is measured by bootstrap draws: each draws as many
pairs as there are, with replacement. The explained effect of a draw is a ratio of two weighted
means, so no model is run again; the ends of an interval are percentiles over draws.

Results of several training seeds are summarised by medians. The median curve has the median effect
at each size. Sizes and multipliers are computed per seed, then reported as median and range; seeds
that do not reach the level are counted and listed.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.calls.arguments import Seed, Share, checked
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

        The sizes must be increasing. An end is ``None`` if the draw there misses `effect`, the
        explained effect to reach, above 0 and at most 1. Other arguments and errors are those of
        `interval`.
        """
        low, high = interval_ends(level)
        drawn = effect_draws(self.values, self.clean, self.none, resamples=resamples, seed=seed)
        curves = [EffectCurve("", self.sizes, *[draw] * 3) for draw in drawn.tolist()]
        sizes = [curve.size_at(effect) for curve in [*curves, self.curve("")]]
        ranked = sorted(sizes, key=lambda size: math.inf if size is None else size)
        last = len(ranked) - 1
        return ranked[math.floor(low * last)], ranked[math.ceil(high * last)]

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
        effects = zip(self.sizes, self.effect.tolist(), strict=True)
        by_size = ", ".join(f"{size}: {effect:.2f}" for size, effect in effects)
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
                f"the curve {self.name!r} needs sizes that are whole numbers from 0 and increase; "
                f"they are {list(self.sizes)}. Sort the circuits by size, and keep one of each size"
            )
        # Unlike arrays and tensors, tuples compare, print and serialise.
        object.__setattr__(self, "sizes", sizes)
        for field in ("mean", "low", "high"):
            values = tuple(float(value) for value in getattr(self, field))
            if len(values) != len(sizes) or not all(map(math.isfinite, values)):
                raise ValueError(
                    f"the curve {self.name!r} needs one finite number per size; {field!r} of its "
                    f"{len(sizes)} sizes is {list(values)}"
                )
            object.__setattr__(self, field, values)
        if any(low > high for low, high in zip(self.low, self.high, strict=True)):
            raise ValueError(
                f"an interval of the curve {self.name!r} has its lower end above its upper end. "
                "Give the ends of the interval, not its half-widths"
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
                f"the curve {self.name!r} was measured for sizes from {self.sizes[0]:,} to "
                f"{self.sizes[-1]:,}, not for {size:,}"
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

    Both curves are of one task. Above 1 if the sparse model needs fewer parts; ``None`` if a curve
    does not reach the level, an explained effect above 0 and at most 1.

    Raises:
        ValueError: the level is out of range.
    """
    of_dense, of_sparse = dense.size_at(level), sparse.size_at(level)
    return None if of_dense is None or of_sparse is None else of_dense / of_sparse


@checked
@dataclass(frozen=True)
class SeedCurves(Result):
    """The explained effect of one model on one task, for several training seeds.

    Args:
        seeds: training seeds, all different.
        curves: one curve per seed, all with the same name.

    Raises:
        ValueError: there is no seed, a seed appears twice, there is not one curve per seed, the
            curves differ in name, or their ranges of sizes do not overlap.
    """

    seeds: Sequence[Seed]
    curves: Sequence[EffectCurve]

    def __post_init__(self) -> None:
        object.__setattr__(self, "seeds", tuple(self.seeds))
        object.__setattr__(self, "curves", tuple(self.curves))
        names = [curve.name for curve in self.curves]
        if not 1 <= len(set(self.seeds)) == len(self.seeds) == len(names) or len(set(names)) > 1:
            raise ValueError(
                "give one curve for each seed, all seeds different, of a model of one name; the "
                f"seeds are {list(self.seeds)}, and the curves of {names}"
            )
        if not self._common:
            raise ValueError(
                f"the curves of {self.name!r} have no size in common; they were measured from "
                f"{[curve.sizes[0] for curve in self.curves]} to "
                f"{[curve.sizes[-1] for curve in self.curves]} parts"
            )

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.curves[0].name

    @cached_property
    def median(self) -> EffectCurve:
        """The median effect over seeds at each size, with the range over seeds as the interval.

        It has all sizes that were measured for some seed within the range measured for every seed,
        interpolated where a seed has no measurement (`EffectCurve.effect_at`). A single seed keeps
        its curve and interval.
        """
        if len(self.curves) == 1:
            return self.curves[0]
        effects = [[curve.effect_at(size) for curve in self.curves] for size in self._common]
        medians, low, high = (
            [summary(at_size) for at_size in effects] for summary in (statistics.median, min, max)
        )
        return EffectCurve(self.name, self._common, medians, low, high)

    @property
    def _common(self) -> list[int]:
        """All measured sizes within the range that was measured for every seed."""
        low = max(curve.sizes[0] for curve in self.curves)
        high = min(curve.sizes[-1] for curve in self.curves)
        sizes = {size for curve in self.curves for size in curve.sizes}
        return sorted(size for size in sizes if low <= size <= high)

    def sizes_at(self, level: float = 0.9) -> tuple[float | None, ...]:
        """`EffectCurve.size_at` of every seed; ``None`` for a seed that misses the level."""
        return tuple(curve.size_at(level) for curve in self.curves)

    def size_at(self, level: float = 0.9) -> float | None:
        """The median over seeds of the size at a level, an explained effect in (0, 1].

        Seeds that miss the level count as larger than all others; ``None`` if the median falls on
        such a seed.
        """
        return median_size(self.sizes_at(level))

    def to_pandas(self) -> pd.DataFrame:
        """One row per seed and size: seed, name, size, mean, low, high."""
        import pandas as pd

        tables = [curve.to_pandas() for curve in self.curves]
        for seed, table in zip(self.seeds, tables, strict=True):
            table.insert(0, "seed", seed)
        return pd.concat(tables, ignore_index=True)

    def __repr__(self) -> str:
        return f"SeedCurves({self.name!r}, seeds {list(self.seeds)})"


@dataclass(frozen=True)
class SeedMultipliers(Result):
    """How many times as many parts the dense model needs, for each seed.

    Args:
        seeds: training seeds, in the order of the values.
        values: multiplier of each seed; ``None`` if its dense or sparse model misses the level.
        level: explained effect at which models are compared.
    """

    seeds: Sequence[int]
    values: Sequence[float | None]
    level: float = 0.9

    @property
    def found(self) -> tuple[float, ...]:
        """The multipliers of the seeds that have one."""
        return tuple(value for value in self.values if value is not None)

    @property
    def median(self) -> float | None:
        """Median over the seeds with a multiplier, if any; `missing` lists the others."""
        return statistics.median(self.found) if self.found else None

    @property
    def range(self) -> tuple[float, float] | None:
        """The smallest and the largest multiplier."""
        return (min(self.found), max(self.found)) if self.found else None

    @property
    def missing(self) -> tuple[int, ...]:
        """The seeds whose dense or sparse model does not reach the level."""
        pairs = zip(self.seeds, self.values, strict=True)
        return tuple(seed for seed, value in pairs if value is None)

    def to_pandas(self) -> pd.DataFrame:
        """One row per seed: its multiplier, or NaN."""
        import pandas as pd

        values = pd.Series([math.nan if v is None else v for v in self.values], dtype=float)
        return pd.DataFrame({"seed": self.seeds, "multiplier": values})

    def words(self) -> tuple[str, ...]:
        """Texts for figures, such as "23.6x (18 to 31)" and "1 of 3 seeds: not reached"."""
        texts = []
        if self.median is not None and self.range is not None:
            # 9.96 becomes 10, not 10.0.
            low, high = (format(end, ",.0f" if end >= 9.95 else ".1f") for end in self.range)
            between = f" ({low} to {high})" if len(self.found) > 1 else ""
            texts.append(f"{self.median:,.1f}x{between}")
        if self.missing:
            of = f"{len(self.missing)} of {len(self.seeds)} seeds: " if len(self.seeds) > 1 else ""
            texts.append(f"{of}not reached")
        return tuple(texts)

    def __str__(self) -> str:
        return "; ".join(self.words())


@checked
def seed_multipliers(dense: SeedCurves, sparse: SeedCurves, level: Share = 0.9) -> SeedMultipliers:
    """The `multiplier` of each seed's dense model and the sparse model made from it.

    Raises:
        ValueError: the models have different seeds, or the level is out of range.
    """
    if dense.seeds != sparse.seeds:
        raise ValueError(
            "dense and sparse curves must be of the same seeds in the same order; they are of "
            f"{list(dense.seeds)} and {list(sparse.seeds)}"
        )
    pairs = zip(dense.curves, sparse.curves, strict=True)
    return SeedMultipliers(
        dense.seeds, tuple(multiplier(*pair, level=level) for pair in pairs), level
    )


def median_size(sizes: Sequence[float | None]) -> float | None:
    """The median of sizes; those not reached (None) count as larger than all others."""
    median = statistics.median(math.inf if size is None else size for size in sizes)
    return median if math.isfinite(median) else None


def interval_ends(level: float) -> tuple[float, float]:
    """The percentiles, as shares, at the ends of an interval with a share `level` of the draws."""
    if not 0 < level < 1:
        raise ValueError(f"the level of an interval must be between 0 and 1; it is {level}")
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
    """
    if resamples < 1:
        raise ValueError(f"an interval needs at least one draw; resamples is {resamples}")
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
    z = statistics.NormalDist().inv_cdf(interval_ends(level)[1])
    half = z * math.sqrt(n_true * (n - n_true) / n + z**2 / 4)
    middle, total = n_true + z**2 / 2, n + z**2
    return max(0.0, (middle - half) / total), min(1.0, (middle + half) / total)


def sign_test(lost: int, won: int) -> float:
    """The two-sided p of as unequal a split of the pairs that only one of two models has right.

    Reference: McNemar (1947), Psychometrika 12, 153-157, with exact probabilities.
    """
    tail = sum(math.comb(lost + won, k) for k in range(min(lost, won) + 1))
    return min(1.0, 2 * tail / 2 ** (lost + won))
