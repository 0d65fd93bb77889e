"""Contrastive head gating: gates that keep one sub-task and suppress another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.backend import HookedModel, in_evaluation_mode
from sparse_tl.calls.arguments import checked
from sparse_tl.data.targets import TargetDataset
from sparse_tl.head_roles.fitting import (
    SECOND_RATES,
    GateFitting,
    Seeds,
    checked_parts,
    chosen_seeds,
    first_gates,
    fit_stage,
)
from sparse_tl.head_roles.likelihood import Contrast, GatedHeads, target_log_probabilities
from sparse_tl.head_roles.roles import head_table, mean_table
from sparse_tl.results import Result


@dataclass(frozen=True, eq=False)
class ContrastiveGates(Result):
    """Gates under which some targets stay likely and others become unlikely.

    Args:
        seeds: random seeds of the initial gates.
        lambda_: coefficient of the penalty.
        gates: fitted gates.
        retained_losses: mean NLL per held-out token to retain, in nats, by seed.
        forgotten_losses: mean NLL per held-out token to forget, in nats, by seed.
        dense_retained_loss: `retained_losses` without gates.
        dense_forgotten_loss: `forgotten_losses` without gates.
        prompt_start: text that every prompt started with, such as BOS; ``None`` if not known.
    """

    seeds: tuple[int, ...]
    lambda_: float
    gates: Float[Tensor, "seed layer head"]
    retained_losses: Float[Tensor, " seed"]
    forgotten_losses: Float[Tensor, " seed"]
    dense_retained_loss: float
    dense_forgotten_loss: float
    prompt_start: str | None = None

    def to_pandas(self) -> pd.DataFrame:
        """One row per seed and head."""
        return head_table("seed", self.seeds, {"gate": self.gates})

    def _summary(self) -> pd.DataFrame:
        return mean_table(self.to_pandas())

    def __repr__(self) -> str:
        return (
            f"ContrastiveGates({len(self.seeds)} seeds; NLL retained "
            f"{self.retained_losses.mean():.3f} ({self.dense_retained_loss:.3f} without gates), "
            f"forgotten {self.forgotten_losses.mean():.3f} ({self.dense_forgotten_loss:.3f}))"
        )


@checked
@in_evaluation_mode
def fit_contrastive_head_gates(
    model: HookedModel,
    retain: TargetDataset,
    forget: TargetDataset,
    *,
    lambda_: float = 0.0,
    seeds: Seeds = 10,
    held_out: float = 0.1,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    **settings: Any,
) -> ContrastiveGates:
    """Gates fitted to keep one sub-task and suppress another; they show the heads that differ.

    Minimises ``-logP_retain + max(logP_forget - sg(logP_retain), -5) - lambda mean(clamp(theta,
    -4, 4))`` from uniformly random gates, with mean log-probabilities of target tokens in nats.
    Making the forgotten targets more than 5 nats less likely than the retained ones gains nothing.

    Args:
        model: dense or sparse model; its weights are not changed.
        retain: prompts and targets that should stay likely.
        forget: prompts and targets that should become unlikely.
        lambda_: coefficient of the penalty: above 0 opens gates, below 0 closes them. At 0, gates
            of heads that neither sub-task needs stay near their initial values. Above 0, a fit can
            converge to gates under which both sub-tasks are likely.
        seeds: as in `fit_head_gates`.
        held_out: share of each dataset to report on.
        checkpoint: folder for checkpoints; an interrupted fit is resumed from it.
        progress: whether to show a progress bar.
        **settings: further fields of `GateFitting`.

    Raises:
        ValueError: prompts do not fit the model, or settings are out of range; before the fit.

    Reference: arXiv 2505.13737, contrastive causal head gating.
    """
    fitting = GateFitting(lambda_=lambda_, **settings)
    if fitting.accumulate != 1:
        raise ValueError(
            "expected accumulate=1, since the objective compares means of whole batches; got "
            f"{fitting.accumulate}"
        )
    chosen = chosen_seeds(seeds)
    (retained, retained_held_out), (forgotten, forgotten_held_out) = (
        checked_parts(model, dataset, held_out, fitting.seed) for dataset in (retain, forget)
    )
    gated = GatedHeads(model, first_gates(model, chosen))
    stream = fitting.stream(forgotten.rows)
    trajectory = fit_stage(
        Contrast(gated, fitting.lambda_, fitting.record_every, stream),
        fitting.stream(retained.rows),
        fitting,
        rates=SECOND_RATES,
        settings={
            "stage": "contrast",
            "seeds": list(chosen),
            "retain": retained.rows.digest(),
            "forget": forgotten.rows.digest(),
        },
        checkpoint=checkpoint,
        title="contrastive head gates",
        progress=progress,
    )
    gates = trajectory[:, -1].sigmoid()
    stack = torch.cat([gates, torch.ones_like(gates[:1])])
    retained_losses, forgotten_losses = (
        -target_log_probabilities(model, part.rows, stack).sum(dim=1) / part.n_targets
        for part in (retained_held_out, forgotten_held_out)
    )
    return ContrastiveGates(
        chosen,
        fitting.lambda_,
        gates,
        retained_losses[:-1].clone(),
        forgotten_losses[:-1].clone(),
        retained_losses[-1].item(),
        forgotten_losses[-1].item(),
        retain.start,
    )
