"""Measurements of a dense or sparse model on held-out rows."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from statistics import mean

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, checked
from sparse_tl.backend import Model, adapt, check_rows, in_evaluation_mode
from sparse_tl.data.batches import TokenBatch, exact_rows, token_losses
from sparse_tl.devices import SizeByDevice
from sparse_tl.gates import AttentionEdgeCounts, SparseTransformer
from sparse_tl.gates.sparse.learned_gates import costs_of_first
from sparse_tl.results import Result
from sparse_tl.training.distillation import (
    DensePredictions,
    Reference,
    losses_and_divergences,
    under_gates,
)

LOGITS_PER_PASS = SizeByDevice(cpu=2**26, elsewhere=2**28)
"""Maximum number of logits in one forward pass, of which there are a few copies."""


@dataclass(frozen=True, repr=False)
class HeldOut(Result):
    """Measurements of a model on held-out examples.

    Args:
        loss: mean cross-entropy in nats over all loss positions.
        accuracy: fraction of examples that are right at every loss position.
        active_attention_edges: open edges per example; for a dense model, all possible edges.
        active_attention_edges_per_token: open edges per token.
        possible_attention_edges: causal attention edges per example.
        active_heads: number of heads with at least one active edge in some example.
        group_losses: mean loss by group number; rows without groups form group 0.
        divergence: mean ``KL(dense || model)`` in nats over all loss positions, if measured.
        group_divergences: the same by group number.
        group_edges: open attention edges per token by group number.
        group_sizes: open attention edges, weighted by cost, plus open MLP outputs, per example, by
            group number.
        active_mlps: open MLP outputs per example, one per layer and token. This field and the next
            two are None if MLPs have no gates, as in a dense model.
        possible_mlps: number of layers times tokens per example.
        active_size: open attention edges, weighted by cost, plus open MLP outputs, per example.
    """

    loss: float
    accuracy: float
    active_attention_edges: float
    active_attention_edges_per_token: float
    possible_attention_edges: float
    active_heads: int
    group_losses: dict[int, float] = field(default_factory=dict)
    active_mlps: float | None = None
    possible_mlps: float | None = None
    active_size: float | None = None
    divergence: float | None = None
    group_divergences: dict[int, float] = field(default_factory=dict)
    group_sizes: dict[int, float] = field(default_factory=dict)
    group_edges: dict[int, float] = field(default_factory=dict)

    @property
    def log_size(self) -> float:
        """The mean over groups of ``log(1 + size)``: what post-training minimises."""
        return mean(map(math.log1p, self.group_sizes.values()))

    @property
    def edges_per_token(self) -> float:
        """The mean over groups of open attention edges per token: what `target_edges` is about."""
        return mean(self.group_edges.values())

    @property
    def numbers(self) -> dict[str, float]:
        """All measurements except those of groups, by name."""
        return {
            name: value
            for name, value in asdict(self).items()
            if not name.startswith("group_") and value is not None
        }

    def __repr__(self) -> str:
        return (
            f"HeldOut(loss {self.loss:.4g} nats, {self.accuracy:.1%} of the examples right, "
            f"{self.active_attention_edges:,.2f} of {self.possible_attention_edges:,.0f} attention "
            f"edges active, {self.active_heads} heads in use{self.mlps})"
        )

    @property
    def mlps(self) -> str:
        """A phrase on MLP outputs for reprs and verdicts; empty without MLP gates."""
        if self.active_mlps is None:
            return ""
        return f", {self.active_mlps:,.2f} of {self.possible_mlps:,.0f} MLP outputs active"


@dataclass(frozen=True, eq=False)
class DenseAndSparse:
    """Measurements of the dense and the sparse model on the same rows."""

    dense: HeldOut
    sparse: HeldOut

    @property
    def loss_increase(self) -> float:
        """The sparse model's loss minus the dense model's, in nats."""
        return self.sparse.loss - self.dense.loss

    @property
    def times_fewer(self) -> float:
        """Possible attention edges over active ones; infinite if none is active."""
        active = self.sparse.active_attention_edges
        return self.sparse.possible_attention_edges / active if active else math.inf

    def row(self) -> dict[str, float]:
        """The main numbers of both models, by name."""
        dense, sparse = self.dense, self.sparse
        return {
            "dense loss": dense.loss,
            "sparse loss": sparse.loss,
            "divergence": math.nan if sparse.divergence is None else sparse.divergence,
            "dense edges per token": dense.active_attention_edges_per_token,
            "sparse edges per token": sparse.active_attention_edges_per_token,
            "times fewer": self.times_fewer,
        }


@checked
@in_evaluation_mode
@torch.no_grad()
def evaluate_held_out(
    model: Model | SparseTransformer,
    examples: TokenBatch,
    *,
    batch_size: AtLeastOne | None = None,
    edge_cost: Float[Tensor, "*#edge"] | None = None,
    dense: Reference | DensePredictions | None = None,
) -> HeldOut:
    """Measure loss, accuracy, and what is open under deterministic gates.

    Args:
        model: a dense model or a SparseTransformer.
        examples: held-out rows.
        batch_size: rows per forward pass; by default up to 256, within `LOGITS_PER_PASS`.
        edge_cost: cost per attention edge for `HeldOut.active_size`, broadcastable to
            ``[layer, head, query, key]``; 1 by default.
        dense: the dense model, to measure the divergence from it; a sparse model is run with its
            gates open and its low-rank adapters off. `DensePredictions` reuses predictions.

    Raises:
        ValueError: the rows do not fit the model's vocabulary or context.
    """
    adapter = adapt(model)
    check_rows(adapter, examples)
    most = LOGITS_PER_PASS.on(adapter.device)
    fitting = most // (examples.tokens.shape[1] * adapter.d_vocab_out)
    pieces = [
        part
        for piece in examples.split(batch_size or max(1, min(256, fitting)))
        for part in piece.to(adapter.device).by_length()
    ]
    results = []
    # A dense model is measured as one whose gates are all open.
    with under_gates(model) as wrapped, nullcontext() if wrapped is model else wrapped.opened():
        if dense is not None and not isinstance(dense, DensePredictions):
            dense = DensePredictions(wrapped if dense is model else dense)
        for batch in pieces:
            with adapter.only_at(batch.loss_mask) as logits_at:
                output, counted = wrapped.run_with_counts(
                    batch.tokens,
                    edge_cost=costs_of_first(edge_cost, batch.tokens.shape[1]),
                    **batch.model_kwargs,
                )
            logits = logits_at(output)
            right, labels = exact_rows(logits, batch), batch.loss_labels()
            if dense is None:
                losses, divergences = token_losses(logits, labels), torch.empty(0)
            else:
                losses, divergences = losses_and_divergences(logits, dense.logits(batch), labels)
            of_labels, of_rows = batch.label_groups(), batch.row_groups()
            values = losses.double(), of_labels, divergences.double(), right, of_rows
            edges = {name: x.cpu() for name, x in vars(counted).items() if x is not None}
            results.append((*(x.cpu() for x in values), AttentionEdgeCounts(**edges)))
    *by_label, counts = zip(*results, strict=True)
    edges = AttentionEdgeCounts.concatenate(counts)
    losses, of, divergences, right, of_rows = map(torch.cat, by_label)
    sizes = edges.size_by_prompt()
    active = edges.active.sum(dim=(0, 2)).double()
    groups = of.unique().tolist()
    measured = dense is not None
    return HeldOut(
        loss=losses.mean().item(),
        accuracy=right.double().mean().item(),
        active_attention_edges=edges.active_per_prompt,
        active_attention_edges_per_token=edges.active_per_token,
        possible_attention_edges=edges.possible_per_prompt,
        active_heads=edges.active_heads,
        group_losses={g: losses[of == g].mean().item() for g in groups},
        active_mlps=edges.active_mlps_per_prompt,
        possible_mlps=edges.possible_mlps_per_prompt,
        active_size=None if edges.active_mlps is None else sizes.mean().item(),
        divergence=divergences.mean().item() if measured else None,
        group_divergences={g: divergences[of == g].mean().item() for g in groups if measured},
        group_sizes={g: sizes[of_rows == g].mean().item() for g in groups},
        group_edges={
            g: (active[of_rows == g].sum() / edges.tokens[of_rows == g].sum()).item()
            for g in groups
        },
    )
