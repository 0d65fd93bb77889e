"""Causal head gating: head gates without a penalty, then pushed open and pushed shut; contrasts.

Each seed is a matrix of a stack; all seeds are fitted on the same batches, in the same passes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, Seed, checked
from sparse_tl.backend import (
    OWN,
    HookedModel,
    adapt,
    check_rows,
    check_same_alone,
    hooks_besides,
    in_evaluation_mode,
)
from sparse_tl.data import ShuffledStream
from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.targets import TargetDataset
from sparse_tl.head_roles.likelihood import (
    LARGEST_LOGIT,
    Contrast,
    GatedHeads,
    Likelihood,
    gated_heads_run,
    target_log_probabilities,
)
from sparse_tl.head_roles.roles import THRESHOLD, HeadRoles, head_table, mean_table, role_scores
from sparse_tl.results import OfPrompts
from sparse_tl.training import TrainingConfig, train

FIRST_RATES, SECOND_RATES = (0.1, 0.01), (0.5, 0.1)
"""Initial and final learning rates of G0 from random gates, and of all later fits."""


@checked
@dataclass(frozen=True)
class GateFitting:
    """Settings of gate fitting.

    Args:
        lambda_: coefficient of the penalty, in nats per unit of the mean logit.
        updates: optimizer steps per stage.
        batch_size: prompts per step.
        record_every: steps between recorded gates.
        checkpoint_every: steps between checkpoints.
        accumulate: micro-batches per step, to save memory.
        seed: random seed for the data split and the batches.
    """

    lambda_: float = 0.1
    updates: AtLeastOne = 500
    batch_size: AtLeastOne = 64
    record_every: AtLeastOne = 10
    checkpoint_every: AtLeastOne = 50
    accumulate: AtLeastOne = 1
    seed: Seed = 0

    @property
    def recorded_at(self) -> tuple[int, ...]:
        """The number of updates before each record of the gates, from 0 to all."""
        return (*range(0, self.updates, self.record_every), self.updates)

    def stream(self, rows: TokenBatch) -> ShuffledStream:
        """The training batches."""
        return ShuffledStream(rows, min(self.batch_size, len(rows)), self.seed)


@checked
@in_evaluation_mode
def fit_head_gates(
    model: HookedModel,
    dataset: TargetDataset,
    *,
    seeds: AtLeastOne | Sequence[Seed] = 10,
    held_out: float | TargetDataset = 0.1,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    **settings: Any,
) -> HeadRoles:
    """The roles of all heads, from one gate per head that is fitted under three penalties.

    G0 minimises the mean NLL of the targets. G+ and G- start from G0, with a penalty that pushes
    gates open (lambda > 0) or shut (lambda < 0). Facilitation is G-, interference 1 - G+, and
    irrelevance G+ (1 - G-). Warns of seeds that did not fit, and of irrelevant heads whose removal
    matters; see `HeadRoles`.

    Args:
        model: dense or sparse model; its weights are not changed.
        dataset: prompts and their targets.
        seeds: random seeds of the initial gates, or their number, counted from 0. The result of a
            seed does not depend on the other seeds.
        held_out: fraction of the dataset to report on, or separate prompts.
        checkpoint: folder for checkpoints; an interrupted fit is resumed from it.
        progress: whether to show a progress bar.
        **settings: fields of `GateFitting`; a negative ``lambda_`` swaps G+ and G-.

    Raises:
        ValueError: prompts do not fit the model, or settings are out of range; before the fit.
        KeyboardInterrupt: after Ctrl-C, once the state is saved.

    Reference: arXiv 2505.13737. Means replace the sums of the paper, so that ``lambda_`` has the
    same meaning for every model, batch and target.
    """
    fitting, chosen = GateFitting(**settings), _chosen(seeds)
    if fitting.lambda_ == 0:
        raise ValueError("lambda_ may not be 0: without a penalty, G+ and G- equal G0")
    if isinstance(held_out, TargetDataset):
        training, reported = dataset, held_out
    else:
        training, reported = dataset.split(held_out, seed=fitting.seed)
    for part in (training, reported):
        check_fits(model, part)
    theta, trajectories = first_gates(model, chosen), list[Tensor]()
    for name, lambda_ in {"g0": 0, "g_plus": fitting.lambda_, "g_minus": -fitting.lambda_}.items():
        trajectory = _fitted(
            Likelihood(GatedHeads(model, theta), lambda_, fitting.record_every),
            training.rows,
            fitting,
            {"stage": name, "seeds": [*chosen], "dataset": training.rows.digest()},
            rates=SECOND_RATES if trajectories else FIRST_RATES,
            checkpoint=checkpoint and Path(checkpoint) / name,
            progress=progress,
        )
        trajectories.append(trajectory)
        theta = trajectories[0][:, -1].to(theta.device)
    gates = torch.stack(trajectories).sigmoid()
    roles = HeadRoles(
        seeds=chosen,
        lambda_=fitting.lambda_,
        trajectories=gates,
        recorded_at=fitting.recorded_at,
        prompt_start=dataset.start,
        **_measured(model, reported.rows, gates[:, :, -1], fitting.lambda_, progress),
    )
    for note in roles.notes():
        warnings.warn(note, stacklevel=2)
    return roles


def first_gates(model: HookedModel, seeds: Sequence[int]) -> Float[Tensor, "seed layer head"]:
    """Logits of uniformly random gates; those of a seed do not depend on the other seeds."""
    adapter = adapt(model)
    shape = adapter.n_layers, adapter.n_heads
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    gates = [torch.rand(shape, dtype=torch.float64, generator=one) for one in generators]
    return torch.stack(gates).logit(eps=1e-6).to(adapter.device, adapter.gate_dtype)


def _chosen(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """The seeds, given as such or by their number."""
    chosen = tuple(range(seeds) if isinstance(seeds, int) else seeds)
    if len(set(chosen)) < max(1, len(chosen)):
        raise ValueError(f"give at least one seed, and each once, not {seeds}")
    return chosen


def _fitted(
    objective: Likelihood,
    rows: TokenBatch,
    fitting: GateFitting,
    settings: dict[str, Any],
    *,
    rates: tuple[float, float],
    checkpoint: str | Path | None,
    progress: bool,
) -> Float[Tensor, "seed record layer head"]:
    """The logits of the gates at `GateFitting.recorded_at` of one stage; the objective has the
    initial ones. The learning rate decays from the first of `rates` to the second."""
    theta, (first, last) = objective.gated.theta, rates
    train(
        objective.gated,
        objective,
        fitting.stream(rows),
        TrainingConfig(
            steps=fitting.updates,
            learning_rate=first,
            final_rate=last / first,
            warmup=0,
            decay=1.0,
            schedule="linear",
            betas=(0.9, 0.999),
            clip=None,  # the norm of all gradients together would couple the seeds
            accumulate=fitting.accumulate,
            seed=fitting.seed,
            evaluate_every=fitting.updates,
            checkpoint_every=fitting.checkpoint_every,
        ),
        trained={"theta": 1.0},
        settings={
            "batch_size": fitting.batch_size,
            "record_every": fitting.record_every,
            "lambda": objective.lambda_,
            **settings,
        },
        checkpoint=checkpoint,
        title=f"head gates {settings['stage']}",
        progress=progress,
    )
    before = objective.recorded[: len(fitting.recorded_at) - 1]
    return torch.stack([*before, theta.detach().cpu()], dim=1)


def check_fits(model: HookedModel, dataset: TargetDataset) -> None:
    """Check that a model can read a dataset, also as several copies in one batch.

    Raises:
        ValueError: the model lacks ``hook_z``, a prompt exceeds the context, a token is outside the
            vocabulary, prompts are padded although attention is bidirectional, or a hook of the
            user's holds for one batch size or one column alone.
    """
    adapter = adapt(model)
    adapter.layer_points("attn.hook_z")
    rows = dataset.rows.trimmed(causal=adapter.causal)
    check_rows(adapter, rows)
    if not adapter.causal and rows.attention_mask is not None and not rows.attention_mask.all():
        raise ValueError(
            "padded prompts cannot be used with bidirectional attention, which attends to padding: "
            "fit each length separately"
        )
    if hooks_besides(adapter, OWN):
        few = dataset.rows.select(slice(0, 2)).to(adapter.device)
        few = few.trimmed(causal=True) if few.tokens.shape[1] > adapter.n_ctx else few
        with torch.no_grad():
            alone = adapter.final(few.tokens, **few.model_kwargs)[few.loss_mask]
            copies = torch.ones(2, adapter.n_layers, adapter.n_heads)
            check_same_alone(gated_heads_run(model, few)[0].final(copies)[1], alone)


def _measured(
    model: HookedModel,
    rows: TokenBatch,
    gates: Float[Tensor, "stage=3 seed layer head"],
    lambda_: float,
    progress: bool,
) -> dict[str, Any]:
    """Losses and costs of removal on held-out prompts, by field of `HeadRoles`.

    The costs are measured because gates do not show them: where a normalisation cancels scale, a
    gate of 0.2 can be as good as a gate of 1, so that even an essential head can end with a small
    gate when pushed shut. All gate matrices are one stack.
    """
    _, g_plus, g_minus = gates
    n_stages, n_seeds, n_layers, n_heads = gates.shape
    all_heads = torch.ones(1, n_layers, n_heads, dtype=gates.dtype)
    without_head = all_heads.repeat(n_layers * n_heads, 1, 1)
    without_head.flatten(1).fill_diagonal_(0)
    scores = role_scores(g_plus, g_minus).values()
    others = torch.stack([score < THRESHOLD for score in scores]).to(gates.dtype)
    without_role = torch.stack([others, others * g_plus]).flatten(0, 2)
    parts = [gates.flatten(0, 1), all_heads, without_head, without_role]
    found = target_log_probabilities(
        model, rows, torch.cat(parts), title="removing heads", progress=progress
    )
    sizes, n_labels = [*map(len, parts)], int(rows.loss_mask.sum())
    of_gates, dense, *removed = (-found.sum(dim=1) / n_labels).split(sizes)
    by_stage, dense_loss = of_gates.view(n_stages, n_seeds), dense.item()
    by_row = found.split(sizes)
    excess = by_row[1] - by_row[0].view(n_stages, n_seeds, -1)[1:]
    start = torch.stack([dense.expand(n_seeds), by_stage[1]])[:, None]
    return {
        "losses": by_stage.clone(),
        "dense_loss": dense_loss,
        "fitted": has_fitted(excess, n_labels, lambda_),
        "removed": removed[0].view(n_layers, n_heads) - dense_loss,
        "removed_together": removed[1].view(2, -1, n_seeds) - start,
    }


def has_fitted(
    excess: Float[Tensor, "stage seed row"], n_labels: int, lambda_: float
) -> Bool[Tensor, " seed"]:
    """Whether G+ and G- of each seed are as good as minimisers of their objectives must be.

    A fit can choose to open all gates, which gives the model without gates. The penalty
    ``-lambda mean(clamp(theta, -4, 4))`` has a range of ``8 |lambda|`` nats. So

        NLL(G) - NLL(no gates) > 8 |lambda|

    implies that opening all gates would be better than G: the fit is stuck, and its gates are not
    informative. For G+, any difference above 0 implies this; the margin allows for incomplete
    optimisation. Two standard errors of the difference, paired by prompt, allow for the choice of
    prompts.

    `excess` is the NLL in nats of each held-out target under G+ and G-, minus that without gates;
    `n_labels` is the total number of target tokens.
    """
    n_rows = excess.shape[-1]
    mean = excess.sum(dim=-1) / n_labels
    error = torch.zeros_like(mean)
    if n_rows > 1:
        error = excess.std(dim=-1) * math.sqrt(n_rows) / n_labels
    return (mean - 2 * error <= 2 * LARGEST_LOGIT * abs(lambda_)).all(dim=0)


@dataclass(frozen=True, eq=False)
class ContrastiveGates(OfPrompts):
    """Gates under which some targets stay likely and others become unlikely.

    Args:
        seeds: random seeds of the initial gates.
        lambda_: coefficient of the penalty.
        gates: fitted gates.
        retained_losses: mean NLL per held-out token to retain, in nats, by seed.
        forgotten_losses: mean NLL per held-out token to forget, in nats, by seed.
        dense_retained_loss: `retained_losses` without gates.
        dense_forgotten_loss: `forgotten_losses` without gates.
    """

    seeds: tuple[int, ...]
    lambda_: float
    gates: Float[Tensor, "seed layer head"]
    retained_losses: Float[Tensor, " seed"]
    forgotten_losses: Float[Tensor, " seed"]
    dense_retained_loss: float
    dense_forgotten_loss: float

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
    seeds: AtLeastOne | Sequence[Seed] = 10,
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
        seeds: as in `fit_head_gates`, like `checkpoint` and `progress`.
        held_out: fraction of each dataset to report on.
        **settings: further fields of `GateFitting`; ``accumulate`` has to be 1, since the
            objective compares means of whole batches.

    Raises:
        ValueError: prompts do not fit the model, or settings are out of range; before the fit.

    Reference: arXiv 2505.13737, contrastive causal head gating.
    """
    fitting, chosen = GateFitting(lambda_=lambda_, **settings), _chosen(seeds)
    if fitting.accumulate != 1:
        raise ValueError("accumulate has to be 1: the objective compares means of whole batches")
    parts = [dataset.split(held_out, seed=fitting.seed) for dataset in (retain, forget)]
    for part in (*parts[0], *parts[1]):
        check_fits(model, part)
    (retained, forgotten), reported = zip(*parts, strict=True)
    gated, stream = GatedHeads(model, first_gates(model, chosen)), fitting.stream(forgotten.rows)
    trajectory = _fitted(
        Contrast(gated, lambda_, fitting.record_every, stream),
        retained.rows,
        fitting,
        {
            "stage": "contrast",
            "seeds": [*chosen],
            "retain": retained.rows.digest(),
            "forget": forgotten.rows.digest(),
        },
        rates=SECOND_RATES,
        checkpoint=checkpoint,
        progress=progress,
    )
    gates = trajectory[:, -1].sigmoid()
    stack = torch.cat([gates, torch.ones_like(gates[:1])])
    kept, lost = (
        -target_log_probabilities(model, part.rows, stack).sum(dim=1) / part.n_targets
        for part in reported
    )
    return ContrastiveGates(
        *(chosen, lambda_, gates, kept[:-1].clone(), lost[:-1].clone()),
        *(kept[-1].item(), lost[-1].item()),
        prompt_start=retain.start,
    )
