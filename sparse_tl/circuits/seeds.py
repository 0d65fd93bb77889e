"""Explained effect over training seeds: curves and multipliers of several models.

Results are summarised by medians over seeds. The median curve has the median effect at each size.
Sizes and multipliers are computed per seed, then reported as median and range; seeds that do not
reach the level are counted and listed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from sparse_tl.calls.arguments import Seed, Share, checked
from sparse_tl.circuits.effect import EffectCurve, multiplier
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd


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
                "expected one curve for each seed, all different, of a model of one name; got "
                f"seeds {list(self.seeds)} and curves of {names}"
            )
        if not self._common:
            raise ValueError(
                f"expected curves of {self.name!r} with a size in common; they were measured from "
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
        """The median over seeds of the size at a level.

        Args:
            level: explained effect, above 0 and at most 1.

        Returns:
            Number of parts, where seeds that miss the level count as larger than all others;
            ``None`` if the median falls on such a seed.

        Raises:
            ValueError: the level is out of range.
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
    """The `multiplier` of each seed's dense and sparse model.

    Args:
        dense: curves of the dense models.
        sparse: curves of the sparse models made from them, on the same task.
        level: explained effect, above 0 and at most 1.

    Raises:
        ValueError: the models have different seeds, or the level is out of range.
    """
    if dense.seeds != sparse.seeds:
        raise ValueError(
            "expected dense and sparse curves of the same seeds in the same order; got "
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
