"""Causal head gating: fit head gates without a penalty, then pushed open and pushed shut.

Each seed is a matrix of a stack; all seeds are fitted on the same batches, in the same passes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.backend import HookedModel, adapt, check_rows, in_evaluation_mode
from sparse_tl.calls.arguments import AtLeastOne, Seed, checked
from sparse_tl.data import ShuffledStream
from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.targets import TargetDataset
from sparse_tl.head_roles.likelihood import (
    LARGEST_LOGIT,
    GatedHeads,
    Likelihood,
    label_losses,
    target_log_probabilities,
    target_losses,
)
from sparse_tl.head_roles.roles import THRESHOLD, HeadRoles, role_scores
from sparse_tl.training import Selection, TrainingConfig, train

FIRST_RATES, SECOND_RATES = (0.1, 0.01), (0.5, 0.1)
"""Initial and final learning rates of G0, and of G+ and G-."""

MOST_SEEDS = 10_000
"""Maximum number of seeds, all of whose gates are in memory together."""
Seeds = SupportsIndex | Iterable[SupportsIndex]


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
    seeds: Seeds = 10,
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
        held_out: share of the dataset to report on, or separate prompts.
        checkpoint: folder for checkpoints; an interrupted fit is resumed from it.
        progress: whether to show a progress bar.
        **settings: fields of `GateFitting`; a negative ``lambda_`` swaps G+ and G-.

    Raises:
        ValueError: prompts do not fit the model, or settings are out of range; before the fit.
        KeyboardInterrupt: after Ctrl-C, once the state is saved.

    Reference: arXiv 2505.13737. Means replace the sums of the paper, so that ``lambda_`` has the
    same meaning for every model, batch and target.
    """
    fitting = GateFitting(**settings)
    if fitting.lambda_ == 0:
        raise ValueError("expected a lambda_ other than 0: without a penalty, G+ and G- equal G0")
    chosen = chosen_seeds(seeds)
    training, reported = checked_parts(model, dataset, held_out, fitting.seed)
    theta = first_gates(model, chosen)
    folder = None if checkpoint is None else Path(checkpoint)
    stages = {"g0": 0.0, "g_plus": fitting.lambda_, "g_minus": -fitting.lambda_}
    trajectories = []
    for name, lambda_ in stages.items():
        trajectory = fit_stage(
            Likelihood(GatedHeads(model, theta), lambda_, fitting.record_every),
            fitting.stream(training.rows),
            fitting,
            rates=SECOND_RATES if trajectories else FIRST_RATES,
            settings={
                "stage": name,
                "seeds": list(chosen),
                "dataset": training.rows.digest(),
            },
            checkpoint=folder and folder / name,
            title=f"head gates {name}",
            progress=progress,
        )
        trajectories.append(trajectory)
        theta = trajectories[0][:, -1].to(theta.device)
    roles = measured_roles(
        model,
        reported.rows,
        torch.stack(trajectories).sigmoid(),
        seeds=chosen,
        lambda_=fitting.lambda_,
        recorded_at=fitting.recorded_at,
        progress=progress,
    )
    for note in roles.notes():
        warnings.warn(note, stacklevel=2)
    return replace(roles, prompt_start=dataset.start)


def first_gates(model: HookedModel, seeds: Sequence[int]) -> Float[Tensor, "seed layer head"]:
    """Logits of uniformly random gates; those of a seed do not depend on the other seeds."""
    adapter = adapt(model)
    gates = [
        torch.rand(
            adapter.n_layers,
            adapter.n_heads,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in seeds
    ]
    return torch.stack(gates).logit(eps=1e-6).to(adapter.device, adapter.gate_dtype)


def fit_stage(
    objective: Likelihood,
    stream: ShuffledStream,
    fitting: GateFitting,
    *,
    rates: tuple[float, float],
    settings: dict[str, Any],
    checkpoint: str | Path | None,
    title: str,
    progress: bool,
) -> Float[Tensor, "seed record layer head"]:
    """The logits of the gates at `GateFitting.recorded_at`, final gates last, after one stage.

    The objective holds the initial gates. The learning rate decays from the first of `rates` to the
    second. Other arguments are those of `train`.
    """
    theta, (first, last) = objective.gated.theta, rates
    train(
        objective.gated,
        objective,
        stream,
        Selection(lambda: {}, better=lambda new, old: True),  # keep the last gates
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
        settings={"batch_size": fitting.batch_size, "lambda": objective.lambda_, **settings},
        checkpoint=checkpoint,
        title=title,
        progress=progress,
    )
    before = objective.recorded[: len(fitting.recorded_at) - 1]
    return torch.stack([*before, theta.detach().cpu()], dim=1)


def chosen_seeds(seeds: Seeds) -> tuple[int, ...]:
    """The seeds, given as such or by their number.

    Raises:
        ValueError: there is no seed, a seed is negative or appears twice, or there are too many.
    """
    try:
        listed: Iterable[SupportsIndex] = range(index(seeds))  # type: ignore[arg-type]
    except TypeError:
        listed = iter(seeds)  # type: ignore[arg-type]
    chosen = tuple(map(index, islice(listed, MOST_SEEDS + 1)))
    if not 1 <= len(set(chosen)) == len(chosen) <= MOST_SEEDS or min(chosen) < 0:
        raise ValueError(f"expected 1 to {MOST_SEEDS:,} different seeds from 0; got {seeds!r:.80}")
    return chosen


def checked_parts(
    model: HookedModel, dataset: TargetDataset, held_out: float | TargetDataset, seed: int
) -> tuple[TargetDataset, TargetDataset]:
    """The datasets to fit on and to report on, both checked against the model."""
    if isinstance(held_out, TargetDataset):
        parts = dataset, held_out
    else:
        parts = dataset.split(held_out, seed=seed)
    for part in parts:
        check_fits(model, part)
    return parts


def check_fits(model: HookedModel, dataset: TargetDataset) -> None:
    """Check that a model can read a dataset.

    Raises:
        ValueError: the model lacks ``hook_z``, a prompt exceeds the context, a token is outside the
            vocabulary, or prompts are padded although attention is bidirectional.
    """
    adapter = adapt(model)
    adapter.layer_points("attn.hook_z")
    rows, context = dataset.rows.trimmed(causal=adapter.causal), adapter.n_ctx
    mask = torch.ones_like(rows.tokens) if rows.attention_mask is None else rows.attention_mask
    if rows.tokens.shape[1] > context:
        lengths = mask.sum(dim=1)
        longest = int(lengths.argmax())
        raise ValueError(
            f"expected prompts that fit, with their targets, into the model's context of {context} "
            f"tokens; row {longest} has {int(lengths[longest]) + 1} tokens, including "
            f"{int(rows.loss_mask[longest].sum())} of its target. Shorten it or leave it out."
        )
    check_rows(adapter, rows)
    if not adapter.causal and not mask.all():
        raise ValueError(
            "expected prompts of one length for a model with bidirectional attention, which "
            "attends to padding; got padded prompts. Fit each length separately."
        )
    _check_copies(model, dataset)


@torch.no_grad()
def _check_copies(model: HookedModel, dataset: TargetDataset) -> None:
    """Refuse hooks of the user's that hold for one batch size or one column alone."""
    adapter = adapt(model)
    batch = dataset.rows.select(slice(0, 2)).to(adapter.device)
    if batch.tokens.shape[1] > adapter.n_ctx:
        batch = batch.trimmed(causal=True)
    ones = torch.ones(2, adapter.n_layers, adapter.n_heads)
    advice = "Remove hooks that assume one batch size or position."
    try:
        final = adapter.final(batch.tokens, **batch.model_kwargs)[batch.loss_mask]
        alone = label_losses(model, final[None], batch.labels[batch.loss_mask])[0]
        copied = target_losses(model, batch, ones)[1]
    except RuntimeError as error:
        raise ValueError(f"copies of prompts cannot run in one batch: {error}. {advice}") from error
    if bool(((alone - copied).abs() > 0.01 * (1 + alone.abs())).any()):
        raise ValueError(f"copies of prompts in one batch have other losses than alone. {advice}")


def measured_roles(
    model: HookedModel,
    rows: TokenBatch,
    trajectories: Float[Tensor, "stage seed record layer head"],
    *,
    seeds: tuple[int, ...],
    lambda_: float,
    recorded_at: tuple[int, ...],
    progress: bool = False,
) -> HeadRoles:
    """Head roles from fitted gates, with losses and costs of removal on held-out prompts.

    The costs are measured because gates do not show them: where a normalisation cancels scale, a
    gate of 0.2 can be as good as a gate of 1, so that even an essential head can end with a small
    gate when pushed shut. All gate matrices are one stack.
    """
    gates = trajectories[:, :, -1]
    _, g_plus, g_minus = gates
    n_stages, n_seeds, n_layers, n_heads = gates.shape
    all_heads = torch.ones(1, n_layers, n_heads, dtype=gates.dtype)
    without_head = all_heads.repeat(n_layers * n_heads, 1, 1)
    without_head.flatten(1).fill_diagonal_(0)
    scores = role_scores(g_plus, g_minus).values()
    others = torch.stack([score < THRESHOLD for score in scores]).to(gates.dtype)
    without_role = torch.stack([others, others * g_plus])
    sizes = [n_stages * n_seeds, 1, len(without_head), without_role[..., 0, 0].numel()]
    stack = torch.cat([gates.flatten(0, 1), all_heads, without_head, without_role.flatten(0, 2)])
    log_probabilities = target_log_probabilities(
        *(model, rows, stack),
        title="removing heads",
        progress=progress,
    )
    n_labels = int(rows.loss_mask.sum())
    losses = (-log_probabilities.sum(dim=1) / n_labels).split(sizes)
    fitted_losses = losses[0].view(n_stages, n_seeds)
    dense_loss = losses[1].item()
    before = torch.stack([losses[1].expand(n_seeds), fitted_losses[1]])[:, None]
    by_row = log_probabilities.split(sizes)
    return HeadRoles(
        seeds=seeds,
        lambda_=lambda_,
        trajectories=trajectories,
        recorded_at=recorded_at,
        losses=fitted_losses.clone(),
        dense_loss=dense_loss,
        fitted=has_fitted(by_row[1] - by_row[0].view(n_stages, n_seeds, -1)[1:], n_labels, lambda_),
        removed=losses[2].view(n_layers, n_heads) - dense_loss,
        removed_together=losses[3].view(without_role.shape[:3]) - before,
    )


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

    Args:
        excess: NLL of each held-out target under G+ and G-, minus that without gates, in nats.
        n_labels: total number of target tokens.
        lambda_: coefficient of the penalty.
    """
    n_rows = excess.shape[-1]
    mean = excess.sum(dim=-1) / n_labels
    error = torch.zeros_like(mean)
    if n_rows > 1:
        error = excess.std(dim=-1) * math.sqrt(n_rows) / n_labels
    return (mean - 2 * error <= 2 * LARGEST_LOGIT * abs(lambda_)).all(dim=0)
