"""Results of circuit searches, and the state of an unfinished search."""

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
"""Minimum share of the kept edges that must have an effect, below which pruning warns."""


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

    def _description(self) -> str:
        """The circuit and its faithfulness as text."""
        dropped = self.n_kept - len(self.circuit)
        kept = f", {self.n_kept:,} with those without effect" if dropped else ""
        held_out = f"; held out: {self.held_out}" if self.held_out else ""
        return f"{self.circuit!r}{kept}; {self.searched}{held_out}"


@dataclass(frozen=True, eq=False)
class Acdc(_Search):
    """Result of ACDC.

    Args:
        circuit: parts that are kept, without edges that have no effect (that are on no path).
        n_kept: number of parts that the search kept, including edges without effect.
        searched: faithfulness of the circuit on the pairs of the search.
        held_out: faithfulness of the circuit on held-out pairs, if there are any.
        history: one row per test: the part, the change of the metric, whether the part was kept.
        threshold: threshold of the last pass.
        value: metric under the circuit, or divergence in nats.
        tested: number of parts that were tested.
        forward_equivalents: cost of the tests in forward passes: layers run, divided by the layers
            of the model. The unembedding of one position is not counted.
        prompt_start: text that every prompt started with, such as BOS; ``None`` if not known.
    """

    threshold: float
    value: float
    tested: int
    forward_equivalents: float
    prompt_start: str | None = None

    def __repr__(self) -> str:
        return (
            f"Acdc({self._description()}; threshold {self.threshold:.3g}; {self.tested:,} tests at "
            f"the cost of {self.forward_equivalents:,.1f} forward passes)"
        )


@dataclass(frozen=True, eq=False)
class Pruning(_Search):
    """Result of learned edge pruning.

    Args:
        circuit: edges that are most likely open, without edges that have no effect (that are on no
            path).
        n_kept: number of edges that the search kept, including edges without effect.
        searched: faithfulness of the circuit on the pairs of the search.
        held_out: faithfulness of the circuit on held-out pairs, if there are any.
        history: one row per step: divergence in nats under sampled gates, expected number of open
            gates, noise.
        ranked: faithfulness, on the pairs of the search, of the `n_kept` best edges by the initial
            scores, or by EAP-IG if none were given.
        scores: minus the probability that each edge's gate is open, at the initial noise.
    """

    ranked: Faithfulness
    scores: Scores

    def notes(self) -> list[str]:
        """Caveats about the circuit, as sentences; empty if there are none.

        There is one if less than `ON_PATHS` of the kept edges have an effect, and another if the
        best edges by attribution preserve more of the predictions.
        """
        notes = []
        if len(self.circuit) < ON_PATHS * self.n_kept:
            notes.append(
                f"{len(self.circuit):,} of the {self.n_kept:,} edges that were kept have an "
                "effect; the others are on no path and were dropped. Try more steps or another "
                "size."
            )
        if self.ranked.divergence < self.searched.divergence - 1e-6:
            notes.append(
                f"The circuit diverges by {self.searched.divergence:.3g} nats; the {self.n_kept:,} "
                f"best edges by attribution diverge by {round(self.ranked.divergence, 6) + 0:.3g}. "
                "Use those edges, start=scores, more steps, or find_circuit."
            )
        return notes

    def __repr__(self) -> str:
        return f"Pruning({self._description()}; {len(self.history):,} steps)"


@dataclass
class SearchState(Resumable):
    """The state of an ACDC search, as stored in a checkpoint.

    Args:
        mask: parts that are left.
        threshold: smallest change of the metric for which a part is kept.
        begun: parts that were left at the start of this pass over all parts.
        position: index of the next part to test.
        ahead: maximum number of parts to test in one forward pass.
        last_kept: whether the part tested last was kept.
        value: metric under the mask.
        tested: number of parts tested so far.
        layers_run: number of layers run by the tests so far.
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
