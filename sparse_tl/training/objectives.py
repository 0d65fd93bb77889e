"""What a training step minimises: the plain loss, or edges under the loss constraint."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sparse_tl import ranks, shards
from sparse_tl.data.batches import TokenBatch, token_losses
from sparse_tl.gates import AttentionEdgeCounts, SparseTransformer
from sparse_tl.gates.attention import check_edge_cost, costs_of_first
from sparse_tl.lens import HookedModel, adapt, check_rows
from sparse_tl.training.constraint import LossConstraint
from sparse_tl.training.distillation import distilled
from sparse_tl.training.predictions import DensePredictions
from sparse_tl.training.reference import Reference

NOISE = 0.25
"""Scale of the gates' noise at first. At 1, sampled gates diverge from the dense SmolLM2-135M by 18
times as much as deterministic ones, and training repairs what only the noise breaks."""
NO_NOISE = 0.7
"""Part of the run after which the gates have no noise."""
MARGIN = 0.05
"""Nats by which the loss may rise more at first than in the end. Not relative to the target:
a language model under a target of 0.1 nats does not win back several times that."""
DISTILLED = 0.5
"""Share of the dense model's prediction in what is learned, where there is one; else the label."""
FLOOR = 0.2
"""Gradient on open gates, for each logit that they are open by, where the sigmoid has none."""
HEAD_IN_USE = 0.1
"""Expected edges per example at which a head counts as in use, to 63 percent."""


class Objective:
    """A loss with state: measured on every micro-batch, updated once per step.

    Of several ranks, each is given its own rows of a micro-batch, and all return the same: means
    over rows or labels are those of `ranks.mean`, over the rows of all ranks.
    """

    def begin(self, batch: TokenBatch) -> None:
        """Take note of the whole batch of a step, before its micro-batches are measured."""

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, fraction_done: float
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        """What is minimised, and what is logged of it.

        Args:
            batch: examples.
            generator: of all randomness.
            fraction_done: how much of the run is done, from 0 to 1.
        """
        raise NotImplementedError

    def update(self, measured: dict[str, float]) -> None:
        """Move what moves once per step, by the step's measurements."""

    def state(self) -> dict[str, Any]:
        """What is carried from step to step: plain values and tensors."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""


class PlainLoss(Objective):
    """Mean cross-entropy in nats over the loss positions; what a dense model is trained on."""

    def __init__(self, model: HookedModel) -> None:
        self.model = model

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, fraction_done: float
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        losses = []
        for part in _parts(batch, self.model):
            with adapt(self.model).only_at(part.loss_mask) as logits_at:
                logits = logits_at(self.model(part.tokens, **part.model_kwargs))
            losses.append(token_losses(logits, part.loss_labels()))
        loss = ranks.mean(torch.cat(losses))
        return loss, {"loss": loss.item()}


def _parts(batch: TokenBatch, model: HookedModel) -> list[TokenBatch]:
    """Rows by length; of a sharded model all at once, since ranks have to make the same passes."""
    assert isinstance(model, nn.Module)
    return batch.by_length(1) if shards.is_dealt(model) else batch.by_length()


class _Labels(NamedTuple):
    """For every label, what is minimised, its loss, and its group."""

    minimised: Float[Tensor, " label"]
    loss: Float[Tensor, " label"]
    group: Int[Tensor, " label"]


class SparsityObjective(Objective):
    """The smallest size at a bounded loss, with sampled gates.

    Minimises ``(log(1 + size) + mean_g lambda_g loss_g) / (1 + mean_g lambda_g)``, each group g of
    the batch counting alike, however many labels it has. Where the dense model is given, half of
    the cross-entropy, or with `distilled` of 1 all of it, is with its prediction in place of the
    label, which has the gradient of ``KL(dense || sparse)``: a whole prediction tells more than one
    label. The size is per example

        size = sum edge_cost * P(attention edge is open) + sum P(MLP output is open)
               + head_cost * sum_h (1 - exp(-E_h / 0.1))

    with the expected edges E_h of head h; an MLP output is that of one layer at one position, and
    there is none to count where MLPs have no gates. The logarithm makes one more percent fewer
    edges worth the same at any density; the 1 keeps it finite when no edge is left. The division
    keeps gradients of one size while lambda moves over decades, so that clipping means the same
    throughout; it does not move the optimum for a given lambda. It is the same for all
    micro-batches of a step, whatever groups they hold; the size is that of each by itself.

    The constraint is on validation rows, and `validated` is told of them after every evaluation:
    their loss may rise by ``allowed_g = room_g + MARGIN * noise / NOISE``. Weights that move fast,
    and under noise, cost loss that is won back later; both fall to 0 in the course of a run, and
    the margin with them.

    Of every group's lambda, ``max(lambda_g, 1 / (allowed_g (1 + size)))`` is taken, with the size
    of the step before: closing one more edge, which lowers the logarithm by ``1 / (1 + size)``, is
    then worth no more than all of the loss that the group may gain. Without this, the last needed
    edges close before lambda has risen; a closed gate has hardly any gradient.

    Args:
        sparse: the model under its gates.
        dense: what the frozen dense model is read from, where its predictions are part of what is
            minimised.
        room: nats by which the loss of every group may be above the dense model's in the end.
        constraint: lambda, and how it moves.
        edge_cost: of an attention edge, broadcastable to ``[layer, head, query, key]``; relative
            to an MLP output, which costs 1.
        head_cost: of a head in use, likewise.
        distilled: share of the dense model's prediction, where there is one, in what is learned.
    """

    def __init__(
        self,
        sparse: SparseTransformer,
        dense: Reference | None,
        room: Float[Tensor, " group"],
        constraint: LossConstraint,
        edge_cost: Float[Tensor, "*#edge"] | None = None,
        head_cost: float = 0.0,
        distilled: float = DISTILLED,
    ) -> None:
        self.sparse, self.dense, self.distilled = sparse, dense, distilled
        self._predictions = None if dense is None else DensePredictions(dense)
        self.room, self.constraint = room, constraint
        self.edge_cost, self.head_cost = edge_cost, head_cost
        self._noise = NOISE
        self._increase = self.allowed(NOISE)
        self._size = math.inf
        self._shares = torch.ones(1)

    def noise(self, fraction_done: float) -> float:
        """The scale of the gates' noise: `NOISE` at first, 0 in the end."""
        return NOISE * 0.5 * (1 + math.cos(math.pi * min(fraction_done / NO_NOISE, 1.0)))

    def allowed(self, noise: float) -> Float[Tensor, " group"]:
        """By how many nats the validation loss of every group may rise at this noise."""
        return self.room + MARGIN * noise / NOISE

    def begin(self, batch: TokenBatch) -> None:
        labels, known = batch.label_groups(), len(self.room)
        if batch.n_groups > known:
            raise ValueError(
                f"expected rows of the {known} groups that the validation rows have; got group "
                f"{batch.n_groups - 1} in the training batch"
            )
        self._shares = labels.bincount(minlength=batch.n_groups) / len(labels)

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, fraction_done: float
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        check_rows(adapt(self.sparse), batch)
        if self.edge_cost is not None:
            width = batch.tokens.shape[1]
            check_edge_cost(self.edge_cost, (*self.sparse.gates.bias.shape, width, width))
        self._noise = self.noise(fraction_done)
        allowed = self.allowed(self._noise)
        lambdas = self.constraint.lambda_.maximum(1 / (allowed * (1 + self._size)))
        parts = [self._run(part, generator) for part in _parts(batch, self.sparse)]
        labels = _Labels(*map(torch.cat, zip(*(part for part, _ in parts), strict=True)))
        counts = AttentionEdgeCounts.concatenate([edges for _, edges in parts])
        lambdas = lambdas.to(labels.loss)
        # A label's weight makes the mean over all labels the mean over groups.
        by_group = lambdas[: len(self._shares)] / self._shares.to(lambdas)
        weights = by_group[labels.group] / int((self._shares > 0).sum())
        task = ranks.mean(weights * labels.minimised)
        size = self.size(counts)
        objective = (torch.log1p(size) + task) / (1 + lambdas.mean())
        measured = {
            "loss": ranks.mean(labels.loss).item(),
            "lambda": ranks.mean(weights).item(),
            "size": size.item(),
            "expected_per_token": ranks.total(counts.expected.sum()).item()
            / ranks.total(counts.tokens.sum()).item(),
        }
        if counts.expected_mlps is not None:
            measured["expected_mlps"] = ranks.mean(counts.expected_mlps, dim=1).sum().item()
        return objective, measured

    def _run(
        self, batch: TokenBatch, generator: torch.Generator
    ) -> tuple[_Labels, AttentionEdgeCounts]:
        """One pass under sampled gates, and the dense model's prediction."""
        cost = costs_of_first(self.edge_cost, batch.tokens.shape[1])
        with (
            self.sparse.sampled(generator, self._noise),
            adapt(self.sparse).only_at(batch.loss_mask) as logits_at,
        ):
            output, counts = self.sparse.run_with_counts(
                batch.tokens, pressure=FLOOR, edge_cost=cost, **batch.model_kwargs
            )
        logits, labels = logits_at(output), batch.loss_labels()
        if self._predictions is None:
            minimised = loss = token_losses(logits, labels)
        else:
            dense = self._predictions.logits(batch)
            minimised, loss = distilled(logits, dense, labels, self.distilled)
        return _Labels(minimised, loss.detach(), batch.label_groups()), counts

    def size(self, counts: AttentionEdgeCounts) -> Float[Tensor, ""]:
        """What is minimised, per example; an attention edge or MLP output counts 1 by itself."""
        edges = counts.expected if counts.cost is None else counts.cost
        in_use = 1 - torch.exp(-ranks.mean(counts.expected, dim=1) / HEAD_IN_USE)
        size = ranks.mean(edges, dim=1).sum() + self.head_cost * in_use.sum()
        if counts.expected_mlps is not None:
            size = size + ranks.mean(counts.expected_mlps, dim=1).sum()
        return size

    def validated(self, increase: Float[Tensor, " group"]) -> None:
        """Take what validation rows lose, under deterministic gates, as the violation from here on.

        Args:
            increase: loss above the dense model's, in nats.
        """
        self._increase = increase

    def update(self, measured: dict[str, float]) -> None:
        allowed = self.allowed(self._noise)
        measured["violation"] = (self._increase - allowed).max().item()
        self.constraint.update((self._increase - allowed) / allowed)
        self._size = measured["size"]

    def state(self) -> dict[str, Any]:
        carried = {"increase": self._increase.tolist(), "size": self._size}
        kept = {} if self._predictions is None else self._predictions.state()
        return {**self.constraint.state(), **carried, **kept}

    def load_state(self, state: dict[str, Any]) -> None:
        self.constraint.load_state(state)
        self._increase = torch.tensor(state["increase"], dtype=torch.float64)
        self._size = state["size"]
        if self._predictions is not None:
            self._predictions.load_state(state)
