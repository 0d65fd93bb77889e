"""What the searches return: the circuit that they found, and how they came to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.scores import Scores
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd


class _Search(Result):
    circuit: Circuit
    history: pd.DataFrame

    def to_pandas(self) -> pd.DataFrame:
        """The history."""
        return self.history

    def _repr_html_(self) -> str:
        return f"<p>{self!r}</p>" + self.circuit._repr_html_()


@dataclass(frozen=True, eq=False)
class Acdc(_Search):
    """The outcome of ACDC.

    Args:
        circuit: what is kept; edges without effect (off every path) are left out.
        threshold: of the last pass.
        value: the metric, or the divergence in nats, under the circuit.
        tested: parts whose patch was measured.
        forward_equivalents: forward passes that the tests cost, as layers run over layers; the
            unembedding of one position is not counted.
        history: one row per test: the part, how far the metric moved, whether it was kept.
    """

    circuit: Circuit
    threshold: float
    value: float
    tested: int
    forward_equivalents: float
    history: pd.DataFrame

    def __repr__(self) -> str:
        return (
            f"Acdc({self.circuit!r} at threshold {self.threshold:.3g}; {self.tested:,} tests at "
            f"the cost of {self.forward_equivalents:,.1f} forward passes)"
        )


@dataclass(frozen=True, eq=False)
class Pruning(_Search):
    """The outcome of learned edge pruning.

    Args:
        circuit: the edges most likely open, as many as asked for.
        scores: minus the probability that an edge's gate is open.
        history: one row per step: divergence in nats, expected and target size, lambda.
    """

    circuit: Circuit
    scores: Scores
    history: pd.DataFrame

    def __repr__(self) -> str:
        last = self.history.iloc[-1]
        return f"Pruning({self.circuit!r}; last divergence {last['divergence']:.3g} nats)"
