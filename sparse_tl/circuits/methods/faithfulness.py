"""The circuit that a search returns, and how faithful it is.

What a search measures along the way is different: sampled gates, a single batch, or a circuit with
edges that have no effect. So a search reports the `Faithfulness` of a run of the circuit that it
returns, with everything in it kept and everything else patched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from sparse_tl.backend import HookedModel
from sparse_tl.circuits.circuit import Circuit
from sparse_tl.circuits.pair_runs import PairRuns, value_of
from sparse_tl.data import PromptPairs
from sparse_tl.gates import Patch, Site
from sparse_tl.metrics import Metric, NoEffectError, divergence, explained_effect
from sparse_tl.results import Result


@dataclass(frozen=True)
class Faithfulness(Result):
    """How much of a model's predictions a circuit preserves, as means over prompt pairs.

    Args:
        divergence: ``KL(model || circuit)`` of the next-token distributions, in nats.
        explained_effect: explained effect on the metric of the search; for "kl",
            ``1 - KL(model || circuit) / KL(model || everything patched)``. NaN if patching
            everything does not change the metric.
        n_pairs: number of prompt pairs.
    """

    finite = False
    divergence: float
    explained_effect: float
    n_pairs: int

    def __str__(self) -> str:
        # A divergence below 1e-6 nats is rounding error. Adding 0 turns -0 into 0.
        nats, effect = round(self.divergence, 6) + 0, round(self.explained_effect, 3) + 0
        return f"{nats:.3g} nats, explained effect {effect:.3f}, on {self.n_pairs:,} pairs"


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
    runs = PairRuns(model, site, pairs, patch, batch_size, keep=True)
    runs.check_effect(metric)
    if held_out is None:
        return runs, None
    others = PairRuns(model, site, held_out, patch, batch_size)
    others.check_effect(metric)
    return runs, others


@torch.no_grad()
def faithfulness(
    runs: PairRuns, metric: Metric | Literal["kl"], mask: Bool[Tensor, "*axes"]
) -> Faithfulness:
    """Run a circuit, given by the parts that are kept, on prompt pairs."""
    measured = []
    for batch, run in runs:
        clean, circuit = run.clean_logits, run.logits(mask)
        logits = circuit, clean, runs.everything_patched(run)
        nats = divergence(circuit, clean)
        values = [value_of(metric, each, batch, run) for each in logits]
        measured.append(torch.stack([nats, *values]).cpu().double())
    nats, *values = torch.cat(measured, dim=1)
    try:
        effect = explained_effect(*values).item()
    except NoEffectError:
        effect = math.nan
    return Faithfulness(nats.mean().item(), effect, len(nats))


@dataclass(frozen=True, eq=False)
class SearchResult(Result):
    """The circuit that a search returns, its faithfulness, and the history of the search.

    Args:
        circuit: parts that are kept, without edges that have no effect (that are on no path).
        n_kept: number of parts that the search kept, including edges without effect.
        searched: faithfulness of the circuit on the pairs of the search.
        held_out: faithfulness of the circuit on held-out pairs, if there are any.
        history: one row per step of the search.
    """

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
        grid, dropped = self.circuit.grid, self.n_kept - len(self.circuit)
        kept = f" ({self.n_kept:,} with those without effect)" if dropped else ""
        held_out = f"; held out: {self.held_out}" if self.held_out else ""
        size = f"{len(self.circuit):,} of {grid.n_parts:,} {grid.noun}{kept}"
        return f"{size}; {self.searched}{held_out}"
