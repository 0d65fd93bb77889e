"""What a training step minimises: the plain loss, or edges under the loss constraint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sparse_tl.data.batches import TokenBatch, cross_entropy
from sparse_tl.gates import SparseTransformer
from sparse_tl.lens import HookedModel, Model, adapt
from sparse_tl.training.constraint import LossConstraint, TargetLoss

SLACK_UNTIL = 0.9
"""Part of the run after which the target itself holds."""
BRAKE_FACTOR = 1.5


class Objective:
    """A loss with state: measured on every micro-batch, updated once per step."""

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

    def retreat(self, state: dict[str, Any]) -> None:
        """Go back to an earlier state."""


class PlainLoss(Objective):
    """Mean cross-entropy in nats over the loss positions; what a base model is trained on."""

    def __init__(self, model: HookedModel) -> None:
        self.model = model

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, fraction_done: float
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        with adapt(self.model).only_at(batch.loss_mask):
            logits = self.model(batch.tokens, **batch.model_kwargs)
        loss = cross_entropy(logits, batch)
        return loss, {"loss": loss.item()}


@dataclass(eq=False)
class SparsityObjective(Objective):
    """Few attention edges at a bounded loss, with sampled gates.

    Minimises ``(log(1 + E) + lambda ((1 - w) loss + w KL(dense || sparse))) / (1 + lambda)``, with
    E the expected edges per example, each at its cost, and w the distillation. The
    logarithm makes one more percent fewer edges worth the same at any density; the 1 keeps it
    finite when no edge is left. The division keeps gradients of one size while lambda moves over
    decades, so that clipping means the same throughout; it does not move the optimum for a given
    lambda.

    Args:
        sparse: the model under its gates.
        dense: the frozen dense model; needed when the target is relative to it, or to distil.
        target: the allowed loss.
        constraint: lambda, and how it moves.

    The other fields are parameters of `post_train`.
    """

    sparse: SparseTransformer
    dense: Model | None
    target: TargetLoss
    constraint: LossConstraint
    distillation: float = 0.0
    anneal_noise_from: float = 0.5
    pressure: float = 0.05
    slack: float = 1.0
    layer_costs: Sequence[float] | None = None
    self_cost: float = 1.0
    closing: float = 0.0
    brake: float | None = None

    def __post_init__(self) -> None:
        if self.dense is None and (self.target.reference == "dense" or self.distillation > 0):
            raise ValueError("a target relative to the dense model and distillation need `dense`")
        if not (math.isfinite(self.self_cost) and self.self_cost > 0):
            raise ValueError(f"expected self_cost to be a number above 0; got {self.self_cost}")
        n_layers = len(self.sparse.gates.bias)
        costs = torch.tensor([1.0] * n_layers if self.layer_costs is None else self.layer_costs)
        if costs.shape != (n_layers,) or not bool((costs.isfinite() & (costs > 0)).all()):
            raise ValueError(
                f"expected layer_costs to be {n_layers} numbers above 0, one for each layer; got "
                f"{self.layer_costs}"
            )
        self._costs = costs.to(self.sparse.gates.bias)
        self._allowance, self._fraction_done = 1.0, 0.0

    def settings(self) -> dict[str, Any]:
        """What identifies it in a checkpoint, as JSON can hold it."""
        numbers = {field.name: getattr(self, field.name) for field in fields(self)[4:]}
        costs = None if self.layer_costs is None else list(self.layer_costs)
        return {**numbers, "target": str(self.target), "layer_costs": costs}

    def allowance(self, fraction_done: float) -> float:
        """What the target is multiplied by: `slack` at first, 1 from `SLACK_UNTIL` on."""
        return 1 + (self.slack - 1) * max(0.0, 1 - fraction_done / SLACK_UNTIL)

    def closed_share(self, fraction_done: float) -> float:
        """The share of draws in which closed edges are shut."""
        return min(1.0, fraction_done / self.closing) if self.closing > 0 else 1.0

    def pruning(self, fraction_done: float) -> bool:
        """Whether the size is minimised: as soon as all closed edges are shut."""
        return self.closed_share(fraction_done) == 1

    def noise(self, fraction_done: float) -> float:
        """The scale of the gates' noise: 1 at first, 0 at the end."""
        if fraction_done < self.anneal_noise_from:
            return 1.0
        falling = (fraction_done - self.anneal_noise_from) / (1 - self.anneal_noise_from)
        return 0.5 * (1 + math.cos(math.pi * falling))

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, fraction_done: float
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        with (
            self.sparse.sampled(
                generator, self.noise(fraction_done), self.closed_share(fraction_done)
            ),
            adapt(self.sparse).only_at(batch.loss_mask),
        ):
            logits, counts = self.sparse.run_with_counts(
                batch.tokens, pressure=self.pressure, **batch.model_kwargs
            )
        loss = cross_entropy(logits, batch)
        weighted = counts.expected + (self.self_cost - 1) * counts.expected_self
        edges = weighted.sum(dim=(1, 2)) @ self._costs.to(weighted.device) / len(batch)
        self._allowance, self._fraction_done = self.allowance(fraction_done), fraction_done
        violation = loss.item() - self.target.nats * self._allowance
        task = loss
        if self.dense is not None:
            with torch.no_grad(), adapt(self.dense).only_at(batch.loss_mask):
                dense_logits = self.dense(batch.tokens, **batch.model_kwargs)
            if self.target.reference == "dense":
                # The same batch for both: what the batch happens to hold cancels out.
                violation -= cross_entropy(dense_logits, batch).item()
            if self.distillation > 0:
                divergence = _divergence(dense_logits, logits, batch)
                task = (1 - self.distillation) * loss + self.distillation * divergence
        lambda_ = self.constraint.lambda_
        size = torch.log1p(edges) if self.pruning(fraction_done) else 0.0
        objective = (size + lambda_ * task) / (1 + lambda_)
        return objective, {
            "loss": loss.item(),
            "violation": violation,
            "lambda": lambda_,
            "expected_per_token": counts.expected.sum().item() / counts.tokens.sum().item(),
        }

    def update(self, measured: dict[str, float]) -> None:
        if self.pruning(self._fraction_done):
            self.constraint.update(measured["violation"] / self._allowance)

    def evaluated(self, excess: float) -> None:
        """Brake, where a validation loss is that many nats above its reference.

        lambda follows the loss too slowly to stop a fall that takes needed edges with it, and what
        was closed is seldom found again.
        """
        falling = self.pruning(self._fraction_done) and self._fraction_done < self.anneal_noise_from
        allowed = self.target.nats * self._allowance
        if self.brake is not None and falling and excess > self.brake * allowed:
            self.constraint.ease(BRAKE_FACTOR)

    def state(self) -> dict[str, Any]:
        return {"log_lambda": self.constraint.log_lambda, "average": self.constraint.average}

    def load_state(self, state: dict[str, Any]) -> None:
        self.constraint = replace(self.constraint, **state)

    def retreat(self, state: dict[str, Any]) -> None:
        """Go back to an earlier state that met the target, and press less hard from there."""
        self.load_state(state)
        self.constraint.ease()


def _divergence(
    dense_logits: Float[Tensor, "batch pos vocab"],
    sparse_logits: Float[Tensor, "batch pos vocab"],
    batch: TokenBatch,
) -> Float[Tensor, ""]:
    """``KL(dense || sparse)`` in nats, mean over the loss positions."""
    precise = torch.float64 if sparse_logits.dtype == torch.float64 else torch.float32
    dense = dense_logits[batch.loss_mask].to(precise).log_softmax(dim=-1)
    sparse = sparse_logits[batch.loss_mask].to(precise).log_softmax(dim=-1)
    return nn.functional.kl_div(sparse, dense, reduction="batchmean", log_target=True)
