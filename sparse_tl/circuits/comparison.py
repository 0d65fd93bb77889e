"""Comparison with a known circuit: the ROC of scores, and the overlap of circuits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.calls.arguments import checked
from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.scores import Scores
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd


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
            f"expected a known circuit with some of the {len(positive):,} {known.grid.noun}; it "
            f"has {n_positive:,}"
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
        raise ValueError(f"expected circuits with parts; they have {len(circuit)} and {len(known)}")
    either = int((circuit.mask | known.mask).sum())
    return Overlap(both / either, both / len(circuit), both / len(known))


def _check_grids(compared: Scores | Circuit, known: Circuit) -> None:
    if compared.grid != known.grid:
        raise ValueError(f"expected a circuit of {compared.grid!r}; got one of {known.grid!r}")
