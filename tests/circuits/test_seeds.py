"""Curves and multipliers over seeds: medians, ranges, and seeds that fall short."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd
import pytest

from sparse_tl.circuits import EffectCurve, SeedCurves, seed_multipliers
from sparse_tl.circuits.curves import multiplier_words


def curve(effects: dict[int, float], name: str = "m") -> EffectCurve:
    mean = list(effects.values())
    return EffectCurve(name, list(effects), mean, [e - 0.1 for e in mean], [e + 0.1 for e in mean])


def reaching(*sizes: int, name: str = "m") -> SeedCurves:
    """Curves that have 0.9 exactly at these sizes, one seed each."""
    curves = [curve({0: 0.0, size: 0.9, 10_000: 1.0}, name) for size in sizes]
    return SeedCurves(range(len(sizes)), curves)


SHORT = curve({0: 0.0, 10_000: 0.8})


def test_the_median_curve_has_the_median_effect_at_every_size() -> None:
    found = SeedCurves(
        (0, 1, 2),
        [
            curve({0: 0.0, 10: 0.2, 100: 0.6, 1000: 1.0}),
            curve({0: 0.1, 10: 0.9, 100: 0.95, 1000: 0.99}),
            curve({0: 0.0, 10: 0.4, 1000: 0.8}),  # 0.6 at 100, half way in the logarithm
        ],
    )
    assert found.median.sizes == (0, 10, 100, 1000)
    assert found.median.mean == pytest.approx((0.0, 0.4, 0.6, 0.99))
    assert found.median.low == pytest.approx((0.0, 0.2, 0.6, 0.8))
    assert found.median.high == pytest.approx((0.1, 0.9, 0.95, 1.0))


def test_the_median_curve_ends_where_the_first_seed_does() -> None:
    found = SeedCurves((4, 7), [curve({1: 0.0, 50: 0.5}), curve({2: 0.0, 8: 0.3, 100: 1.0})])
    assert found.median.sizes == (2, 8, 50)
    apart = SeedCurves((4, 7), [curve({1: 0.0, 2: 0.5}), curve({8: 0.3, 9: 1.0})])
    assert apart.median.sizes == ()


def test_a_single_seed_is_its_own_median_with_its_interval() -> None:
    one = curve({0: 0.0, 10: 1.0})
    found = SeedCurves((3,), (one,))
    assert found.median == one
    assert seed_multipliers(found, found).tolist() == [1]


def test_multipliers_are_those_of_each_seeds_own_pair() -> None:
    """Not of the medians: 2, 4 and 100 times, but 100 / 20 between the medians' sizes."""
    dense, sparse = reaching(40, 100, 2000), reaching(20, 25, 20)
    found = seed_multipliers(dense, sparse)
    assert found.index.tolist() == [0, 1, 2]
    assert found.tolist() == pytest.approx((2, 4, 100))
    assert multiplier_words(found) == ("4.0x (2.0 to 100)",)
    half = seed_multipliers(dense, sparse, 0.45)
    assert half.tolist() == pytest.approx((2**0.5, 2, 10))


def test_a_seed_without_a_multiplier_is_named() -> None:
    dense = reaching(40, 100, 2000)
    sparse = SeedCurves((0, 1, 2), [*reaching(20, 25).curves, SHORT])
    found = seed_multipliers(dense, sparse)
    assert found.isna().tolist() == [False, False, True]
    assert multiplier_words(found) == ("3.0x (2.0 to 4.0)", "1 of 3 seeds: not reached")
    assert multiplier_words(pd.Series([None, None], dtype=float)) == ("2 of 2 seeds: not reached",)
    assert multiplier_words(pd.Series([None], dtype=float)) == ("not reached",)
    assert multiplier_words(pd.Series([23.61])) == ("23.6x",)
    assert multiplier_words(pd.Series([9.96, 12.04])) == ("11.0x (10 to 12)",)


def test_to_pandas_has_a_row_per_seed_and_size() -> None:
    table = SeedCurves((5, 2), reaching(10, 100).curves).to_pandas()
    assert list(table.columns) == ["seed", "name", "size", "mean", "low", "high"]
    assert table["seed"].tolist() == [5] * 3 + [2] * 3
    assert table["size"].tolist() == [0, 10, 10_000, 0, 100, 10_000]


def test_refuses_models_of_other_seeds() -> None:
    other = SeedCurves((1, 0), reaching(10, 10).curves)
    with pytest.raises(ValueError, match=re.escape("same order; they are of [0, 1] and [1, 0]")):
        seed_multipliers(reaching(10, 10), other)


@pytest.mark.parametrize(
    ("seeds", "names"), [((0, 0), "mm"), ((0, 1), "mn"), ((0, 1, 2), "mm"), ((), "")]
)
def test_curves_that_are_not_one_models_by_seed_are_refused(seeds: Any, names: str) -> None:
    """The median would be that of several models, or count a seed twice."""
    with pytest.raises(ValueError, match="one curve for each seed, each seed once"):
        SeedCurves(seeds, [curve({0: 0.0, 10: 1.0}, name) for name in names])
