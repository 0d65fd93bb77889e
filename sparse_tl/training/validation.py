"""Validation rows of post-training: what each group of them loses, and which weights are best."""

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
from sparse_tl.training.constraint import TargetLoss
from sparse_tl.training.evaluation import HeldOut, evaluate_held_out
from sparse_tl.training.objectives import SparsityObjective
from sparse_tl.training.outcome import DenseAndSparse
from sparse_tl.training.predictions import DensePredictions
from sparse_tl.training.reference import as_dense


class Validation:
    """Rows whose groups each have to meet the target, and others that take no part.

    The dense model is measured at once, while the sparse model's weights still are its own.

    Args:
        sparse: the model before training.
        rows: validation rows, or those of every group by name.
        held_out: rows that take no part, by name.
        target: what every group may lose.
        edge_cost: cost per attention edge, as in `evaluate_held_out`.
        precision: that of the run, in which both models are measured.

    Raises:
        ValueError: a group has no label, or the target is below the dense model's own loss.
    """

    def __init__(
        self,
        sparse: SparseTransformer,
        rows: TokenBatch | Mapping[str, TokenBatch],
        held_out: Mapping[str, TokenBatch],
        target: TargetLoss,
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
                {name: self._dense(some) for name, some in of.items()}
                for of in (self.groups, held_out)
            ]
        if target.of == "loss" and target.nats < (worst := max(self.dense.group_losses.values())):
            raise ValueError(
                "expected a target loss that the model can reach; the dense model's validation "
                f"loss is {worst:.5f} nats, the target {target}. Give a larger one, or an increase "
                f'such as "+{max(self.dense.loss * 0.02, 0.01):.2g}".'
            )

    @property
    def room(self) -> Float[Tensor, " group"]:
        """What every group may lose, in nats."""
        before = _by_group(self.dense.group_losses)
        if self.target.of == "loss":
            return self.target.nats - before
        return torch.full_like(before, self.target.nats)

    def measured(self) -> HeldOut:
        """The sparse model as it is, on all validation rows."""
        return self._sparse(self.rows)

    def lost(self, measured: HeldOut) -> Float[Tensor, " group"]:
        """What every group has lost in nats: the divergence, or the increase in loss."""
        if self.target.of == "divergence":
            return _by_group(measured.group_divergences)
        return _by_group(measured.group_losses) - _by_group(self.dense.group_losses)

    def compared(self) -> tuple[dict[str, DenseAndSparse], dict[str, DenseAndSparse]]:
        """Dense and sparse model on the rows of every group, and on those that take no part."""
        groups, held_out = (
            {name: DenseAndSparse(before[name], self._sparse(some)) for name, some in of.items()}
            for of, before in zip((self.groups, self.held_out), self._before, strict=True)
        )
        return groups, held_out

    def selection(self, objective: SparsityObjective) -> Selection:
        """Evaluations, of which the objective is told, and which of them is best."""

        def evaluate() -> Metrics:
            measured = self.measured()
            lost = self.lost(measured)
            objective.validated(lost)
            by_group = {f"lost_{n}": x for n, x in zip(self.groups, lost.tolist(), strict=False)}
            violation = (lost - self.room).max().item()
            return {**measured.numbers, **by_group, "violation": violation}

        def better(new: Metrics, old: Metrics) -> bool:
            if old["step"] == 0:
                return True  # the model as it came meets most targets, and is what nobody asks for
            if is_feasible(new) != is_feasible(old):
                return is_feasible(new)
            size = "active_size" if "active_size" in new else "active_attention_edges"
            decisive = size if is_feasible(new) else "violation"
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
    """Whether an evaluation meets the target in every group."""
    return metrics["violation"] <= 0


def _check_groups(measured: HeldOut) -> None:
    groups = set(range(max(measured.group_losses) + 1))
    if missing := groups - set(measured.group_losses):
        raise ValueError(
            f"expected validation rows of every group up to {max(groups)}; no label has group "
            f"{sorted(missing)[:5]}"
        )


def _by_group(found: Mapping[int, float]) -> Float[Tensor, " group"]:
    return torch.tensor([value for _, value in sorted(found.items())], dtype=torch.float64)
