"""Explained effect against the size of circuits: curves of one model on one task, and over seeds.

Results of several training seeds are summarised by medians. The median curve has the median effect
at each size. Sizes and multipliers are computed per seed, then reported as median and range.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from sparse_tl.arguments import Seed, Share, checked
from sparse_tl.results import Result


@dataclass(frozen=True)
class EffectCurve(Result):
    """The explained effect of circuits of growing size, for one model on one task.

    Args:
        name: name of the model.
        sizes: number of parts that each circuit keeps, increasing.
        mean: explained effect at each size; 1: that of the whole model.
        low: lower end of the interval at each size.
        high: upper end of the interval at each size.
    """

    name: str
    sizes: Sequence[int]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]

    def __post_init__(self) -> None:
        for name in ("sizes", "mean", "low", "high"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if sorted({*self.sizes}) != [*self.sizes]:
            raise ValueError(f"the sizes of a curve must increase; they are {list(self.sizes)}")
        effects = self.mean, self.low, self.high
        if {*map(len, effects)} != {len(self.sizes)} or not np.isfinite(effects).all():
            raise ValueError(f"the curve {self.name!r} needs a finite effect and ends at each size")

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
        """The mean at a size, interpolated as in `size_at`; NaN outside the measured range."""
        # Just below 1, so that 0 and 1 are two points.
        logs = [math.log(max(n, 1 - 1e-12)) for n in (size, *self.sizes)]
        return float(np.interp(logs[0], logs[1:], self.mean, left=np.nan, right=np.nan))

    def to_pandas(self) -> pd.DataFrame:
        """One row per size: name, size, mean, low, high."""
        columns = {"size": self.sizes, "mean": self.mean, "low": self.low, "high": self.high}
        return pd.DataFrame({"name": [self.name] * len(self.sizes), **columns})


@checked
def multiplier(dense: EffectCurve, sparse: EffectCurve, level: Share = 0.9) -> float | None:
    """How many times as many parts the dense model needs: ``dense.size_at / sparse.size_at``.

    Both curves are of one task. Above 1 if the sparse model needs fewer parts; ``None`` if a curve
    does not reach the level, an explained effect above 0 and at most 1.
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
    """

    seeds: Sequence[Seed]
    curves: Sequence[EffectCurve]

    def __post_init__(self) -> None:
        object.__setattr__(self, "seeds", tuple(self.seeds))
        object.__setattr__(self, "curves", tuple(self.curves))
        names = [curve.name for curve in self.curves]
        if not len({*self.seeds}) == len(self.seeds) == len(names) or len({*names}) != 1:
            raise ValueError(
                "give one curve for each seed, each seed once, of a model of one name; the seeds "
                f"are {list(self.seeds)}, and the curves of {names}"
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
        first = max(curve.sizes[0] for curve in self.curves)
        last = min(curve.sizes[-1] for curve in self.curves)
        sizes = sorted({size for curve in self.curves for size in curve.sizes})
        common = [size for size in sizes if first <= size <= last]
        effects = [[curve.effect_at(size) for curve in self.curves] for size in common]
        effects = np.reshape(effects, (len(common), len(self.curves)))  # of no size, too
        summaries = (summary(effects, axis=1).tolist() for summary in (np.median, np.min, np.max))
        return EffectCurve(self.name, common, *summaries)

    def to_pandas(self) -> pd.DataFrame:
        """One row per seed and size: seed, name, size, mean, low, high."""
        tables = [curve.to_pandas() for curve in self.curves]
        table = pd.concat(tables, keys=self.seeds, names=["seed"])
        return table.reset_index("seed").reset_index(drop=True)

    def __repr__(self) -> str:
        return f"SeedCurves({self.name!r}, seeds {list(self.seeds)})"


@checked
def seed_multipliers(dense: SeedCurves, sparse: SeedCurves, level: Share = 0.9) -> pd.Series:
    """The `multiplier` of each seed's dense model and the sparse model made from it.

    Returns:
        Multipliers by seed; NaN if the seed's dense or sparse model misses the level.

    Raises:
        ValueError: the models have different seeds.
    """
    if dense.seeds != sparse.seeds:
        raise ValueError(
            "dense and sparse curves must be of the same seeds in the same order; they are of "
            f"{list(dense.seeds)} and {list(sparse.seeds)}"
        )
    pairs = zip(dense.curves, sparse.curves, strict=True)
    values = [multiplier(*pair, level=level) for pair in pairs]
    return pd.Series(values, list(dense.seeds), dtype=float, name="multiplier")


def multiplier_words(multipliers: pd.Series) -> tuple[str, ...]:
    """Texts for figures, such as "23.6x (18 to 31)" and "1 of 3 seeds: not reached"."""
    texts, found = [], multipliers.dropna()
    if len(found):
        # 9.96 becomes 10, not 10.0.
        low, high = (
            format(end, ",.0f" if end >= 9.95 else ".1f") for end in found.agg(["min", "max"])
        )
        between = f" ({low} to {high})" if len(found) > 1 else ""
        texts.append(f"{found.median():,.1f}x{between}")
    if missing := len(multipliers) - len(found):
        of = f"{missing} of {len(multipliers)} seeds: " if len(multipliers) > 1 else ""
        texts.append(f"{of}not reached")
    return tuple(texts)


def median_size(sizes: Sequence[float | None]) -> float | None:
    """The median of sizes; those not reached (None) count as larger than all others."""
    median = statistics.median(math.inf if size is None else size for size in sizes)
    return median if math.isfinite(median) else None
