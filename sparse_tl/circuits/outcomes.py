"""Results of circuit searches: the circuit found, the search history, and a search half way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxtyping import Bool
from torch import Tensor

from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.scores import Scores
from sparse_tl.results import Result

if TYPE_CHECKING:
    import pandas as pd


class _Search(Result):
    def to_pandas(self: Acdc | Pruning) -> pd.DataFrame:
        """The search history."""
        return self.history

    def _repr_html_(self: Acdc | Pruning) -> str:
        return f"<p>{self!r}</p>" + self.circuit._repr_html_()


@dataclass(frozen=True, eq=False)
class Acdc(_Search):
    """Result of ACDC.

    Args:
        circuit: parts that are kept; edges without effect (off every path) are dropped.
        threshold: threshold of the last pass.
        value: metric under the circuit, or divergence in nats.
        tested: number of parts whose patch was measured.
        forward_equivalents: cost of the tests in forward passes (layers run over layers of the
            model); the unembedding of one position is not counted.
        history: one row per test: the part, the change of the metric, whether the part was kept.
        prompt_start: text that every prompt started with, such as BOS; ``None`` if not known.
    """

    circuit: Circuit
    threshold: float
    value: float
    tested: int
    forward_equivalents: float
    history: pd.DataFrame
    prompt_start: str | None = None

    def __repr__(self) -> str:
        return (
            f"Acdc({self.circuit!r} at threshold {self.threshold:.3g}; {self.tested:,} tests at "
            f"the cost of {self.forward_equivalents:,.1f} forward passes)"
        )


@dataclass(frozen=True, eq=False)
class Pruning(_Search):
    """Result of learned edge pruning.

    Args:
        circuit: the edges that are most likely open, as many as requested.
        scores: minus the probability that each edge's gate is open.
        history: one row per step: divergence in nats, expected and target size, lambda.
    """

    circuit: Circuit
    scores: Scores
    history: pd.DataFrame

    def __repr__(self) -> str:
        last = self.history.iloc[-1]
        return f"Pruning({self.circuit!r}; last divergence {last['divergence']:.3g} nats)"


@dataclass
class SearchState(Result):
    """The state of a search by ACDC, as stored in a checkpoint.

    Args:
        mask: parts that are left.
        threshold: how far one part may move the metric.
        begun: parts that were left when this pass over all parts began.
        position: index of the next part to test.
        ahead: number of parts that are tested together, at most.
        last_kept: whether the part that was tested last was kept.
        value: metric under the mask.
        tested: number of parts tested.
        layers_run: number of layers run for the tests.
        history: name of the part, change of the metric, and whether the part was kept.
        asked: what determines the search, to match it with its checkpoint: parts, patch, metric,
            size, threshold, batch size, prompts, start and the model's weights.
        measured: metric of the model on the prompts, for the same purpose.
    """

    mask: Bool[Tensor, "*axes"]
    threshold: float
    begun: Bool[Tensor, "*axes"] | None = None
    position: int = 0
    ahead: int = 1
    last_kept: bool = False
    value: float = math.nan
    tested: int = 0
    layers_run: int = 0
    history: list[tuple[str, float, bool]] = field(default_factory=list)
    asked: str = ""
    measured: tuple[float, ...] = ()
