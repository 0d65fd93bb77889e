"""Validation in post-training: the gap of each group of rows, and which weights are best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import adapt
from sparse_tl.training.config import Metrics, Precision, Selection, in_precision
from sparse_tl.training.constraint import TargetEdges, TargetLoss
from sparse_tl.training.evaluation import HeldOut, evaluate_held_out
from sparse_tl.training.objectives import SparsityObjective
from sparse_tl.training.outcome import DenseAndSparse
from sparse_tl.training.predictions import DensePredictions
from sparse_tl.training.reference import as_dense


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
    ) -> None:
        self.sparse, self.target, self.edge_cost = sparse, target, edge_cost
        self.precision: Precision = precision
        self.groups = rows if isinstance(rows, Mapping) else {}
        self.rows = TokenBatch.joined(list(rows.values())) if isinstance(rows, Mapping) else rows
        self.held_out = held_out
        self.predictions: DensePredictions | None = None
        """The dense model's predictions, if the target is a divergence."""
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
                    f"expected a target of at most the dense model's {most:,.1f} edges per token; "
                    f"got {target}"
                )
        elif target.of == "loss" and target.nats < (worst := max(self.dense.group_losses.values())):
            raise ValueError(
                "expected a target loss that the model can reach; the dense model's own validation "
                f"loss is {worst:.5f} nats, above the target of {target}. Give a larger one, or an "
                f'increase such as "+{max(self.dense.loss * 0.02, 0.01):.2g}".'
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
            return evaluate_held_out(self.sparse, rows, **how)


def is_feasible(metrics: Metrics) -> bool:
    """Whether an evaluation meets the target, that of a loss in every group."""
    return metrics["violation"] <= 0


def _check_groups(measured: HeldOut) -> None:
    groups = set(range(max(measured.group_losses) + 1))
    if missing := groups - set(measured.group_losses):
        raise ValueError(
            f"expected validation rows of every group up to {max(groups)}; no label has group "
            f"{sorted(missing)[:5]}"
        )


def _by_group(values: Mapping[int, float]) -> Float[Tensor, " group"]:
    return torch.tensor([value for _, value in sorted(values.items())], dtype=torch.float64)
