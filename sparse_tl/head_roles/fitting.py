"""Causal head gating: three fits of the same gates, without pressure, pushed open, pushed shut.

Every seed is one matrix of a stack that is fitted on the same batches, in the same passes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.data import ShuffledStream
from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.targets import TargetDataset
from sparse_tl.head_roles.checks import check_fits
from sparse_tl.head_roles.held_out import measured_roles
from sparse_tl.head_roles.likelihood import GatedHeads, Likelihood
from sparse_tl.head_roles.roles import HeadRoles
from sparse_tl.lens import HookedModel, adapt
from sparse_tl.training import Selection, TrainingConfig, train

FIRST_RATES, SECOND_RATES = (0.1, 0.01), (0.5, 0.1)
"""Learning rates at the start and the end of G0, and of G+ and G-."""

Seeds = SupportsIndex | Iterable[SupportsIndex]


@dataclass(frozen=True)
class GateFitting:
    """How gates are fitted.

    Args:
        lambda_: of the penalty, in nats per unit of the mean logit.
        updates: optimizer steps of each stage.
        batch_size: prompts per step.
        record_every: steps between recorded gates.
        checkpoint_every: steps between checkpoints.
        accumulate: pieces of a batch that pass one after the other, to save memory.
        seed: of the split and of the batches.
    """

    lambda_: float = 0.1
    updates: int = 500
    batch_size: int = 64
    record_every: int = 10
    checkpoint_every: int = 50
    accumulate: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.lambda_):
            raise ValueError(f"expected a finite lambda_; got {self.lambda_}")
        for name in ("updates", "batch_size", "record_every", "checkpoint_every", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of at least 1; got {getattr(self, name)}")

    @property
    def recorded_at(self) -> tuple[int, ...]:
        """Updates before each recorded gate, 0 and all among them."""
        return (*range(0, self.updates, self.record_every), self.updates)

    def stream(self, rows: TokenBatch) -> ShuffledStream:
        """The batches of a fit."""
        return ShuffledStream(rows, min(self.batch_size, len(rows)), self.seed)


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
    """Fit one gate per head three times and sort the heads by what the gates say.

    G0 minimises the mean NLL of the targets; G+ and G- start from it and add a penalty that pushes
    gates open (lambda > 0) and shut (lambda < 0). Facilitation is G-, interference 1 - G+, and
    irrelevance G+ (1 - G-). Seeds that did not fit, and irrelevant heads that matter when they are
    gone, give a warning; `HeadRoles` says when.

    Args:
        model: dense or sparse; its weights are not changed.
        dataset: prompts and their targets.
        seeds: of the first gates: so many, from 0 on, or the ones given. Each seed's gates are
            those of a fit by itself.
        held_out: share of the dataset to report on, or other prompts.
        checkpoint: a folder; found there, an interrupted fit goes on.
        progress: whether to show it.
        **settings: fields of `GateFitting`; a negative ``lambda_`` swaps G+ and G-.

    Raises:
        ValueError: prompts that do not fit the model, or settings out of range; before any work.
        KeyboardInterrupt: after Ctrl-C, once the state is saved.

    Reference: arXiv 2505.13737. Means stand where the paper has sums, so that ``lambda_`` means the
    same for every model, batch and target.
    """
    fitting = GateFitting(**settings)
    if fitting.lambda_ == 0:
        raise ValueError("expected a lambda_ other than 0: without a penalty G+ and G- are G0")
    chosen = chosen_seeds(seeds)
    training, reported = checked_parts(model, dataset, held_out, fitting.seed)
    theta = first_gates(model, chosen)
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
            checkpoint=None if checkpoint is None else Path(checkpoint) / name,
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
    )
    for note in roles.notes():
        warnings.warn(note, stacklevel=2)
    return roles


def first_gates(model: HookedModel, seeds: Sequence[int]) -> Float[Tensor, "seed layer head"]:
    """Logits of uniform gates; those of a seed do not depend on the others."""
    adapter = adapt(model)
    drawn = [
        torch.rand(
            adapter.n_layers,
            adapter.n_heads,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in seeds
    ]
    return torch.stack(drawn).logit(eps=1e-6).to(adapter.device, adapter.gate_dtype)


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
    """One stage: the gates' logits at `GateFitting.recorded_at`, those after the last update last.

    The objective has the gates to begin from; the learning rate falls from the first of the rates
    to the second. All else is as of `train`.
    """
    theta, (first, last) = objective.gated.theta, rates
    train(
        objective.gated,
        objective,
        stream,
        Selection(lambda: {}, better=lambda new, old: True),  # the last gates are the result
        TrainingConfig(
            steps=fitting.updates,
            learning_rate=first,
            final_rate=last / first,
            warmup=0,
            decay=1.0,
            schedule="linear",
            betas=(0.9, 0.999),
            clip=None,  # one norm over all seeds would tie them together
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
    """The seeds by number, from how many or from which.

    Raises:
        ValueError: none, or one twice.
    """
    try:
        chosen = tuple(range(index(seeds)))  # type: ignore[arg-type]
    except TypeError:
        chosen = tuple(map(index, seeds))  # type: ignore[arg-type]
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"expected at least one seed, each once; got {seeds}")
    return chosen


def checked_parts(
    model: HookedModel, dataset: TargetDataset, held_out: float | TargetDataset, seed: int
) -> tuple[TargetDataset, TargetDataset]:
    """What to fit on and what to report on, both readable by the model."""
    if isinstance(held_out, TargetDataset):
        parts = dataset, held_out
    else:
        parts = dataset.split(held_out, seed=seed)
    for part in parts:
        check_fits(model, part)
    return parts
