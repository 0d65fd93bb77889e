"""Results of circuit searches: the circuit found, the search history, and a search half way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from jaxtyping import Bool
from torch import Tensor

from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.faithfulness import Faithfulness
from sparse_tl.circuits.scores import Scores
from sparse_tl.results import Result
from sparse_tl.resuming import Resumable

if TYPE_CHECKING:
    import pandas as pd

ON_PATHS = 0.9
"""Pruning warns if a smaller share of the edges that it kept has an effect."""


@dataclass(frozen=True, eq=False)
class _Search(Result):
    circuit: Circuit
    n_kept: int
    searched: Faithfulness
    held_out: Faithfulness | None
    history: pd.DataFrame

    def to_pandas(self) -> pd.DataFrame:
        """The search history."""
        return self.history

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>" + self.circuit._repr_html_()

    def _found(self) -> str:
        """The circuit and its faithfulness, in words."""
        dropped = self.n_kept - len(self.circuit)
        without = f", {self.n_kept:,} with those without effect" if dropped else ""
        others = f"; held out: {self.held_out}" if self.held_out else ""
        return f"{self.circuit!r}{without}; {self.searched}{others}"


@dataclass(frozen=True, eq=False)
class Acdc(_Search):
    """Result of ACDC.

    Args:
        circuit: parts that are kept; edges without effect (off every path) are dropped.
        n_kept: number of parts that were kept, before edges without effect were dropped.
        searched: faithfulness of the circuit on the pairs of the search.
        held_out: its faithfulness on held-out pairs, if there are any.
        history: one row per test: the part, the change of the metric, whether the part was kept.
        threshold: threshold of the last pass.
        value: metric under the circuit, or divergence in nats.
        tested: number of parts whose patch was measured.
        forward_equivalents: cost of the tests in forward passes (layers run over layers of the
            model); the unembedding of one position is not counted.
        prompt_start: text that every prompt started with, such as BOS; ``None`` if not known.
    """

    threshold: float
    value: float
    tested: int
    forward_equivalents: float
    prompt_start: str | None = None

    def __repr__(self) -> str:
        return (
            f"Acdc({self._found()}; threshold {self.threshold:.3g}; {self.tested:,} tests at "
            f"the cost of {self.forward_equivalents:,.1f} forward passes)"
        )


@dataclass(frozen=True, eq=False)
class Pruning(_Search):
    """Result of learned edge pruning.

    Args:
        circuit: the edges that are most likely open; edges without effect (off every path) are
            dropped.
        n_kept: number of edges that were kept, before edges without effect were dropped.
        searched: faithfulness of the circuit on the pairs of the search.
        held_out: its faithfulness on held-out pairs, if there are any.
        history: one row per step: divergence in nats under sampled gates, expected number of open
            gates, noise.
        ranked: faithfulness, on the pairs of the search, of as many of the best edges by the scores
            that the search started from; without any, by EAP-IG.
        scores: minus the probability that each edge's gate is open, under the noise of the start.
    """

    ranked: Faithfulness
    scores: Scores

    def notes(self) -> list[str]:
        """Caveats about the circuit, as sentences; empty if there are none.

        Reports that less than `ON_PATHS` of the edges that were kept have an effect, and that the
        best edges by attribution preserve more.
        """
        said = []
        if len(self.circuit) < ON_PATHS * self.n_kept:
            said.append(
                f"{len(self.circuit):,} of the {self.n_kept:,} edges that were kept have an "
                "effect; the others are on no path and were dropped. Try more steps, or another "
                "size."
            )
        if self.ranked.divergence < self.searched.divergence - 1e-6:
            said.append(
                f"The circuit diverges by {self.searched.divergence:.3g} nats; the {self.n_kept:,} "
                f"best edges by attribution diverge by {round(self.ranked.divergence, 6) + 0:.3g}. "
                "Take those, start=scores, more steps, or find_circuit."
            )
        return said

    def __repr__(self) -> str:
        return f"Pruning({self._found()}; {len(self.history):,} steps)"


@dataclass
class SearchState(Resumable):
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
    """

    noun = "search"

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
