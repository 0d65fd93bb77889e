"""The objective of post-training: the smallest size under the loss constraint."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from sparse_tl.backend import adapt, check_rows, has_sharded_weights, processes
from sparse_tl.data.batches import TokenBatch, token_losses
from sparse_tl.gates import AttentionEdgeCounts, SparseTransformer
from sparse_tl.gates.sparse.attention import check_edge_cost, costs_of_first
from sparse_tl.gates.sparse.computed_gates import using
from sparse_tl.gates.sparse.counting import Counted
from sparse_tl.training import ranks
from sparse_tl.training.constraint import LossConstraint, remaining
from sparse_tl.training.distillation import (
    KEPT,
    DensePredictions,
    Reference,
    distilled,
    distilled_from,
)
from sparse_tl.training.loop import Objective

NOISE = 0.25
"""Initial scale of the gates' noise. At 1, sampled gates diverge from the dense SmolLM2-135M 18
times as much as deterministic ones, and training repairs damage that the noise alone does."""
DISTILLED = 0.5
"""Weight of the dense model's prediction in the minimised cross-entropy; the label has the rest."""
PRESSURE = 0.2
"""Gradient of the expected size w.r.t. the logit of an open gate; the sigmoid's own vanishes."""
HEAD_IN_USE = 0.1
"""Expected edges per example at which 63 percent of a head's cost is charged."""


class SparsityObjective(Objective):
    """The smallest size at a bounded loss, with sampled gates.

    Minimises ``(mean_g log(1 + size_g) + mean_g lambda_g loss_g) / (1 + mean_g lambda_g)``. Each
    group g of the batch counts alike, however many labels and edges it has: short prompts have a
    fiftieth of the edges of windows of text. If the dense model is given, its prediction replaces
    the label in a share `share` of the cross-entropy, which has the gradient of
    ``KL(dense || sparse)``: a whole prediction carries more information than one label. The size
    per example of a group is

        size_g = sum edge_cost * P(attention edge is open) + sum P(MLP output is open)
                 + head_cost * sum_h (1 - exp(-E_h / 0.1))

    where E_h is the group's expected number of edges of head h, and an MLP output is that of one
    layer at one position; MLPs without gates do not count. Because of the logarithm, closing one
    percent of the edges is worth the same at any density; the 1 keeps it finite when no edge is
    left. The division keeps the scale of the gradients while lambda moves over orders of magnitude,
    so that clipping means the same throughout; it does not move the optimum for a given lambda. The
    divisor is the same for all micro-batches of a step, whatever groups they hold; the sizes are
    each micro-batch's own.

    Each group's lambda is raised to at least ``1 / (limit_g (1 + size_g))``, with the size of the
    previous step. Closing one more edge, which lowers the logarithm by ``1 / (1 + size_g)``, is
    then worth no more than the group's whole limit. Without this, the last necessary edges close
    before lambda has risen; a closed gate has hardly any gradient.

    Args:
        sparse: the gated model.
        dense: source of the frozen dense model's predictions, if they are part of the objective.
        constraint: lambda, and how validation moves it.
        edge_cost: as in `post_train`.
        head_cost: as in `post_train`.
        share: weight of the dense model's prediction in the cross-entropy, if `dense` is given.
    """

    def __init__(
        self,
        sparse: SparseTransformer,
        dense: Reference | None,
        constraint: LossConstraint,
        edge_cost: Float[Tensor, "*#edge"] | None = None,
        head_cost: float = 0.0,
        share: float = DISTILLED,
    ) -> None:
        self.sparse, self.dense, self.constraint, self.share = sparse, dense, constraint, share
        self.edge_cost, self.head_cost = edge_cost, head_cost
        # Of several ranks, a rank gets other rows in every epoch.
        kept = KEPT if processes().num_processes == 1 else 0
        self._predictions = None if dense is None else DensePredictions(dense, kept)
        self._done = 0.0
        self._sizes = torch.full_like(constraint.budget, math.inf)
        self._shares = torch.ones(1)
        self._summed = self._rows = torch.zeros_like(constraint.budget)

    def begin(self, batch: TokenBatch) -> None:
        labels, n_groups = batch.label_groups(), len(self.constraint.budget)
        if batch.n_groups > n_groups:
            raise ValueError(
                f"expected rows of the {n_groups} groups that the validation rows have; got group "
                f"{batch.n_groups - 1} in the training batch"
            )
        self._shares = labels.bincount(minlength=batch.n_groups) / len(labels)
        self._summed = self._rows = torch.zeros_like(self.constraint.budget)

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, fraction_done: float
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        check_rows(adapt(self.sparse), batch)
        if self.edge_cost is not None:
            width = batch.tokens.shape[1]
            check_edge_cost(self.edge_cost, (*self.sparse.gates.bias.shape, width, width))
        self._done = fraction_done
        limit = self.constraint.limit(fraction_done)
        lambdas = self.constraint.lambda_.maximum(1 / (limit * (1 + self._sizes)))
        rows = ranks.own_parts(batch, self.sparse)
        *losses, counts = zip(*(self._run(part, generator) for part in rows), strict=True)
        minimised, loss = map(torch.cat, losses)
        counts = AttentionEdgeCounts.concatenate(counts)
        of_labels = torch.cat([part.label_groups() for part in rows])
        of_rows = torch.cat([part.row_groups() for part in rows])
        lambdas = lambdas.to(loss)
        # A label's weight makes the mean over all labels the mean over groups.
        by_group = lambdas[: len(self._shares)] / self._shares.to(lambdas)
        weights = by_group[of_labels] / int((self._shares > 0).sum())
        task = ranks.mean(weights * minimised)
        sizes, n_rows = self.sizes(counts, of_rows)
        objective = (torch.log1p(sizes[n_rows > 0]).mean() + task) / (1 + lambdas.mean())
        known, n_rows = sizes.detach().cpu().double(), n_rows.cpu().double()
        self._summed = self._summed + known * n_rows
        self._rows = self._rows + n_rows
        measured = {
            "loss": ranks.mean(loss).item(),
            "lambda": ranks.mean(weights).item(),
            "size": (known @ n_rows / n_rows.sum()).item(),
            "expected_per_token": ranks.total(counts.expected.sum()).item()
            / ranks.total(counts.tokens.sum()).item(),
        }
        if counts.expected_mlps is not None:
            measured["expected_mlps"] = ranks.mean(counts.expected_mlps, dim=1).sum().item()
        return objective, measured

    def _run(
        self, batch: TokenBatch, generator: torch.Generator
    ) -> tuple[Float[Tensor, " label"], Float[Tensor, " label"], AttentionEdgeCounts]:
        """Each label's value to minimise and loss, and the edge counts, under sampled gates."""
        cost = costs_of_first(self.edge_cost, batch.tokens.shape[1])
        gates = [some for some in (self.sparse.gates, self.sparse.mlp_gates) if some is not None]
        layers: list[Counted] = []
        counted = {"counts": layers, "real": batch.attention_mask}
        adapter, labels, read = adapt(self.sparse), batch.loss_labels(), batch.loss_mask
        dense, sharded = self._predictions, has_sharded_weights(self.sparse)
        with (
            self.sparse.sampled(generator, NOISE * remaining(self._done)),
            using(gates, pressure=PRESSURE, edge_cost=cost, **counted),
        ):
            if dense is None or sharded:
                with adapter.only_at(read) as logits_at:
                    output = logits_at(self.sparse(batch.tokens, **batch.model_kwargs))
            else:
                output = adapter.final(batch.tokens, read=read, **batch.model_kwargs)[read]
        if dense is None:
            minimised = loss = token_losses(output, labels)
        elif sharded:
            minimised, loss = distilled(output, dense.logits(batch), labels, self.share)
        else:
            both = (output, adapter.unembed, dense.final(batch), dense.unembed)
            minimised, loss = distilled_from(*both, labels, self.share)
        return minimised, loss.detach(), AttentionEdgeCounts.of_pass(layers)

    def sizes(
        self, counts: AttentionEdgeCounts, groups: Int[Tensor, " prompt"]
    ) -> tuple[Float[Tensor, " group"], Float[Tensor, " group"]]:
        """Every group's size per example, and its number of examples; sizes of none are 0."""
        edges = counts.expected if counts.cost is None else counts.cost
        per_row = edges.sum(dim=(0, 2))
        if counts.expected_mlps is not None:
            per_row = per_row + counts.expected_mlps.sum(dim=0)
        member = one_hot(groups, len(self.constraint.budget)).T.to(per_row)
        n_rows = ranks.total(member.sum(dim=1))
        per = n_rows.clamp(min=1)
        sizes = ranks.total((member * per_row).sum(dim=1)) / per  # autocast would round a product
        if self.head_cost:
            by_head = (member[:, None, :, None] * counts.expected).sum(dim=2)
            by_head = ranks.total(by_head) / per[:, None, None]
            in_use = 1 - torch.exp(-by_head / HEAD_IN_USE)
            sizes = sizes + self.head_cost * in_use.sum(dim=(1, 2))
        return sizes, n_rows

    def update(self, measured: dict[str, float]) -> None:
        measured["over_limit"] = self.constraint.update(self._done)
        seen = self._rows > 0
        self._sizes = torch.where(seen, self._summed / self._rows.clamp(min=1), self._sizes)

    def state(self) -> dict[str, Any]:
        kept = {} if self._predictions is None else self._predictions.state()
        return {**self.constraint.state(), "sizes": self._sizes.tolist(), **kept}

    def load_state(self, state: dict[str, Any]) -> None:
        self.constraint.load_state(state)
        self._sizes = torch.tensor(state["sizes"], dtype=torch.float64)
        if self._predictions is not None:
            self._predictions.load_state(state)
