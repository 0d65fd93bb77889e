"""Faithfulness of the circuit that a search returns, measured by running that circuit.

What a search measures along the way is different: sampled gates, a single batch, or a circuit
with edges that have no effect. So a search reports a run of the circuit that it returns, with
everything in it kept and everything else patched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from sparse_tl.calls.scopes import autograd
from sparse_tl.circuits.pair_runs import PairRuns
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.metrics import Metric, NoEffectError, divergence, explained_effect, measure
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


class FaithfulnessRuns:
    """Runs of circuits on the pairs of a search, and on held-out pairs if there are any.

    All pairs are first run with everything patched, so that pairs that cannot be measured raise an
    error before the search, not after it.

    Args:
        runs: runs of the pairs of the search.
        metric: metric for the explained effect.
        held_out: pairs that the search does not use, if any.
    """

    def __init__(
        self, runs: PairRuns, metric: Metric | Literal["kl"], held_out: PromptPairs | None
    ) -> None:
        self._metric, self._runs = metric, [runs]
        if held_out is not None:
            others = PairRuns(runs.model, runs.site, held_out, runs.patch, runs.batch_size)
            self._runs.append(others)
        self.of(torch.zeros(runs.site.shape(runs.adapter), dtype=torch.bool))

    def of(self, mask: Bool[Tensor, "*axes"]) -> tuple[Faithfulness, Faithfulness | None]:
        """The faithfulness of a circuit on the pairs of the search, and on the held-out ones."""
        searched, *others = (self._on(runs, mask) for runs in self._runs)
        return searched, others[0] if others else None

    @autograd(False)
    def _on(self, runs: PairRuns, mask: Bool[Tensor, "*axes"]) -> Faithfulness:
        measured = []
        for batch, run in runs:
            clean, circuit = run.clean_logits, run.logits(mask)
            logits = circuit, clean, runs.everything_patched(run)
            nats = divergence(circuit, clean)
            if isinstance(self._metric, str):
                values = [-divergence(each, clean) for each in logits]
            else:
                values = [measure(self._metric, each, batch) for each in logits]
            measured.append(torch.stack([nats, *values]).cpu().double())
        nats, *values = torch.cat(measured, dim=1)
        try:
            effect = explained_effect(*values).item()
        except NoEffectError:
            effect = math.nan
        return Faithfulness(nats.mean().item(), effect, len(nats))
