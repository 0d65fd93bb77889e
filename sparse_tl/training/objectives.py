"""What a training step minimises: the plain loss, or edges under the loss constraint."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sparse_tl.batches import TokenBatch, cross_entropy
from sparse_tl.hooks import Model
from sparse_tl.masks import SparseTransformer
from sparse_tl.training.constraint import LossConstraint, TargetLoss

SLACK_UNTIL = 0.9
"""Part of the run after which the target itself holds."""
BRAKE_FACTOR = 1.5
LayerCosts = Sequence[float] | Mapping[float, Sequence[float]]
"""Costs of an edge by layer: the same throughout, or by the part of the run at which they hold."""


@runtime_checkable
class Objective(Protocol):
    """A loss with state: measured on every micro-batch, updated once per step.

    `measure` is told how much of the run is done, from 0 to 1.
    """

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, progress: float
    ) -> tuple[Float[Tensor, ""], dict[str, float]]: ...

    def update(self, measured: dict[str, float]) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...

    def retreat(self, state: dict[str, Any]) -> None: ...


class PlainLoss:
    """Mean cross-entropy in nats over the loss positions; what a base model is trained on."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, progress: float
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        loss = cross_entropy(self.model(batch.tokens, **batch.model_kwargs), batch)
        return loss, {"loss": loss.item()}

    def update(self, measured: dict[str, float]) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        pass

    def retreat(self, state: dict[str, Any]) -> None:
        pass


class SparsityObjective:
    """Few attention edges at a bounded loss, with sampled gates.

    Minimises ``(log(1 + E) + lambda ((1 - w) loss + w KL(dense || sparse))) / (1 + lambda)``, with
    E the expected edges per example, each at its layer's cost, and w the distillation. The
    logarithm makes one more percent fewer edges worth the same at any density; the 1 keeps it
    finite when no edge is left. The division keeps gradients of one size while lambda moves over
    decades, so that clipping means the same throughout; it does not move the optimum for a given
    lambda.

    Args:
        sparse: the model under its gates.
        dense: the frozen dense model; needed when the target is relative to it, or to distil.
        target: the allowed loss.
        constraint: lambda, and how it moves.
        distillation: share w of ``KL(dense || sparse)`` in what lambda weighs; the constraint
            itself stays on the loss.
        anneal_noise_from: part of the run after which the gates' noise falls to 0 along a cosine,
            so that in the end the constraint holds for the gates that are evaluated.
        slack: multiple of the target that is allowed at first; it shrinks to 1 as training goes on.
        pressure: gradient on gates that are confidently open; 0 for that of the sigmoid alone.
        layer_costs: what one edge of each layer counts in E; 1 everywhere when left out. Dearer
            early layers favour circuits that gather once and hand on what they gathered. Costs
            given for several parts of the run move from one to the next by a constant factor per
            step: where late layers cost next to nothing at first, the early ones lose their edges
            while the late ones are open and can take over.
        brake: multiple of the allowed loss above which deterministic gates must not get while
            noise is full: beyond it lambda grows by `BRAKE_FACTOR` at every evaluation.
        final_noise: what the noise falls to. Above 0, gates that are needed keep a margin; without
            noise they come to rest just above 0, where a small step closes them.
        settle_from: part of the run from which the loss alone is minimised, so that what is left of
            the edges becomes accurate.
        deterministic_share: share of each batch's rows on which the constraint is measured with
            deterministic gates; 0 measures it on all rows, with the sampled ones.
    """

    def __init__(
        self,
        sparse: SparseTransformer,
        dense: Model | None,
        target: TargetLoss,
        constraint: LossConstraint,
        distillation: float = 0.0,
        anneal_noise_from: float = 0.5,
        pressure: float = 0.05,
        slack: float = 1.0,
        layer_costs: LayerCosts | None = None,
        brake: float | None = None,
        deterministic_share: float = 0.0,
        final_noise: float = 0.0,
        settle_from: float = 1.0,
    ) -> None:
        if dense is None and (target.reference == "dense" or distillation > 0):
            raise ValueError("a target relative to the dense model and distillation need `dense`")
        if not 0 <= deterministic_share <= 1:
            raise ValueError(f"expected deterministic_share in 0..1; got {deterministic_share}")
        if not 0 <= final_noise <= 1 or not 0 < settle_from <= 1:
            raise ValueError(
                f"expected final_noise in 0..1, and settle_from in 0..1 (0 excluded); got "
                f"{final_noise} and {settle_from}"
            )
        self.sparse = sparse
        self.dense = dense
        self.target = target
        self.constraint = constraint
        self.distillation = distillation
        self.anneal_noise_from = anneal_noise_from
        self.pressure = pressure
        self.slack = slack
        self.layer_costs = _layer_costs(sparse, layer_costs)
        self.brake = brake
        self.deterministic_share = deterministic_share
        self.final_noise = final_noise
        self.settle_from = settle_from
        self._allowance, self._progress = 1.0, 0.0

    def allowance(self, progress: float) -> float:
        """What the target is multiplied by: `slack` at first, 1 from `SLACK_UNTIL` on."""
        return 1 + (self.slack - 1) * max(0.0, 1 - progress / SLACK_UNTIL)

    def costs(self, progress: float) -> Float[Tensor, " layer"]:
        """What one edge of each layer counts in E at this part of the run."""
        parts = list(self.layer_costs)
        after = bisect(parts, progress)
        if after in (0, len(parts)):
            return self.layer_costs[parts[max(0, after - 1)]]
        start, end = parts[after - 1], parts[after]
        way = (progress - start) / (end - start)
        return self.layer_costs[start] ** (1 - way) * self.layer_costs[end] ** way

    def noise(self, progress: float) -> float:
        """The scale of the gates' noise: 1 at first, `final_noise` at the end."""
        if progress < self.anneal_noise_from:
            return 1.0
        falling = (progress - self.anneal_noise_from) / (1 - self.anneal_noise_from)
        return max(self.final_noise, 0.5 * (1 + math.cos(math.pi * falling)))

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, progress: float
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        noise = self.noise(progress)
        with (
            self.sparse.sampled(generator, noise),
            self.sparse.recorded(pressure=self.pressure) as record,
        ):
            logits = self.sparse(batch.tokens, **batch.model_kwargs)
        counts = record.counts()
        loss = cross_entropy(logits, batch)
        edges = counts.expected.sum(dim=(1, 2)) @ self.costs(progress).to(loss.device) / len(batch)
        self._allowance, self._progress = self.allowance(progress), progress
        judged, judged_loss = self._judge(batch, loss)
        violation = judged_loss.item() - self.target.nats * self._allowance
        task = loss
        if self.dense is not None:
            with torch.no_grad():
                dense_logits = self.dense(batch.tokens, **batch.model_kwargs)
            if self.target.reference == "dense":
                # The same rows for both: what they happen to hold cancels out.
                violation -= cross_entropy(dense_logits[: len(judged)], judged).item()
            if self.distillation > 0:
                divergence = _divergence(dense_logits, logits, batch)
                task = (1 - self.distillation) * loss + self.distillation * divergence
        multiplier = self.constraint.multiplier
        objective = (torch.log1p(edges) + multiplier * task) / (1 + multiplier)
        if progress >= self.settle_from:
            objective = task
        return objective, {
            "loss": loss.item(),
            "violation": violation,
            "lambda": multiplier,
            "expected_per_token": counts.expected.sum().item() / counts.tokens.sum().item(),
        }

    def _judge(
        self, batch: TokenBatch, sampled: Float[Tensor, ""]
    ) -> tuple[TokenBatch, Float[Tensor, ""]]:
        """The rows that the constraint is measured on, the first of the batch, and their loss."""
        if self.deterministic_share == 0:
            return batch, sampled
        size = math.ceil(self.deterministic_share * len(batch))
        rows = batch.split(size)[0]  # a piece that has a label
        with torch.no_grad():
            return rows, cross_entropy(self.sparse(rows.tokens, **rows.model_kwargs), rows)

    def update(self, measured: dict[str, float]) -> None:
        self.constraint.update(measured["violation"] / self._allowance)

    def evaluated(self, excess: float) -> None:
        """Brake, where a held-out loss is that many nats above its reference.

        lambda follows the loss too slowly to stop a fall that takes needed edges with it, and what
        was closed is seldom found again.
        """
        falling = self._progress < self.anneal_noise_from
        allowed = self.target.nats * self._allowance
        if self.brake is not None and falling and excess > self.brake * allowed:
            self.constraint.ease(BRAKE_FACTOR)

    def settings(self) -> dict[str, Any]:
        """What identifies the objective in a checkpoint."""
        return {
            "target": str(self.target),
            "distillation": self.distillation,
            "anneal_noise_from": self.anneal_noise_from,
            "pressure": self.pressure,
            "slack": self.slack,
            "layer_costs": {str(part): some.tolist() for part, some in self.layer_costs.items()},
            "brake": self.brake,
            "deterministic_share": self.deterministic_share,
            "final_noise": self.final_noise,
            "settle_from": self.settle_from,
            "violation_scale": self.constraint.scale,
        }

    def state(self) -> dict[str, Any]:
        return dict(self.constraint.state())

    def load_state(self, state: dict[str, Any]) -> None:
        self.constraint.load_state(state)

    def retreat(self, state: dict[str, Any]) -> None:
        """Go back to an earlier state that met the target, and press less hard from there."""
        self.constraint.load_state(state)
        self.constraint.ease()


def _layer_costs(
    sparse: SparseTransformer, costs: LayerCosts | None
) -> dict[float, Float[Tensor, " layer"]]:
    """Checked costs by part of the run, in order."""
    n_layers, _ = sparse.gates.bias.shape
    if costs is None:
        costs = [1.0] * n_layers
    parts = costs if isinstance(costs, Mapping) else {0.0: costs}
    given = {part: torch.tensor(parts[part], dtype=torch.float) for part in sorted(parts)}
    if not given or not all(
        0 <= part <= 1 and some.shape == (n_layers,) and bool((some.isfinite() & (some > 0)).all())
        for part, some in given.items()
    ):
        raise ValueError(
            f"expected layer_costs to be {n_layers} numbers above 0, one for each layer, or such "
            f"costs by part of the run, 0 to 1; got {costs}"
        )
    return {part: some.to(sparse.gates.bias) for part, some in given.items()}


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
