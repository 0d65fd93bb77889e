"""The circuit that a search returns, and how faithful it is.

What a search measures along the way is different: sampled gates, a single batch, or a circuit with
edges that have no effect. So a search reports an `Evaluation` of the circuit that it returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Literal

import pandas as pd

from sparse_tl.backend import HookedModel
from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.evaluation import Evaluation
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.data import PromptPairs
from sparse_tl.gates import Patch, Site
from sparse_tl.metrics import Metric, NoEffectError
from sparse_tl.results import OfPrompts


def runs_of_search(
    model: HookedModel,
    site: Site,
    pairs: PromptPairs,
    held_out: PromptPairs | None,
    patch: Patch,
    batch_size: int,
    metric: Metric | Literal["kl"],
) -> tuple[PairRuns, PairRuns | None]:
    """Runs of the pairs of a search, and of held-out pairs, if any; checked to have an effect."""
    runs, others = PairRuns(model, site, pairs, patch, batch_size, keep=True), None
    runs.check_effect(metric, "searched ")
    if held_out is not None:
        others = PairRuns(model, site, held_out, patch, batch_size, keep=True)
        others.check_effect(metric, "held-out ")
    return runs, others


def outcome(found: Evaluation) -> str:
    """What a single circuit explains, in words."""
    # A divergence below 1e-6 nats is rounding error. Adding 0 turns -0 into 0.
    metric = round(found.values.mean().item(), 6) + 0
    try:
        effect = f"explained effect {round(found.effect.item(), 3) + 0:.3f}"
    except NoEffectError:
        effect = "no effect to explain"
    return f"metric {metric:.3g}, {effect}, on {len(found.clean):,} pairs"


@dataclass(frozen=True, eq=False)
class SearchResult(OfPrompts):
    """The circuit that a search returns, its faithfulness, and the history of the search.

    Args:
        circuit: parts that are kept, without edges that have no effect (that are on no path).
        n_kept: number of parts that the search kept, including edges without effect.
        searched: evaluation of the circuit on the pairs of the search.
        held_out: evaluation of the circuit on held-out pairs, if there are any.
        history: one row per step of the search.
    """

    circuit: Circuit
    n_kept: int
    searched: Evaluation
    held_out: Evaluation | None
    history: pd.DataFrame

    def to_pandas(self) -> pd.DataFrame:
        """The search history."""
        return self.history

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>" + self.circuit._repr_html_()

    def _description(self) -> str:
        """The circuit and its faithfulness as text."""
        grid, dropped = self.circuit.grid, self.n_kept - len(self.circuit)
        kept = f" ({self.n_kept:,} with those without effect)" if dropped else ""
        held_out = f"; held out: {outcome(self.held_out)}" if self.held_out else ""
        size = f"{len(self.circuit):,} of {grid.n_parts:,} {grid.noun}{kept}"
        return f"{size}; {outcome(self.searched)}{held_out}"
