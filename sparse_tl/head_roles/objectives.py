"""What the gates are fitted to: the targets' likelihood, pushed open or shut.

With gates ``G = sigmoid(theta)`` and frozen weights, for each matrix of the stack by itself,

    NLL(G) - lambda mean(clamp(theta, -4, 4))                                     (likelihood)
    NLL_retain + max(logP_forget - sg(logP_retain), -5) - lambda mean(clamp(...))  (contrastive)

with the mean NLL of a target token in nats. A lambda above 0 pushes gates open, below 0 shut; the
means over heads and tokens make lambda mean the same for every model and batch.

Reference: arXiv 2505.13737, which sums where this takes means: with sums G- collapses.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sparse_tl.data import TokenStream
from sparse_tl.data.batches import TokenBatch
from sparse_tl.head_roles.likelihood import target_losses
from sparse_tl.lens import HookedModel
from sparse_tl.training.objectives import Objective

LARGEST_LOGIT = 4.0
"""Of theta, beyond which the penalty pushes no more: gates of 0.018 and 0.982."""
LARGEST_MARGIN = 5.0
"""Nats by which the forgotten targets need be less likely than the retained ones, no more."""


class GatedHeads(nn.Module):
    """A model with a stack of trainable head gates; its own weights stay as they are.

    Args:
        model: dense or sparse.
        theta: the gates' logits.
    """

    def __init__(self, model: HookedModel, theta: Float[Tensor, "stack layer head"]) -> None:
        super().__init__()
        self.model = model
        self.theta = nn.Parameter(theta.clone())

    def forward(self, batch: TokenBatch) -> Float[Tensor, "stack label"]:
        """Negative log-probability in nats of every target token."""
        return target_losses(self.model, batch, self.theta.sigmoid())

    def mean_theta(self) -> Float[Tensor, " stack"]:
        """The mean over heads of theta, clamped."""
        return self.theta.clamp(-LARGEST_LOGIT, LARGEST_LOGIT).mean(dim=(1, 2))


class Likelihood(Objective):
    """The likelihood of the targets; also keeps the gates' trajectories.

    Args:
        gated: the model and its gates.
        lambda_: of the penalty; 0 for none.
        record_every: updates between two recorded gates.
    """

    def __init__(self, gated: GatedHeads, lambda_: float, record_every: int) -> None:
        self.gated, self.lambda_, self.record_every = gated, lambda_, record_every
        self.updates = 0
        # On the CPU, where a checkpoint has them too.
        self.recorded = [gated.theta.detach().cpu().clone()]

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, fraction_done: float
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        losses = self.gated(batch).mean(dim=1)
        # Gates of different seeds share no term: the sum has the gradients of each by itself.
        objective = losses - self.lambda_ * self.gated.mean_theta()
        return objective.sum(), {"loss": losses.mean().item()}

    def update(self, measured: dict[str, float]) -> None:
        self.updates += 1
        if self.updates % self.record_every == 0:
            self.recorded.append(self.gated.theta.detach().cpu().clone())

    def state(self) -> dict[str, Any]:
        return {"updates": self.updates, "recorded": torch.stack(self.recorded)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        self.recorded = list(state["recorded"])


class Contrast(Likelihood):
    """The likelihood of some targets, and the unlikelihood of others.

    Args:
        gated: the model and its gates.
        lambda_: of the penalty; 0 for none.
        record_every: updates between two recorded gates.
        forget: the other targets; the training stream has those to retain.
    """

    def __init__(
        self, gated: GatedHeads, lambda_: float, record_every: int, forget: TokenStream
    ) -> None:
        super().__init__(gated, lambda_, record_every)
        self.forget = forget

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, fraction_done: float
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        others = self.forget.batch(self.updates).to(batch.tokens.device)
        retained, forgotten = -self.gated(batch).mean(dim=1), -self.gated(others).mean(dim=1)
        margin = (forgotten - retained.detach()).clamp(min=-LARGEST_MARGIN)
        objective = -retained + margin - self.lambda_ * self.gated.mean_theta()
        return objective.sum(), {
            "loss": -retained.mean().item(),
            "forgotten": -forgotten.mean().item(),
        }
