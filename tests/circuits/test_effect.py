"""Explained effect against parts kept: sizes at a level, and curves that are none."""

from __future__ import annotations

import math

import pytest

from sparse_tl.circuits import EffectCurve, multiplier


def curve(name: str, effects: dict[int, float], width: float = 0.05) -> EffectCurve:
    mean = list(effects.values())
    low, high = [e - width for e in mean], [e + width for e in mean]
    return EffectCurve(name, list(effects), mean, low, high)


# Both reach 0.9 exactly at a measured size: 100 and 20.
DENSE = curve("GPT-2", {0: 0.0, 10: 0.1, 100: 0.9, 144: 1.0})
SPARSE = curve("Sparse GPT-2", {0: 0.0, 10: 0.5, 20: 0.9, 144: 1.0})


class TestSizeAt:
    def test_is_a_measured_size_where_the_mean_is_the_level(self) -> None:
        assert DENSE.size_at(0.9) == pytest.approx(100, rel=1e-12)
        assert SPARSE.size_at(0.9) == pytest.approx(20, rel=1e-12)

    def test_interpolates_in_the_logarithm(self) -> None:
        # Half of the rise is half of the way from log 10 to log 1000.
        assert curve("m", {10: 0.4, 1000: 0.8}).size_at(0.6) == pytest.approx(100)
        # A quarter of the rise: 10 * 100^(1/4).
        assert curve("m", {10: 0.4, 1000: 0.8}).size_at(0.5) == pytest.approx(10 * 100**0.25)

    def test_size_zero_counts_as_one(self) -> None:
        assert curve("m", {0: 0.0, 100: 1.0}).size_at(0.5) == pytest.approx(10)

    def test_a_dip_below_the_level_counts(self) -> None:
        # Up through 0.9 between 10 and 100, down at 1000, and up again half way to 100,000.
        dipping = curve("m", {10: 0.0, 100: 0.95, 1000: 0.85, 100_000: 0.95, 200_000: 0.9})
        assert dipping.size_at(0.9) == pytest.approx(10_000)
        # Against a lower level the same dip is none: 0.8 of the way from 10 to 100.
        assert dipping.size_at(0.76) == pytest.approx(10 ** (1 + 0.8))

    def test_none_where_the_level_is_not_reached_or_lost_at_the_end(self) -> None:
        assert curve("m", {1: 0.0, 10: 0.89}).size_at(0.9) is None
        assert curve("m", {1: 0.0, 10: 0.95, 20: 0.89}).size_at(0.9) is None

    def test_the_smallest_size_where_that_is_enough(self) -> None:
        assert curve("m", {3: 0.95, 10: 1.0}).size_at(0.9) == 3
        assert curve("m", {0: 0.95, 10: 1.0}).size_at(0.9) == 1

    def test_multiplier_is_dense_over_sparse(self) -> None:
        assert multiplier(DENSE, SPARSE) == pytest.approx(5)
        assert multiplier(SPARSE, DENSE) == pytest.approx(0.2)
        assert multiplier(DENSE, SPARSE, 0.5) == pytest.approx(10 * math.sqrt(10) / 10)

    def test_multiplier_is_none_where_a_curve_falls_short(self) -> None:
        short = curve("m", {1: 0.0, 10: 0.5})
        assert multiplier(DENSE, short) is None
        assert multiplier(short, DENSE) is None


class TestEffectAt:
    def test_is_the_inverse_of_size_at(self) -> None:
        rising = curve("m", {0: 0.0, 10: 0.4, 1000: 0.8, 5000: 1.0})
        for level in (0.1, 0.4, 0.5, 0.93):
            size = rising.size_at(level)
            assert size is not None
            assert rising.effect_at(size) == pytest.approx(level)
        # Half of the way from log 10 to log 1000.
        assert rising.effect_at(100) == pytest.approx(0.6)

    def test_is_what_was_measured_at_a_measured_size(self) -> None:
        steep = curve("m", {0: 0.0, 1: 0.5, 2: 1.0})
        assert [steep.effect_at(size) for size in (0, 1, 2)] == [0.0, 0.5, 1.0]

    def test_is_unknown_where_nothing_was_measured(self) -> None:
        for size in (2, 1001):
            assert math.isnan(curve("m", {3: 0.4, 1000: 0.8}).effect_at(size))


@pytest.mark.parametrize(
    ("mean", "said"),
    [([0.0, math.nan], "finite effect"), ([0.0], "at each size"), ([0.0, 0.5, 1.0], "at each")],
)
def test_a_curve_without_an_effect_at_each_size_is_refused(mean: list[float], said: str) -> None:
    """NaN is below no level, so that `size_at` would count it as one that is reached."""
    with pytest.raises(ValueError, match=said):
        EffectCurve("m", [1, 10], mean, [0.0, 0.5], [0.0, 0.5])
