"""The explained effect of circuits of growing size: what evaluation returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.metrics import explained_effect
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd

    from sparse_tl.plots.effect_curve import EffectCurve


@dataclass(frozen=True, eq=False)
class Evaluation(Result):
    """The metric of every pair under every circuit.

    Args:
        sizes: how many parts each circuit keeps.
        total: how many parts there are.
        values: the metric under each circuit.
        clean: the metric of the whole model.
        none: the metric with everything patched.
    """

    sizes: tuple[int, ...]
    total: int
    values: Float[Tensor, "circuit pair"]
    clean: Float[Tensor, " pair"]
    none: Float[Tensor, " pair"]

    @property
    def effect(self) -> Float[Tensor, " circuit"]:
        """The explained effect of each circuit."""
        return explained_effect(self.values, self.clean, self.none)

    def interval(
        self, level: float = 0.95, resamples: int = 1000, seed: int = 0
    ) -> tuple[Float[Tensor, " circuit"], Float[Tensor, " circuit"]]:
        """Lower and upper end of a bootstrap interval of the explained effect, over pairs.

        Pairs are drawn with replacement; percentiles of the resampled ratio.
        """
        if not 0 < level < 1 or resamples < 1:
            raise ValueError(
                f"expected a level between 0 and 1 and resamples; got {level}, {resamples}"
            )
        generator = torch.Generator().manual_seed(seed)
        effect, n_pairs = self.effect, len(self.clean)
        drawn = torch.randint(n_pairs, (resamples, n_pairs), generator=generator)
        weights = torch.zeros(resamples, n_pairs, dtype=self.values.dtype)
        weights.scatter_add_(1, drawn, torch.ones_like(weights))
        whole = weights @ (self.clean - self.none)
        # A draw in which the corruption has no effect, or the opposite one, has no ratio to show.
        usable = whole.sign() == (self.clean - self.none).mean().sign()
        ratios = (weights[usable] @ (self.values - self.none).T) / whole[usable, None]
        ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=ratios.dtype)
        low, high = ratios.quantile(ends, dim=0) if len(ratios) else (effect, effect)
        # A percentile interval need not hold the mean itself where few pairs decide it.
        return torch.minimum(low, effect), torch.maximum(high, effect)

    @property
    def cpr(self) -> float:
        """Area under the explained effect over the share of parts kept; larger is better.

        Reference: the circuit performance ratio of MIB, arXiv 2504.13151.
        """
        return torch.trapezoid(self.effect, self._shares()).item()

    @property
    def cmd(self) -> float:
        """Area between the explained effect and 1 over the share of parts kept; 0 is best.

        Reference: the circuit-model distance of MIB, arXiv 2504.13151.
        """
        return torch.trapezoid((1 - self.effect).abs(), self._shares()).item()

    def curve(self, name: str) -> EffectCurve:
        """Means and intervals, to be drawn; sizes must be increasing."""
        from sparse_tl.plots.effect_curve import EffectCurve

        low, high = self.interval()
        return EffectCurve(name, self.sizes, self.effect.tolist(), low.tolist(), high.tolist())

    def to_pandas(self) -> pd.DataFrame:
        """One row per circuit: size, explained effect, its interval, and the metric's mean."""
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

    def _shares(self) -> Float[Tensor, " circuit"]:
        if list(self.sizes) != sorted(self.sizes) or {0, self.total} - set(self.sizes):
            raise ValueError(
                f"expected increasing sizes from 0 to all {self.total:,} parts for an area; got "
                f"{list(self.sizes)}"
            )
        return torch.tensor(self.sizes, dtype=self.values.dtype) / self.total

    def __repr__(self) -> str:
        said = ", ".join(
            f"{size}: {effect:.2f}"
            for size, effect in zip(self.sizes, self.effect.tolist(), strict=True)
        )
        return f"Evaluation(explained effect of {len(self.clean)} pairs by size: {said})"
