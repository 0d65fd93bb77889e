"""Causal head gating: three fits of the same gates, without pressure, pushed open, pushed shut.

1. Check the model, the dataset and the settings; split the dataset.
2. G0: from uniform gates, no penalty.
3. G+ and G-: from copies of G0, pushed open and pushed shut.
4. Measure all gates, and the model without them, on the held-out part.

Every seed is one matrix of a stack that is fitted on the same batches, in the same passes.

Reference: arXiv 2505.13737.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
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
from sparse_tl.files import digest
from sparse_tl.head_roles.likelihood import target_log_probabilities
from sparse_tl.head_roles.objectives import GatedHeads, Likelihood
from sparse_tl.head_roles.roles import Fit, HeadRoles
from sparse_tl.lens import HookedModel, attention_shape, embedding_matrix, layer_points
from sparse_tl.training import Selection, Trained, TrainingConfig, train

FIRST_RATES, SECOND_RATES = (0.1, 0.01), (0.5, 0.1)
"""Learning rates at the start and the end of G0, and of G+ and G-."""


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


def fit_head_gates(
    model: HookedModel,
    dataset: TargetDataset,
    *,
    seeds: SupportsIndex | Iterable[SupportsIndex] = 10,
    validation: float | TargetDataset = 0.1,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    **settings: Any,
) -> HeadRoles:
    """Fit one gate per head three times and sort the heads by what the gates say.

    G0 minimises the mean NLL of the targets; G+ and G- start from it and add a penalty that pushes
    gates open (lambda > 0) and shut (lambda < 0). Facilitation is G-, interference 1 - G+, and
    irrelevance G+ (1 - G-).

    Args:
        model: dense or sparse; its weights are not changed.
        dataset: prompts and their targets.
        seeds: of the first gates: so many, from 0 on, or the ones given. Each seed's gates are
            those of a fit by itself.
        validation: share of the dataset that is held out to report on, or other prompts.
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
    training, held_out = split_rows(dataset, validation, fitting.seed)
    for part in (training, held_out):
        check_fits(model, part)
    stream = shuffled(training, fitting)
    said = {"dataset": row_digest(training.rows), "held_out": row_digest(held_out.rows)}
    fits: list[Fit] = []
    for name, lambda_ in {
        "g0": 0.0,
        "g_plus": fitting.lambda_,
        "g_minus": -fitting.lambda_,
    }.items():
        fits.append(
            fit_stage(
                model,
                fits[0].theta if fits else first_gates(model, chosen),
                lambda gated, sign=lambda_: Likelihood(gated, sign, fitting.record_every),
                stream,
                held_out.rows,
                fitting,
                rates=SECOND_RATES if fits else FIRST_RATES,
                settings={"stage": name, "lambda": lambda_, "seeds": list(chosen), **said},
                checkpoint=None if checkpoint is None else Path(checkpoint) / name,
                title=f"head gates {name}",
                progress=progress,
            )
        )
    ungated = torch.ones_like(fits[0].theta[:1])
    dense = token_loss(model, held_out.rows, ungated)
    return HeadRoles.of(chosen, fitting.lambda_, fits, dense.item())


def first_gates(model: HookedModel, seeds: Sequence[int]) -> Float[Tensor, "seed layer head"]:
    """Logits of uniform gates; those of a seed do not depend on the others."""
    shape = attention_shape(model)
    drawn = [
        torch.rand(
            shape.n_layers,
            shape.n_heads,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in seeds
    ]
    weight = embedding_matrix(model)
    precise = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return torch.stack(drawn).logit(eps=1e-6).to(weight.device, precise)


def check_fits(model: HookedModel, dataset: TargetDataset) -> None:
    """Make sure that a model can read a dataset.

    Raises:
        ValueError: a prompt longer than the context, a token that the model lacks, or a model
            without ``hook_z``.
    """
    layer_points(model, "attn.hook_z")
    rows, context = dataset.rows.trimmed(), model.cfg.n_ctx
    if rows.tokens.shape[1] > context:
        mask = torch.ones_like(rows.tokens) if rows.attention_mask is None else rows.attention_mask
        lengths = mask.sum(dim=1)
        longest = int(lengths.argmax())
        raise ValueError(
            f"expected prompts that end, with their targets, within the model's context of "
            f"{context} tokens; row {longest} has {int(lengths[longest]) + 1} tokens, "
            f"{int(rows.loss_mask[longest].sum())} of them its target. Shorten it or leave it out."
        )
    checked = {
        "tokens": (rows.tokens, model.cfg.d_vocab),
        "targets": (rows.labels[rows.loss_mask], model.cfg.d_vocab_out),
    }
    for name, (found, known) in checked.items():
        low, high = int(found.min()), int(found.max())
        if low < 0 or high >= known:
            raise ValueError(
                f"expected {name} of the model's own vocabulary, 0..{known - 1}; got "
                f"{low if low < 0 else high}. Was the dataset made with another tokenizer?"
            )


def fit_stage(
    model: HookedModel,
    theta: Float[Tensor, "seed layer head"],
    objective: Callable[[GatedHeads], Likelihood],
    stream: ShuffledStream,
    held_out: TokenBatch,
    fitting: GateFitting,
    *,
    rates: tuple[float, float],
    settings: dict[str, Any],
    checkpoint: Path | None,
    title: str,
    progress: bool,
) -> Fit:
    """One stage: the gates after the last update, and those on the way."""
    gated = GatedHeads(model, theta)

    def evaluate() -> dict[str, float]:
        loss = token_loss(model, held_out, gated.theta.detach().sigmoid())
        return {"held_out_loss": loss.mean().item()}

    first, last = rates
    minimised = objective(gated)
    train(
        gated,
        minimised,
        stream,
        Selection(evaluate, better=lambda new, old: True),  # the last gates are the result
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
        trained={"theta": Trained(gated.theta, 1.0)},
        settings={"batch_size": fitting.batch_size, **settings},
        checkpoint=checkpoint,
        title=title,
        progress=progress,
    )
    fitted, recorded = gated.theta.detach(), minimised.recorded
    recorded_at = [fitting.record_every * place for place in range(len(recorded))]
    if recorded_at[-1] < fitting.updates:
        recorded, recorded_at = [*recorded, fitted.cpu()], [*recorded_at, fitting.updates]
    losses = token_loss(model, held_out, fitted.sigmoid())
    return Fit(fitted, torch.stack(recorded, dim=1), tuple(recorded_at), losses)


def token_loss(
    model: HookedModel, rows: TokenBatch, gates: Float[Tensor, "stack layer head"]
) -> Float[Tensor, " stack"]:
    """Mean NLL of a target token in nats."""
    return -target_log_probabilities(model, rows, gates).sum(dim=1) / int(rows.loss_mask.sum())


def split_rows(
    dataset: TargetDataset, validation: float | TargetDataset, seed: int
) -> tuple[TargetDataset, TargetDataset]:
    if isinstance(validation, TargetDataset):
        return dataset, validation
    return dataset.split(validation, seed=seed)


def shuffled(dataset: TargetDataset, fitting: GateFitting) -> ShuffledStream:
    return ShuffledStream(dataset.rows, min(fitting.batch_size, len(dataset)), fitting.seed)


def chosen_seeds(seeds: SupportsIndex | Iterable[SupportsIndex]) -> tuple[int, ...]:
    try:
        chosen = tuple(range(index(seeds)))  # type: ignore[arg-type]
    except TypeError:
        chosen = tuple(map(index, seeds))  # type: ignore[arg-type]
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"expected at least one seed, each once; got {seeds}")
    return chosen


def row_digest(rows: TokenBatch) -> str:
    tensors = {"tokens": rows.tokens, "labels": rows.labels, "loss_mask": rows.loss_mask}
    if rows.attention_mask is not None:
        tensors["attention_mask"] = rows.attention_mask
    return digest(tensors)
