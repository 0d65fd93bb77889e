"""Sparsity post-training: finetune a model and its gates until few gates are open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.backend import adapt, check_gates, check_raw
from sparse_tl.backend.core.devices import precision_of
from sparse_tl.calls.arguments import AtLeastOne, NotNegative, Positive, Seed, checked
from sparse_tl.data.batches import TokenBatch
from sparse_tl.data.streams import MixedStream, TokenStream
from sparse_tl.gates import SparseTransformer
from sparse_tl.gates.sparse.computed_gates import check_edge_cost
from sparse_tl.storage.files import digest
from sparse_tl.training.constraint import (
    GAP_LEAD,
    OF_EDGES,
    LossConstraint,
    TargetEdges,
    TargetLoss,
    parse_target,
)
from sparse_tl.training.evaluation import HeldOut, evaluate_held_out
from sparse_tl.training.loop import (
    Metrics,
    Precision,
    Selection,
    TrainingConfig,
    choose_trained,
    in_precision,
    train,
)
from sparse_tl.training.memory import out_of_memory_explained
from sparse_tl.training.objectives import DISTILLED, SparsityObjective
from sparse_tl.training.outcome import DenseAndSparse, PostTraining
from sparse_tl.training.ranks import from_first
from sparse_tl.training.reference import DensePredictions, as_dense, reference_of

EVALUATIONS = 40
"""Number of validation evaluations in a run."""
WARM_UP = 0.1
"""Share of the run over which the learning rate warms up: four evaluations, so that lambda follows
the loss before edges close quickly. The rate then falls, as the gates' noise does."""
TARGET_LOSS = "kl+0.05"
"""Default target for every group: nats of divergence per label."""
LEARNING_RATE = 7e-4
"""Peak learning rate of weights and low-rank adapters."""
GATE_LEARNING_RATE = 3e-3
"""Peak learning rate of gates: they have few parameters, which move further than weights do."""
LEAST_BUDGET = 1e-4
"""Smallest loss budget, in nats, that lambda is moved by; the exact one decides feasibility."""


@checked
def post_train(
    sparse: SparseTransformer,
    stream: TokenStream | Mapping[str, TokenStream],
    *,
    validation: TokenBatch | Mapping[str, TokenBatch],
    target_loss: float | str | None = None,
    target_edges: float | str | None = None,
    held_out: Mapping[str, TokenBatch] | None = None,
    steps: AtLeastOne = 2000,
    learning_rate: Positive | Mapping[str, Positive] = LEARNING_RATE,
    gate_learning_rate: Positive = GATE_LEARNING_RATE,
    edge_cost: Float[Tensor, "*#edge"] | None = None,
    head_cost: NotNegative = 0.0,
    seed: Seed = 0,
    precision: Precision = "float32",
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> PostTraining:
    """Finetune weights and gates until as few attention edges as possible are open.

    Solves ``min_theta max_lambda  mean_g log(1 + size_g) + mean_g lambda_g (loss_g - target)``,
    where the size is the expected cost of the open edges per example. If MLPs have gates too, every
    MLP output, of one layer at one position, adds the probability that it is open. Each group ``g``
    of rows, such as a kind of text or a task, has a size of its own and must meet the target on its
    own. On return, `sparse` holds the best feasible weights: among the validation evaluations that
    meet the target, those with the smallest ``mean_g log(1 + size_g)`` of active edges and MLP
    outputs.

    With `target_edges`, the number of edges is given and the divergence is what is minimised: one
    lambda for all groups steers the edges along a geometric line to the target, at six tenths of
    the run, and holds them there. The best feasible weights are then, among the evaluations with at
    most so many edges, those with the smallest mean divergence over groups.

    Args:
        sparse: wrapped model, trained in place: its weights and gates, or, if it has low-rank
            adapters (`add_lora`), the adapters and gates. The dense model is then the model
            without adapters. Weights in bfloat16 are trained through float32 copies.
        stream: training batches, in which any positions may carry the loss; or one stream for each
            group, by name, which become a `MixedStream`.
        validation: rows for the loss constraint and model selection, or those of each group, by
            name, in the same order as the streams. Report results on other rows.
        target_loss: in nats per label: the loss (``0.01``), its increase over the frozen dense
            model's on the same rows (``"+0.05"``), or the divergence ``KL(dense || sparse)``
            (``"kl+0.05"``, the default), which fitting the training text does not lower.
        target_edges: instead of a target loss, active attention edges per token (``300``), or how
            many times fewer than in the dense model (``"100x"``): the mean over groups of edges per
            token, summed over layers and heads, on validation rows under deterministic gates.
        held_out: rows used neither for training nor for selection, by name, measured before and
            after training: further rows of a group, under its name, or rows of another text.
        steps: number of optimizer steps.
        learning_rate: peak learning rate of all weights, or of the adapters; or rates by
            parameter, which freeze all other parameters but the gates: ``"qk"`` (weights of queries
            and keys; in latent attention, including those that keys share with values), ``"lora"``
            (adapters), ``"gates"``, ``"all"``, or patterns of parameter names. A parameter takes
            the first rate that matches it.
        gate_learning_rate: peak learning rate of the gates on attention edges and MLPs, unless
            `learning_rate` names them.
        edge_cost: cost of an open attention edge, relative to 1 for an open MLP output;
            broadcastable to ``[layer, head, query, key]``; 1 by default. Reported counts of
            attention edges are never weighted.
        head_cost: cost of a head that is open anywhere in a batch, relative to 1 for an attention
            edge; above 0, rarely used heads close permanently.
        seed: random seed for gate noise.
        precision: "bf16" runs all forward passes under autocast, including those of evaluations,
            and keeps the copy of the dense model in bfloat16, if the target needs one.
        checkpoint: folder for checkpoints; a run interrupted there is resumed.
        progress: whether to show a progress bar.

    Returns:
        The outcome; its `verdict` says whether the target was met.

    Raises:
        ValueError: the target is below the dense model's own validation loss or above its number of
            edges, both targets are given, a parameter name is unknown, a cost is invalid, the
            stream and the validation rows have different groups, or the checkpoint belongs to
            another run or other data.
        NonFiniteLossError: the loss or gradient became NaN or infinite.
        MemoryError: out of memory; the message says how to use less.
        KeyboardInterrupt: after Ctrl-C, SIGTERM or SIGHUP, once the checkpoint is written.

    Reference: arXiv 2512.05865, section 3. Deviations: the logarithm of the size is minimised, a PI
    controller moves lambda, and the violation is measured on validation rows under deterministic
    gates.
    """
    target = parse_target(target_loss, target_edges, TARGET_LOSS)
    stream = _mixed(stream, validation)
    rates = _rates(learning_rate, gate_learning_rate)
    peak = max(rates.values())
    trained = choose_trained(sparse, {name: rate / peak for name, rate in rates.items()})
    if edge_cost is not None:
        _check_costs(sparse, edge_cost)
    every = max(1, steps // EVALUATIONS)
    config = TrainingConfig(
        steps=steps,
        learning_rate=peak,
        warmup=max(1, round(WARM_UP * steps)),
        decay=1.0,
        accumulate=getattr(stream, "accumulate", 1),
        precision=precision,
        seed=seed,
        evaluate_every=every,
    )
    check_gates(adapt(sparse))
    check_raw(sparse.model)
    with out_of_memory_explained(sparse, stream):
        dense = None if target.of == "loss" else reference_of(sparse, trained, precision)
        # Separate from the objective's, which keep training rows in the run's checkpoints.
        by_model = dense is not None and target.of == "divergence"
        predicted = DensePredictions(dense) if by_model else None
        measuring = Validation(
            sparse, validation, held_out or {}, target, edge_cost, precision, predicted
        )
        objective = SparsityObjective(
            sparse,
            dense,
            measuring.loss_budget.clamp(min=LEAST_BUDGET),
            LossConstraint(
                len(measuring.loss_budget),
                evaluated_every=every,
                **({} if measuring.target_edges is None else OF_EDGES),
            ),
            edge_cost,
            head_cost,
            distilled=1.0 if target.of == "divergence" else DISTILLED,
            lead=GAP_LEAD if target.of == "divergence" else 0,
            target_edges=measuring.target_edges,
        )
        state = train(
            sparse,
            objective,
            stream,
            measuring.selection(objective),
            config,
            trained=trained,
            settings={
                "target": str(target),
                "validation": measuring.rows.digest(),
                "gates": repr(sparse.gates.distribution),
                "edge_cost": None if edge_cost is None else digest({"edge_cost": edge_cost}),
                "head_cost": head_cost,
                "sharded_precision": precision_of(adapt(sparse).core) or "float32",
            },
            checkpoint=checkpoint,
            title="post-training",
            progress=progress,
        )
        groups, others = measuring.compared()
        return PostTraining(
            feasible=is_feasible(state.best),
            target=target,
            dense=measuring.dense,
            sparse=measuring.measured(),
            best_step=state.best["step"],
            history=pd.DataFrame(state.history),
            groups=groups,
            held_out=others,
        )


def _mixed(
    stream: TokenStream | Mapping[str, TokenStream], validation: TokenBatch | Mapping[str, Any]
) -> TokenStream:
    """Combine the groups' streams into one, in the order of the validation rows."""
    if not isinstance(stream, Mapping):
        return stream
    named = list(validation) if isinstance(validation, Mapping) else []
    if list(stream) != named:
        raise ValueError(
            f"the streams are of the groups {list(stream)}, and the validation rows are "
            f"{named or 'without group names'}; give both for the same groups, in the same order"
        )
    return MixedStream(stream)


def _rates(
    learning_rate: float | Mapping[str, float], gate_learning_rate: float
) -> dict[str, float]:
    """Peak learning rates by parameter name or pattern."""
    if not isinstance(learning_rate, Mapping):
        return {"gates": gate_learning_rate, "all": learning_rate}
    return {**learning_rate, "gates": learning_rate.get("gates", gate_learning_rate)}


def _check_costs(sparse: SparseTransformer, edge_cost: Float[Tensor, "*#edge"]) -> None:
    check_edge_cost(edge_cost, (*sparse.gates.bias.shape, None, None))
    if not bool((edge_cost.isfinite() & (edge_cost >= 0)).all()) or not bool(edge_cost.any()):
        raise ValueError("edge_cost has to be at least 0 everywhere and above 0 somewhere")


class Validation:
    """Validation rows, each group of which must meet the target, and held-out rows.

    The constructor measures the dense model, so it must be called before training.

    Args:
        sparse: the model before training.
        rows: validation rows, or those of every group by name.
        held_out: rows that are only measured, by name.
        target: the target of every group, or that of the mean over groups of edges per token.
        edge_cost: cost per attention edge, as in `evaluate_held_out`.
        precision: precision of the run, in which both models are measured.
        predictions: the dense model's predictions, if the target is a divergence.

    Raises:
        ValueError: a group has no label, or the target is below the dense model's own loss or above
            its number of edges.
    """

    def __init__(
        self,
        sparse: SparseTransformer,
        rows: TokenBatch | Mapping[str, TokenBatch],
        held_out: Mapping[str, TokenBatch],
        target: TargetLoss | TargetEdges,
        edge_cost: Float[Tensor, "*#edge"] | None,
        precision: Precision,
        predictions: DensePredictions | None,
    ) -> None:
        self.sparse, self.target, self.edge_cost = sparse, target, edge_cost
        self.precision: Precision = precision
        self.groups = rows if isinstance(rows, Mapping) else {}
        self.rows = TokenBatch.joined(list(rows.values())) if isinstance(rows, Mapping) else rows
        self.held_out, self.predictions = held_out, predictions
        with as_dense(sparse):
            self.dense = self._dense(self.rows)
            _check_groups(self.dense)
            self._before = [
                {name: self._dense(rows) for name, rows in by_name.items()}
                for by_name in (self.groups, held_out)
            ]
        self.target_edges: float | None = None
        """The target in edges per token, if it is one of edges."""
        if isinstance(target, TargetEdges):
            most = self.dense.edges_per_token
            self.target_edges = target.per_token(most)
            if self.target_edges > most:
                raise ValueError(
                    f"a target of {target} is above the dense model's {most:,.1f} edges per token"
                )
        elif target.of == "loss" and target.nats < (worst := max(self.dense.group_losses.values())):
            raise ValueError(
                f"the dense model's own validation loss is {worst:.5f} nats, above the target of "
                f"{target}. Give a larger one, or an increase such as "
                f'"+{max(self.dense.loss * 0.02, 0.01):.2g}".'
            )

    @property
    def loss_budget(self) -> Float[Tensor, " group"]:
        """The largest gap that the target allows each group, in nats."""
        losses = self.dense.group_losses
        return _by_group({group: self.target.budget(loss) for group, loss in losses.items()})

    def measured(self) -> HeldOut:
        """Measurements of the current sparse model on all validation rows."""
        return self._sparse(self.rows)

    def gaps(self, measured: HeldOut) -> Float[Tensor, " group"]:
        """Every group's gap to the dense model in nats: the divergence, or the increase in loss."""
        if self.target.of == "divergence":
            return _by_group(measured.group_divergences)
        return _by_group(measured.group_losses) - _by_group(self.dense.group_losses)

    def compared(self) -> tuple[dict[str, DenseAndSparse], dict[str, DenseAndSparse]]:
        """Measurements of both models on the rows of every group, and on held-out rows."""
        groups, held_out = (
            {name: DenseAndSparse(dense[name], self._sparse(rows)) for name, rows in of.items()}
            for of, dense in zip((self.groups, self.held_out), self._before, strict=True)
        )
        return groups, held_out

    def selection(self, objective: SparsityObjective) -> Selection:
        """The model selection of a run; each evaluation also records the gaps in the objective."""

        def evaluate() -> Metrics:
            measured = self.measured()
            gaps, edges, target = self.gaps(measured), measured.edges_per_token, self.target_edges
            objective.record(gaps, edges)
            by_group = {f"gap_{n}": x for n, x in zip(self.groups, gaps.tolist(), strict=False)}
            over = (gaps - self.loss_budget).max().item() if target is None else edges - target
            found = {**measured.numbers, **by_group, "log_size": measured.log_size}
            return {**found, "gap": gaps.mean().item(), "violation": over}

        def better(new: Metrics, old: Metrics) -> bool:
            if old["step"] == 0:
                return True  # never prefer step 0: it meets most targets but is not sparse
            if is_feasible(new) != is_feasible(old):
                return is_feasible(new)
            minimised = "log_size" if self.target_edges is None else "gap"
            decisive = minimised if is_feasible(new) else "violation"
            return new[decisive] < old[decisive]

        return Selection(evaluate, better)

    def _dense(self, rows: TokenBatch) -> HeldOut:
        measured = self._evaluated(rows)
        return replace(measured, active_mlps=None, possible_mlps=None, active_size=None)

    def _sparse(self, rows: TokenBatch) -> HeldOut:
        return self._evaluated(rows, edge_cost=self.edge_cost, dense=self.predictions)

    def _evaluated(self, rows: TokenBatch, **how: Any) -> HeldOut:
        with in_precision(self.precision, adapt(self.sparse).device):
            return from_first(evaluate_held_out(self.sparse, rows, **how))


def is_feasible(metrics: Metrics) -> bool:
    """Whether an evaluation meets the target, that of a loss in every group."""
    return metrics["violation"] <= 0


def _check_groups(measured: HeldOut) -> None:
    groups = set(range(max(measured.group_losses) + 1))
    if missing := groups - set(measured.group_losses):
        raise ValueError(
            f"no label of the validation rows is of the groups {sorted(missing)[:5]}, of "
            f"{max(groups) + 1} groups"
        )


def _by_group(values: Mapping[int, float]) -> Float[Tensor, " group"]:
    return torch.tensor([value for _, value in sorted(values.items())], dtype=torch.float64)
