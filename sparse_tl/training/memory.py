"""Estimates of the memory that a post-training step takes, from passes on short prompts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from rich.filesize import decimal
from torch import Tensor

from sparse_tl.backend import (
    HookedModel,
    adapt,
    check_tokens,
    checkpointed_activations,
    read_parameters,
)
from sparse_tl.contexts import autograd
from sparse_tl.data import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.training.constraint import LossConstraint
from sparse_tl.training.distillation import needs_copy, under_gates
from sparse_tl.training.loop import choose_trained
from sparse_tl.training.post_train import SparsityObjective

PROBED = (256, 320)
"""Lengths, in tokens, of the prompts from which longer ones are extrapolated: from here on, every
further token takes the same memory in gated attention."""


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on the device at the peak of a post-training step.

    The peak is either the forward pass, with Adam's two moments, activations and logits, or the
    optimizer's step, with gradients and as much again for its intermediate values:

        weights + masters + dense + max(2 trained + activations + logits, 4 trained)

    Args:
        window: tokens of the step, in one prompt.
        weights, masters: the weights, and float32 copies of trained weights in bfloat16.
        trained: the trained weights, in the precision that they are trained in.
        dense: the frozen copy of the dense model, unless only gates and adapters are trained.
        activations: the tensors that the forward pass keeps for the backward pass.
        checkpointed: the same inside `checkpointed_activations`, plus those of one layer, since the
            backward pass recomputes one layer at a time.
        logits: the softmax of the logits, and their gradient.
    """

    window: int
    weights: int
    masters: int
    trained: int
    dense: int
    activations: int
    checkpointed: int
    logits: int

    @property
    def peak(self) -> int:
        """The peak with all activations kept."""
        forward = 2 * self.trained + self.activations + self.logits
        return self.weights + self.masters + self.dense + max(forward, 4 * self.trained)

    @property
    def least_peak(self) -> int:
        """The peak inside `checkpointed_activations`."""
        return replace(self, activations=self.checkpointed).peak

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "their float32 masters": self.masters,
            "gradients": self.trained,
            "Adam": 2 * self.trained,
            "the dense model": self.dense,
            f"activations of {self.window:,} tokens": self.activations,
            "logits": self.logits,
        }
        listed = ", ".join(f"{name} {decimal(size)}" for name, size in parts.items() if size)
        return (
            f"post-training takes {decimal(self.peak)} at its peak: {listed}; or "
            f"{decimal(self.least_peak)} with checkpointed activations, which take "
            f"{decimal(self.checkpointed)}"
        )


def training_memory(model: HookedModel, window: int) -> TrainingMemory:
    """Estimate the peak memory of a post-training step on one prompt, in float32.

    All weights and gates are trained, or, if the model has adapters, these and the gates.
    Activations and logits take as much again for every further prompt.

    Counts what forward passes on two short prompts keep, which grows linearly from there.
    """
    adapter = adapt(model)
    check_tokens(adapter, torch.zeros(1, window, dtype=torch.long))
    with under_gates(model if isinstance(model, SparseTransformer) else adapter.model) as sparse:
        names = choose_trained(sparse, {"all": 1.0})
        parameters = read_parameters(sparse)
        trained = [parameters[name] for name in names]
        n_half = sum(weight.numel() for weight in trained if weight.dtype == torch.bfloat16)
        weights = sum(weight.nbytes for weight in adapter.parameters("all"))
        kept = _at(window, lambda tokens: _kept(sparse, tokens, whole=True))
        checkpointed = _at(window, lambda tokens: _kept(sparse, tokens, whole=False))
        return TrainingMemory(
            window=window,
            weights=weights,
            masters=4 * n_half,
            trained=sum(weight.nbytes for weight in trained) + 2 * n_half,
            dense=weights if needs_copy(sparse, names) else 0,
            activations=kept,
            checkpointed=checkpointed + (kept - checkpointed) // adapter.n_layers,
            logits=2 * window * adapter.d_vocab_out * 4,
        )


def _at(window: int, kept: Callable[[int], int]) -> int:
    """Bytes kept for a window, extrapolated linearly from shorter ones."""
    first, second = PROBED
    if window <= second:
        return kept(window)
    one, other = kept(first), kept(second)
    return one + (other - one) * (window - first) // (second - first)


def _kept(sparse: SparseTransformer, n_tokens: int, *, whole: bool) -> int:
    """Bytes of all tensors, except weights, that the forward pass of a training step keeps."""
    device = adapt(sparse).device
    weights = {weight.untyped_storage().data_ptr() for weight in read_parameters(sparse).values()}
    storages: dict[int, int] = {}

    def note(values: Tensor) -> Tensor:
        storage = values.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return values

    objective = SparsityObjective(sparse, None, LossConstraint(torch.ones(1)))
    batch = TokenBatch.next_token(torch.zeros(1, n_tokens, dtype=torch.long)).to(device)
    generator = torch.Generator(device).manual_seed(0)
    with (
        autograd(True),
        nullcontext() if whole else checkpointed_activations(sparse),
        torch.autograd.graph.saved_tensors_hooks(note, lambda values: values),
    ):
        loss, _ = objective.measure(batch, generator, 0.0)
        del loss
    return sum(storages.values())
