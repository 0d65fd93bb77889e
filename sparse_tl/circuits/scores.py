"""Scores of all parts in a grid, the circuits of the top parts, and comparison with known ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.calls.arguments import Count, checked
from sparse_tl.circuits.circuit import Circuit, Grid, positioned
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd


@checked
@dataclass(frozen=True, eq=False)
class Scores(Result):
    """One score per part, in units of the metric; negative: patching the part lowers the metric.

    The scores of a search, such as "elimination", only rank the parts and have no unit.

    Scores of attention edges are kept per prompt pair, on a leading axis, because a position has
    the same meaning in two prompts only if they share a template. Scores of circuit edges have this
    axis if computed with ``by_pair=True``. Rankings and tables use the mean over pairs. Scores of
    circuit edges by position have an axis of positions before the axes of the edges; their sum over
    positions is the score of the edge.

    Args:
        grid: grid of the scored parts: circuit edges, heads, or attention edges.
        values: the scores; 0 where there is no part.
        method: name of the attribution method.
        prompt_start: text that every prompt started with, such as BOS; ``None`` if not known.

    Raises:
        ValueError: the values do not have the shape of the grid, or are not finite.
    """

    grid: Grid
    values: Float[Tensor, "*axes"]
    method: str
    prompt_start: str | None = None

    def __post_init__(self) -> None:
        expected, shape = tuple(self.grid.exists.shape), tuple(self.values.shape)
        if shape[-len(expected) :] != expected or len(shape) > len(expected) + 1:
            raise ValueError(
                f"scores of {self.grid!r} have the shape {expected}, or one more axis for prompt "
                f"pairs; these have {shape}"
            )
        super().__post_init__()

    @classmethod
    def of(cls, grid: Grid, values: Mapping[str, float] | pd.Series, method: str) -> Scores:
        """Scores from values by part name, such as those of `patch_exactly`; other parts score 0.

        Args:
            grid: grid of the scored parts, such as ``adapt(model).graph.heads``.
            values: the scores by part name.
            method: name of the method.

        Raises:
            ValueError: there is no such part, or a score is not finite.
        """
        scores = torch.zeros(grid.exists.shape, dtype=torch.float64)
        for name, value in values.items():
            scores[grid.index(str(name))] = float(value)
        return cls(grid, scores, method)

    def mean(self) -> Float[Tensor, "*axes"]:
        """The scores, averaged over pairs if kept per pair."""
        return self.values.mean(dim=0) if self._by_pair else self.values

    def __getitem__(self, part: Any) -> float:
        return self.mean()[self.grid.index(part)].item()

    def at(self, position: str | int) -> Scores:
        """The scores of circuit edges at one position.

        Args:
            position: column of a token, or name of a span.

        Raises:
            ValueError: the scores have no positions, or lack this one.
        """
        grid = positioned(self.grid)
        values = self.values[..., grid.position(position), :, :]
        return replace(self, grid=grid.graph, values=values)

    def order(self, *, signed: bool = False) -> Int[Tensor, "part axis"]:
        """The indices of all parts, best first; ties keep the order of the grid.

        Args:
            signed: rank by signed score, the part that helps most (most negative) first, instead of
                by absolute value.
        """
        return self._helping_first if signed else self._largest_first

    def top(self, size: Count, *, signed: bool = False) -> Circuit:
        """The circuit that keeps the `size` best parts.

        Args:
            size: number of parts to keep.
            signed: ranking, as in `order`.

        Raises:
            ValueError: the size is negative or exceeds the number of parts.
        """
        if not 0 <= size <= self.grid.n_parts:
            raise ValueError(f"the size must be in 0..{self.grid.n_parts}; it is {size}")
        mask = torch.zeros(self.grid.exists.shape, dtype=torch.bool)
        mask[tuple(self.order(signed=signed)[:size].T)] = True
        return Circuit(self.grid, mask)

    def to_pandas(self, top: int | None = None) -> pd.DataFrame:
        """One row per part, by decreasing absolute score: all parts, or the first `top`."""
        import pandas as pd

        if top is not None and top < 0:
            raise ValueError(f"top is a number of parts; got {top}")
        places = self.order()[:top]
        return pd.DataFrame(self.grid.columns(places)).assign(score=self._at(places).tolist())

    @property
    def _by_pair(self) -> bool:
        return self.values.ndim > self.grid.exists.ndim

    def _at(self, places: Int[Tensor, "part axis"]) -> Float[Tensor, " part"]:
        return self.mean()[tuple(places.T)]

    @cached_property
    def _largest_first(self) -> Int[Tensor, "part axis"]:
        return self._sorted(self._at(self.grid.places).abs())

    @cached_property
    def _helping_first(self) -> Int[Tensor, "part axis"]:
        return self._sorted(-self._at(self.grid.places))

    def _sorted(self, values: Float[Tensor, " part"]) -> Int[Tensor, "part axis"]:
        return self.grid.places[values.argsort(descending=True, stable=True).cpu()]

    def _summary(self) -> pd.DataFrame:
        return self.to_pandas(20)

    def __repr__(self) -> str:
        best = self.order()[:3]
        scored = zip(self.grid.names(best), self._at(best).tolist(), strict=True)
        listed = ", ".join(f"{name} {score:.3g}" for name, score in scored)
        pairs = f" of {len(self.values)} pairs" if self._by_pair else ""
        return (
            f"Scores({self.grid.n_parts:,} {self.grid.noun}{pairs} by {self.method}: {listed}, ...)"
        )


@dataclass(frozen=True, eq=False)
class Roc(Result):
    """How well scores separate the parts of a known circuit from all others, at every threshold.

    Args:
        false_positive_rate: share of the other parts that score at least the threshold.
        true_positive_rate: share of the known parts that score at least the threshold.
        auc: area under the curve: the probability that a known part scores above another part, with
            ties counted as one half. 1: all known parts score above all others; 0.5: chance.
    """

    false_positive_rate: Float[Tensor, " threshold"]
    true_positive_rate: Float[Tensor, " threshold"]
    auc: float

    def __repr__(self) -> str:
        return f"Roc(AUC {self.auc:.4f})"

    def to_pandas(self) -> pd.DataFrame:
        """One row per threshold, in decreasing order."""
        import pandas as pd

        rates = ("false_positive_rate", "true_positive_rate")
        return pd.DataFrame({name: getattr(self, name).tolist() for name in rates})

    def _summary(self) -> pd.DataFrame:
        """The true positive rates at a few false positive rates."""
        import pandas as pd

        fpr, tpr = self.false_positive_rate, self.true_positive_rate
        limits = torch.tensor([0.001, 0.01, 0.1, 0.5], dtype=fpr.dtype)
        last = torch.searchsorted(fpr, limits, right=True) - 1
        columns = {"false positive rate at most": limits, "true positive rate": tpr[last]}
        return pd.DataFrame({name: column.tolist() for name, column in columns.items()})


@dataclass(frozen=True)
class Overlap(Result):
    """Overlap of a circuit with a known one.

    Args:
        iou: shared parts over parts of either circuit.
        precision: shared parts over the circuit's parts.
        recall: shared parts over the known circuit's parts.
    """

    iou: float
    precision: float
    recall: float


@checked
def roc(scores: Scores, known: Circuit) -> Roc:
    """The ROC curve of scores, by absolute value, against a known circuit.

    Raises:
        ValueError: the circuit is of another grid, is empty, or keeps all parts.
    """
    _check_grids(scores, known)
    exists = scores.grid.exists
    values, positive = scores.mean()[exists].abs(), known.mask[exists]
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if not n_positive or not n_negative:
        raise ValueError(
            f"the known circuit must have some, not all, of the {len(positive):,} "
            f"{known.grid.noun}; it has {n_positive:,}"
        )
    thresholds, group = values.unique(return_inverse=True)  # ascending; ties share a threshold
    tied = torch.zeros(len(thresholds), dtype=torch.float64)
    hits = tied.index_add(0, group, positive.double()).flip(0).cumsum(0) / n_positive
    misses = tied.index_add(0, group, (~positive).double()).flip(0).cumsum(0) / n_negative
    start = torch.zeros(1, dtype=torch.float64)
    fpr, tpr = torch.cat([start, misses]), torch.cat([start, hits])
    return Roc(fpr, tpr, torch.trapezoid(tpr, fpr).item())


@checked
def overlap(circuit: Circuit, known: Circuit) -> Overlap:
    """Intersection over union, precision and recall of a circuit's parts.

    Raises:
        ValueError: the circuits are of different grids, or one is empty.
    """
    _check_grids(circuit, known)
    both = int((circuit.mask & known.mask).sum())
    if not len(circuit) or not len(known):
        raise ValueError(f"a circuit is empty: they have {len(circuit)} and {len(known)} parts")
    either = int((circuit.mask | known.mask).sum())
    return Overlap(both / either, both / len(circuit), both / len(known))


def _check_grids(compared: Scores | Circuit, known: Circuit) -> None:
    if compared.grid != known.grid:
        raise ValueError(
            f"these are parts of {compared.grid!r}, the known circuit of {known.grid!r}"
        )
