"""The objective of post-training: the smallest size under the loss constraint."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from sparse_tl.backend import adapt, check_rows, has_sharded_weights, processes
from sparse_tl.data.batches import TokenBatch, token_losses
from sparse_tl.gates import AttentionEdgeCounts, SparseTransformer
from sparse_tl.gates.sparse.computed_gates import check_edge_cost, costs_of_first, using
from sparse_tl.gates.sparse.counting import Counted
from sparse_tl.training import ranks
from sparse_tl.training.constraint import (
    AHEAD,
    ARRIVAL,
    BELOW,
    LEAD,
    STEEPNESS,
    LossConstraint,
)
from sparse_tl.training.distillation import distilled, distilled_from
from sparse_tl.training.loop import Objective
from sparse_tl.training.reference import KEPT, DensePredictions, Reference

NOISE = 0.25
"""Initial scale of the gates' noise. At 1, sampled gates diverge from the dense SmolLM2-135M 18
times as much as deterministic ones, and training repairs damage that the noise alone does."""
NO_NOISE = 0.7
"""Share of the run after which the gates have no noise."""
MARGIN = 0.05
"""Nats by which the initial loss limit exceeds the final one, whatever the target: at a target of
0.1 nats, a language model does not recover from an excess of several times that."""
DISTILLED = 0.5
"""Weight of the dense model's prediction in the minimised cross-entropy; the label has the rest."""
PRESSURE = 0.2
"""Gradient of the expected size w.r.t. the logit of an open gate; the sigmoid's own vanishes."""
TINY = 1e-6
"""Edges per token that count as none; their logarithm is finite."""
HEAD_IN_USE = 0.1
"""Expected edges per example at which 63 percent of a head's cost is charged."""


class _Labels(NamedTuple):
    """For every label, the value to minimise, its loss, and its group."""

    minimised: Float[Tensor, " label"]
    loss: Float[Tensor, " label"]
    group: Int[Tensor, " label"]


class SparsityObjective(Objective):
    """The smallest size at a bounded loss, with sampled gates.

    Minimises ``(mean_g log(1 + size_g) + mean_g lambda_g loss_g) / (1 + mean_g lambda_g)``. Each
    group g of the batch counts alike, however many labels and edges it has: short prompts have a
    fiftieth of the edges of windows of text. If the dense model is given, its prediction replaces
    the label in a share `distilled` of the cross-entropy, which has the gradient of
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

    The constraint is checked on validation rows: after every evaluation, `record` stores each
    group's gap, and the number of edges. A gap's limit is
    ``limit_g = loss_budget_g + MARGIN * noise / NOISE``. Early on, large updates and the gates'
    noise raise the loss, which recovers later; learning rate and noise decay to 0 during the run,
    and the margin decays with the noise.

    Each group's lambda is raised to at least ``1 / (limit_g (1 + size_g))``, with the size of the
    previous step. Closing one more edge, which lowers the logarithm by ``1 / (1 + size_g)``, is
    then worth no more than the group's whole limit. Without this, the last necessary edges close
    before lambda has risen; a closed gate has hardly any gradient.

    Args:
        sparse: the gated model.
        dense: source of the frozen dense model's predictions, if they are part of the objective.
        loss_budget: the final limit on every group's gap, the loss above the dense model's or the
            divergence from it, in nats.
        constraint: lambda, and how it moves.
        edge_cost: cost of an attention edge, broadcastable to ``[layer, head, query, key]``,
            relative to an MLP output, which costs 1.
        head_cost: cost of a head in use, likewise.
        distilled: weight of the dense model's prediction in the cross-entropy, if `dense` is given.
        lead: evaluations over which gaps are extrapolated.
        target_edges: edges per token to which lambda steers the model; loss budgets are infinite.
    """

    def __init__(
        self,
        sparse: SparseTransformer,
        dense: Reference | None,
        loss_budget: Float[Tensor, " group"],
        constraint: LossConstraint,
        edge_cost: Float[Tensor, "*#edge"] | None = None,
        head_cost: float = 0.0,
        distilled: float = DISTILLED,
        lead: int = 0,
        target_edges: float | None = None,
    ) -> None:
        self.sparse, self.dense, self.distilled = sparse, dense, distilled
        # Of several ranks, a rank gets other rows in every epoch.
        kept = KEPT if processes().num_processes == 1 else 0
        self._predictions = None if dense is None else DensePredictions(dense, kept)
        self.loss_budget, self.constraint = loss_budget, constraint
        self.edge_cost, self.head_cost = edge_cost, head_cost
        self._noise, self._done = NOISE, 0.0
        self._gap = self.limit(NOISE)  # no excess before the first evaluation
        self._change = torch.zeros_like(self._gap)
        self.lead, self.target_edges = lead, target_edges
        self._edges: list[float] = []  # at the first evaluation and at the last two
        self._sizes = torch.full((len(loss_budget),), math.inf, dtype=torch.float64)
        self._shares = torch.ones(1)
        self._summed = self._rows = torch.zeros(len(loss_budget), dtype=torch.float64)

    def noise(self, fraction_done: float) -> float:
        """The scale of the gates' noise: from `NOISE` at the start to 0."""
        return NOISE * 0.5 * (1 + math.cos(math.pi * min(fraction_done / NO_NOISE, 1.0)))

    def limit(self, noise: float) -> Float[Tensor, " group"]:
        """The limit on every group's gap at this noise, in nats."""
        return self.loss_budget + MARGIN * noise / NOISE

    def begin(self, batch: TokenBatch) -> None:
        labels, n_groups = batch.label_groups(), len(self.loss_budget)
        if batch.n_groups > n_groups:
            raise ValueError(
                f"expected rows of the {n_groups} groups that the validation rows have; got group "
                f"{batch.n_groups - 1} in the training batch"
            )
        self._shares = labels.bincount(minlength=batch.n_groups) / len(labels)
        self._summed = self._rows = torch.zeros(n_groups, dtype=torch.float64)

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, fraction_done: float
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        check_rows(adapt(self.sparse), batch)
        if self.edge_cost is not None:
            width = batch.tokens.shape[1]
            check_edge_cost(self.edge_cost, (*self.sparse.gates.bias.shape, width, width))
        self._noise, self._done = self.noise(fraction_done), fraction_done
        limit = self.limit(self._noise)
        lambdas = self.constraint.lambda_.maximum(1 / (limit * (1 + self._sizes)))
        rows = ranks.own_parts(batch, self.sparse)
        parts = [self._run(part, generator) for part in rows]
        labels = _Labels(*map(torch.cat, zip(*(part for part, _ in parts), strict=True)))
        counts = AttentionEdgeCounts.concatenate([edges for _, edges in parts])
        groups = torch.cat([part.row_groups() for part in rows])
        lambdas = lambdas.to(labels.loss)
        # A label's weight makes the mean over all labels the mean over groups.
        by_group = lambdas[: len(self._shares)] / self._shares.to(lambdas)
        weights = by_group[labels.group] / int((self._shares > 0).sum())
        task = ranks.mean(weights * labels.minimised)
        sizes, n_rows = self.sizes(counts, groups)
        objective = (torch.log1p(sizes[n_rows > 0]).mean() + task) / (1 + lambdas.mean())
        known, n_rows = sizes.detach().cpu().double(), n_rows.cpu().double()
        self._summed = self._summed + known * n_rows
        self._rows = self._rows + n_rows
        measured = {
            "loss": ranks.mean(labels.loss).item(),
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
    ) -> tuple[_Labels, AttentionEdgeCounts]:
        """The labels' losses and the edge counts of one pass under sampled gates."""
        cost = costs_of_first(self.edge_cost, batch.tokens.shape[1])
        gates = [some for some in (self.sparse.gates, self.sparse.mlp_gates) if some is not None]
        layers: list[Counted] = []
        counted = {"counts": layers, "real": batch.attention_mask}
        adapter, labels, read = adapt(self.sparse), batch.loss_labels(), batch.loss_mask
        dense, sharded = self._predictions, has_sharded_weights(self.sparse)
        with (
            self.sparse.sampled(generator, self._noise),
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
            minimised, loss = distilled(output, dense.logits(batch), labels, self.distilled)
        else:
            both = (output, adapter.unembed, dense.final(batch), dense.unembed)
            minimised, loss = distilled_from(*both, labels, self.distilled)
        counts = AttentionEdgeCounts.of_pass(layers)
        return _Labels(minimised, loss.detach(), batch.label_groups()), counts

    def sizes(
        self, counts: AttentionEdgeCounts, groups: Int[Tensor, " prompt"]
    ) -> tuple[Float[Tensor, " group"], Float[Tensor, " group"]]:
        """Every group's size per example, and its number of examples; sizes of none are 0."""
        edges = counts.expected if counts.cost is None else counts.cost
        per_row = edges.sum(dim=(0, 2))
        if counts.expected_mlps is not None:
            per_row = per_row + counts.expected_mlps.sum(dim=0)
        member = one_hot(groups, len(self.loss_budget)).T.to(per_row)
        n_rows = ranks.total(member.sum(dim=1))
        per = n_rows.clamp(min=1)
        sizes = ranks.total((member * per_row).sum(dim=1)) / per  # autocast would round a product
        if self.head_cost:
            by_head = (member[:, None, :, None] * counts.expected).sum(dim=2)
            by_head = ranks.total(by_head) / per[:, None, None]
            in_use = 1 - torch.exp(-by_head / HEAD_IN_USE)
            sizes = sizes + self.head_cost * in_use.sum(dim=(1, 2))
        return sizes, n_rows

    def line(self, fraction_done: float) -> float:
        """Edges per token at which the model should be, under a target of edges."""
        assert self.target_edges is not None
        share = min(fraction_done / ARRIVAL, 1.0)
        return self._edges[0] ** (1 - share) * (BELOW * self.target_edges) ** share

    def record(self, gap: Float[Tensor, " group"], edges: float) -> None:
        """Record what was measured on validation rows; later updates use it.

        Args:
            gap: every group's loss above the dense model's, or divergence from it, under
                deterministic gates, in nats.
            edges: mean over groups of active attention edges per token.
        """
        edges = max(edges, TINY)
        first, *_, last = self._edges or [edges, edges]
        self._change = gap - self._gap if self._edges else torch.zeros_like(gap)
        self._gap, self._edges = gap, [first, last, edges]

    def update(self, measured: dict[str, float]) -> None:
        if self.target_edges is None:
            limit = self.limit(self._noise)
            measured["over_limit"] = (self._gap - limit).max().item()
            excess = (self._gap + self.lead * self._change - limit) / limit
        else:
            first, before, edges = self._edges
            measured["over_limit"] = edges - self.line(self._done)
            ahead = self.line(self._done + AHEAD)
            over = math.log(edges / ahead) + LEAD * math.log(edges / before)
            gain = 1 + STEEPNESS * abs(math.log(first / self.target_edges))
            excess = torch.full_like(self._gap, -gain * over)
        self.constraint.update(excess)
        seen = self._rows > 0
        self._sizes = torch.where(seen, self._summed / self._rows.clamp(min=1), self._sizes)

    def state(self) -> dict[str, Any]:
        carried = {
            "gap": self._gap.tolist(),
            "change": self._change.tolist(),
            "sizes": self._sizes.tolist(),
            "edges": self._edges,
        }
        kept = {} if self._predictions is None else self._predictions.state()
        return {**self.constraint.state(), **carried, **kept}

    def load_state(self, state: dict[str, Any]) -> None:
        self.constraint.load_state(state)
        self._gap = torch.tensor(state["gap"], dtype=torch.float64)
        self._change = torch.tensor(state["change"], dtype=torch.float64)
        self._sizes = torch.tensor(state["sizes"], dtype=torch.float64)
        self._edges = state["edges"]
        if self._predictions is not None:
            self._predictions.load_state(state)
