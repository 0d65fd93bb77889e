"""Likelihood of the targets under gated heads, and the objectives that gates are fitted to.

With gates ``G = sigmoid(theta)`` and frozen weights, for each matrix of the stack separately,

    NLL(G) - lambda mean(clamp(theta, -4, 4))                                     (likelihood)
    NLL_retain + max(logP_forget - sg(logP_retain), -5) - lambda mean(clamp(...))  (contrastive)

with mean NLLs and log-probabilities of target tokens in nats. Means over heads and tokens make
lambda comparable across models and batches.

Memory does not grow with vocabulary times prompt length: only target positions are unembedded, and
at most `LOGITS_AT_ONCE` logits exist at a time, with or without gradients.

Reference: arXiv 2505.13737, which uses sums instead of means: with sums, G- collapses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparse_tl.backend import HookedModel, adapt, in_evaluation_mode
from sparse_tl.data import TokenStream
from sparse_tl.data.batches import TokenBatch, token_losses
from sparse_tl.gates import GatedRun, Heads
from sparse_tl.progress import tracked
from sparse_tl.training.loop import Objective

Gates = Float[Tensor, "stack layer head"]
Final = Float[Tensor, "stack label d_model"]
Losses = Float[Tensor, "stack label"]
Labels = Int[Tensor, " label"]

LOGITS_AT_ONCE = 2**24
"""Maximum number of logits at a time: 64 MB in float32."""
ACTIVATIONS_AT_ONCE = 2**25
"""Maximum number of activations of a layer in a pass: 128 MB in float32."""
LARGEST_LOGIT = 4.0
"""Absolute value of theta beyond which the penalty is constant: gates of 0.018 and 0.982."""
LARGEST_MARGIN = 5.0
"""Margin in nats between retained and forgotten targets beyond which the objective is constant."""


def gated_heads_run(model: HookedModel, batch: TokenBatch) -> tuple[GatedRun, Labels]:
    """A run of prompts under head gates, read where a target is predicted, and the targets."""
    batch = batch.trimmed(causal=adapt(model).causal)
    run = GatedRun(
        model, Heads(), batch.tokens, batch.loss_mask, attention_mask=batch.attention_mask
    )
    return run, batch.loss_labels()


def label_losses(model: HookedModel, final: Final, labels: Labels) -> Losses:
    """The negative log-probability in nats of labels, given final residual streams."""
    size = max(1, LOGITS_AT_ONCE // (len(final) * adapt(model).d_vocab_out))
    losses = []
    for piece in zip(final.split(size, dim=1), labels.split(size), strict=True):
        if torch.is_grad_enabled() and size < len(labels):
            # Recompute the logits in the backward pass instead of storing them.
            loss = checkpoint(_losses, model, *piece, use_reentrant=False)
            assert isinstance(loss, Tensor)
        else:
            loss = _losses(model, *piece)
        losses.append(loss)
    return torch.cat(losses, dim=1)


def _losses(model: HookedModel, final: Final, labels: Labels) -> Losses:
    logits = adapt(model).logits(final).flatten(0, 1)
    return token_losses(logits, labels.repeat(len(final))).view(len(final), -1)


@in_evaluation_mode
@torch.no_grad()
def target_log_probabilities(
    model: HookedModel,
    rows: TokenBatch,
    gates: Gates,
    *,
    title: str = "log-probabilities",
    progress: bool = False,
) -> Float[Tensor, "stack row"]:
    """The log-probability in nats of each row's target under each gate matrix, on the CPU.

    A pass has as many prompts and matrices as `ACTIVATIONS_AT_ONCE` allows, and starts at the first
    layer in which a gate of its matrices is not 1.
    """
    adapter, length = adapt(model), rows.tokens.shape[1]
    per_row = length * (adapter.n_heads * length + adapter.activations_per_token)
    rows_at_once = max(1, ACTIVATIONS_AT_ONCE // per_row)
    n_rows = min(64, rows_at_once, len(rows))
    stacks = gates.to(adapter.device).split(max(1, rows_at_once // n_rows))
    batches = rows.split(n_rows)
    by_batch = []
    with tracked(title, len(batches) * len(stacks), progress) as step:
        for batch in batches:
            run, labels = gated_heads_run(model, batch.to(adapter.device))
            if bool((gates[:, 0] == 1).all(dim=1).any()):  # layers before closed gates run once
                run.start_from(None)
            row_of = batch.loss_mask.nonzero()[:, 0].cpu()
            pieces = []
            for stack in stacks:
                losses = label_losses(model, run.final(stack), labels).cpu().double()
                summed = losses.new_zeros(len(stack), len(batch))
                pieces.append(summed.index_add_(1, row_of, losses, alpha=-1))
                step()
            by_batch.append(torch.cat(pieces))
    return torch.cat(by_batch, dim=1)


class GatedHeads(nn.Module):
    """A model with a stack of trainable head gates, ``sigmoid(theta)``, and frozen weights."""

    def __init__(self, model: HookedModel, theta: Gates) -> None:
        super().__init__()
        self.model = model
        self.theta = nn.Parameter(theta.clone())

    def forward(self, batch: TokenBatch) -> Losses:
        """The negative log-probability in nats of every target token under every gate matrix."""
        run, labels = gated_heads_run(self.model, batch)
        return label_losses(self.model, run.final(self.theta.sigmoid()), labels)

    def mean_theta(self) -> Float[Tensor, " stack"]:
        """The mean over heads of clamped theta."""
        return self.theta.clamp(-LARGEST_LOGIT, LARGEST_LOGIT).mean(dim=(1, 2))


@dataclass
class Likelihood(Objective):
    """The objective that makes targets likely; it also records the gates during training."""

    gated: GatedHeads
    lambda_: float
    record_every: int

    def __post_init__(self) -> None:
        self.updates = 0
        # On the CPU, as after loading a checkpoint.
        self.recorded = [self.gated.theta.detach().cpu().clone()]

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, fraction_done: float
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        losses = self.gated(batch).mean(dim=1)
        # No term depends on two seeds, so the sum has the gradient of each seed.
        objective = losses - self.lambda_ * self.gated.mean_theta()
        return objective.sum(), {"loss": losses.mean().item()}

    def update(self, fraction_done: float) -> dict[str, float]:
        self.updates += 1
        if self.updates % self.record_every == 0:
            self.recorded.append(self.gated.theta.detach().cpu().clone())
        return {}

    def state(self) -> dict[str, Any]:
        return {"updates": self.updates, "recorded": torch.stack(self.recorded)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        self.recorded = list(state["recorded"])


@dataclass
class Contrast(Likelihood):
    """The objective that makes the training stream's targets likely, and others unlikely."""

    forget: TokenStream

    def measure(
        self, batch: TokenBatch, generator: torch.Generator, fraction_done: float
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        to_forget = self.forget.batch(self.updates)
        retained, forgotten = (
            -self.gated(rows.to(batch.tokens.device)).mean(dim=1) for rows in (batch, to_forget)
        )
        margin = (forgotten - retained.detach()).clamp(min=-LARGEST_MARGIN)
        objective = -retained + margin - self.lambda_ * self.gated.mean_theta()
        return objective.sum(), {
            "loss": -retained.mean().item(),
            "forgotten": -forgotten.mean().item(),
        }
