"""Sparsity post-training: finetune a model under its gates until few of them are left open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl import shards
from sparse_tl.arguments import AtLeastOne, NotNegative, Positive, Seed, checked
from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.streams import TokenStream
from sparse_tl.files import digest
from sparse_tl.gates import SparseTransformer
from sparse_tl.gates.attention import check_edge_cost
from sparse_tl.lens import adapt, check_gates, check_raw
from sparse_tl.training.config import Metrics, Selection, TrainingConfig, choose_trained
from sparse_tl.training.constraint import LossConstraint, TargetLoss
from sparse_tl.training.evaluation import HeldOut, PostTraining, evaluate_held_out
from sparse_tl.training.loop import train
from sparse_tl.training.memory import out_of_memory_explained
from sparse_tl.training.objectives import SparsityObjective
from sparse_tl.training.reference import as_dense, reference_of

EVALUATIONS = 40
"""Validation evaluations of a run; the learning rate warms up until the first of them, and falls
from there on, as the gates' noise does."""
LEAST_ROOM = 1e-4
"""Nats; what lambda takes for the least distance of an absolute target from the dense loss."""


@checked
def post_train(
    sparse: SparseTransformer,
    stream: TokenStream,
    *,
    target_loss: float | str,
    validation: TokenBatch,
    steps: AtLeastOne = 2000,
    learning_rate: Positive | Mapping[str, Positive] = 7e-4,
    edge_cost: Float[Tensor, "*#edge"] | None = None,
    head_cost: NotNegative = 0.0,
    seed: Seed = 0,
    precision: Literal["float32", "bf16"] = "float32",
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> PostTraining:
    """Finetune weights and gates until as few attention edges as possible are open.

    Solves ``min_theta max_lambda  log(1 + size) + sum_g lambda_g (loss_g - target)``, with the
    expected open edges per example, each at its cost, as the size; where MLPs have gates too, every
    expected open MLP output, of one layer at one position, adds 1 to it. Every group of rows that
    the batches name (`TokenBatch.groups`) has to meet the target by itself. On return `sparse`
    holds the best feasible weights: fewest active edges among validation evaluations that meet it,
    or, with gates on MLPs, the least active edges at their costs and active MLP outputs together.

    Args:
        sparse: wrapped model, trained in place: its weights and gates, or, if it has low-rank
            adapters (`add_lora`), the adapters and gates. The dense model is then the model
            without adapters. Weights in bfloat16 are trained through float32 copies.
        stream: training batches; any positions may carry the loss.
        target_loss: loss in nats: absolute (``0.01``), or above the frozen dense model's on the
            same rows (``"+0.05"``).
        validation: examples for the loss constraint and model selection; report on others.
        steps: number of optimizer steps.
        learning_rate: peak learning rate; or rates by parameter, with all other parameters frozen:
            ``"gates"`` (on attention edges and MLPs), ``"qk"`` (weights of queries and keys;
            of latent attention, also what keys share with values), ``"lora"`` (adapters),
            ``"all"``, or patterns of parameter names. A parameter takes the first rate that
            matches it.
        edge_cost: cost of an open attention edge, relative to 1 for an open MLP output;
            broadcastable to ``[layer, head, query, key]``; 1 by default. Reported counts of
            attention edges are never weighted.
        head_cost: cost of a head that is open anywhere in a batch, relative to 1 for an attention
            edge; above 0, rarely used heads close permanently.
        seed: random seed for gate noise.
        precision: "bf16" runs the forward pass under autocast, and keeps the copy of the dense
            model, if a relative target needs one, in bfloat16; its loss is that of the weights
            as they are.
        checkpoint: folder for checkpoints; a run interrupted there is resumed.
        progress: whether to show a progress bar.

    Returns:
        The outcome; its `verdict` says whether the target was met.

    Raises:
        ValueError: the target is below the dense model's own validation loss, a parameter name is
            unknown, a cost is not valid, or the checkpoint is of another run or other data.
        NonFiniteLossError: the loss or gradient became NaN or infinite.
        MemoryError: there is not enough memory; says where it goes and what needs less.
        KeyboardInterrupt: after Ctrl-C, SIGTERM or SIGHUP, once the checkpoint is written.

    Reference: arXiv 2512.05865, section 3; deviations: the size counts by its logarithm, lambda is
    moved by a PI controller, and the violation is that of validation rows, deterministic gates.
    """
    target = TargetLoss.parse(target_loss)
    rates = learning_rate if isinstance(learning_rate, Mapping) else {"all": learning_rate}
    if not rates:
        raise ValueError("expected rates above 0 for some parameters; got none")
    peak = max(rates.values())
    trained = choose_trained(sparse, {name: rate / peak for name, rate in rates.items()})
    if edge_cost is not None:
        _check_costs(sparse, edge_cost)
    every = max(1, steps // EVALUATIONS)
    config = TrainingConfig(
        steps=steps,
        learning_rate=peak,
        warmup=every,
        decay=1.0,
        accumulate=getattr(stream, "accumulate", 1),
        precision=precision,
        seed=seed,
        evaluate_every=every,
    )
    check_gates(adapt(sparse))
    check_raw(sparse.model)
    with out_of_memory_explained(sparse, stream, trained, precision):
        dense = _dense(sparse, validation, target)
        before, paired = _by_group(dense), target.reference == "dense"
        room = torch.full_like(before, target.nats) if paired else target.nats - before
        objective = SparsityObjective(
            sparse,
            reference_of(sparse, trained, precision) if paired else None,
            room.clamp(min=LEAST_ROOM),
            LossConstraint(len(before)),
            edge_cost,
            head_cost,
        )
        selection = _selection(sparse, objective, validation, before, room)
        state = train(
            sparse,
            objective,
            stream,
            selection,
            config,
            trained=trained,
            settings={
                "target": str(target),
                "validation": validation.digest(),
                "gates": repr(sparse.gates.distribution),
                "edge_cost": None if edge_cost is None else digest({"edge_cost": edge_cost}),
                "head_cost": head_cost,
                "sharded_precision": shards.precision_of(adapt(sparse).core) or "float32",
            },
            checkpoint=checkpoint,
            title="post-training",
            progress=progress,
        )
        after = evaluate_held_out(sparse, validation, edge_cost=edge_cost)
    return PostTraining(
        feasible=_feasible(state.best),
        target=target,
        dense=dense,
        sparse=after,
        best_step=state.best["step"],
        history=pd.DataFrame(state.history),
    )


def _dense(sparse: SparseTransformer, validation: TokenBatch, target: TargetLoss) -> HeldOut:
    """The dense model's measurements, which have to leave room for the target."""
    with as_dense(sparse):
        measured = evaluate_held_out(sparse, validation)
    groups = set(range(max(measured.group_losses) + 1))
    if missing := groups - set(measured.group_losses):
        raise ValueError(
            f"expected validation rows of every group up to {max(groups)}; no label has group "
            f"{sorted(missing)[:5]}"
        )
    worst = max(measured.group_losses.values())
    if target.reference == "absolute" and target.nats < worst:
        raise ValueError(
            "expected a target loss that the model can reach; the dense model's validation loss "
            f"is {worst:.5f} nats, the target {target}. Give a larger one, or an increase such as "
            f'"+{max(measured.loss * 0.02, 0.01):.2g}".'
        )
    return replace(measured, active_mlps=None, possible_mlps=None, active_size=None)


def _selection(
    sparse: SparseTransformer,
    objective: SparsityObjective,
    validation: TokenBatch,
    before: Float[Tensor, " group"],
    room: Float[Tensor, " group"],
) -> Selection:
    """Evaluations, of which the objective is told, and which of them is best."""

    def evaluate() -> Metrics:
        measured = evaluate_held_out(sparse, validation, edge_cost=objective.edge_cost)
        increase = _by_group(measured) - before
        objective.validated(increase)
        return {**measured.numbers, "violation": (increase - room).max().item()}

    def better(new: Metrics, old: Metrics) -> bool:
        if old["step"] == 0:
            return True  # the model as it came meets most targets, and is what nobody asks for
        if _feasible(new) != _feasible(old):
            return _feasible(new)
        size = "active_attention_edges" if sparse.mlp_gates is None else "active_size"
        decisive = size if _feasible(new) else "violation"
        return new[decisive] < old[decisive]

    return Selection(evaluate, better)


def _feasible(metrics: Metrics) -> bool:
    return metrics["violation"] <= 0


def _by_group(measured: HeldOut) -> Float[Tensor, " group"]:
    losses = [loss for _, loss in sorted(measured.group_losses.items())]
    return torch.tensor(losses, dtype=torch.float64)


def _check_costs(sparse: SparseTransformer, edge_cost: Float[Tensor, "*#edge"]) -> None:
    check_edge_cost(edge_cost, (*sparse.gates.bias.shape, None, None))
    if not bool((edge_cost.isfinite() & (edge_cost >= 0)).all()) or not bool(edge_cost.any()):
        raise ValueError("expected edge_cost of at least 0 everywhere and above 0 somewhere")
