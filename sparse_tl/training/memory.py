"""Estimates of the memory that a post-training step takes, from passes on short prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from rich.filesize import decimal
from torch import Tensor

from sparse_tl.backend import (
    HookedModel,
    adapt,
    all_activations,
    check_tokens,
    checkpointed_activations,
    read_parameters,
)
from sparse_tl.calls.arguments import is_out_of_memory, reason
from sparse_tl.calls.autograd import autograd
from sparse_tl.data import TokenBatch
from sparse_tl.data.streams import TokenStream
from sparse_tl.gates import SparseTransformer
from sparse_tl.training.constraint import LossConstraint
from sparse_tl.training.loop import choose_trained, is_half
from sparse_tl.training.objectives import SparsityObjective
from sparse_tl.training.reference import needs_copy, under_gates

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
        weights: the weights.
        masters: float32 copies of trained weights in bfloat16.
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
        return self._peak(self.activations)

    @property
    def least_peak(self) -> int:
        """The peak inside `checkpointed_activations`."""
        return self._peak(self.checkpointed)

    def _peak(self, activations: int) -> int:
        forward = 2 * self.trained + activations + self.logits
        return self.weights + self.masters + self.dense + max(forward, 4 * self.trained)

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
        less = f"; {decimal(self.dense // 2)} less with the dense model in bf16"
        if self.dense < self.weights or self.masters:
            less = ""
        listed = ", ".join(f"{name} {decimal(size)}" for name, size in parts.items() if size)
        return (
            f"post-training takes {decimal(self.peak)} at its peak: {listed}; or "
            f"{decimal(self.least_peak)} with checkpointed activations, which take "
            f"{decimal(self.checkpointed)}{less}"
        )


def training_memory(
    model: HookedModel,
    window: int,
    trained: Iterable[str] | None = None,
    precision: str = "float32",
) -> TrainingMemory:
    """Estimate the peak memory of a post-training step on one prompt, in float32.

    Activations and logits take as much again for every further prompt. The estimate does not depend
    on whether `checkpointed_activations` is active.

    Runs forward passes on two short prompts and counts the tensors that they keep, which grow
    linearly for longer windows.

    Args:
        model: dense or sparse model.
        window: tokens of the prompt.
        trained: names of the trained parameters, from `choose_trained`; by default the gates and
            all weights, or, if the model has adapters, the gates and these.
        precision: as in `post_train`; affects only the dense model's copy.

    Raises:
        ValueError: the window is longer than the model's context.
    """
    adapter = adapt(model)
    check_tokens(adapter, torch.zeros(1, window, dtype=torch.long))
    with under_gates(model if isinstance(model, SparseTransformer) else adapter.model) as sparse:
        names = choose_trained(sparse, {"all": 1.0}) if trained is None else [*trained]
        parameters = read_parameters(sparse)
        weights = sum(weight.nbytes for weight in adapter.parameters("all"))
        dense = weights
        if precision == "bf16":
            dense = sum(2 * weight.numel() for weight in adapter.parameters("all"))
        halves = [parameters[name].numel() for name in names if is_half(parameters[name])]
        kept = _at(window, lambda tokens: _kept(sparse, tokens, whole=True))
        checkpointed = _at(window, lambda tokens: _kept(sparse, tokens, whole=False))
        return TrainingMemory(
            window=window,
            weights=weights,
            masters=4 * sum(halves),
            trained=sum(parameters[name].nbytes for name in names) + 2 * sum(halves),
            dense=dense if needs_copy(sparse, names) else 0,
            activations=kept,
            checkpointed=checkpointed + (kept - checkpointed) // adapter.n_layers,
            logits=2 * window * adapter.d_vocab_out * 4,
        )


@contextmanager
def out_of_memory_explained(sparse: SparseTransformer, stream: TokenStream) -> Iterator[None]:
    """Explain an out-of-memory error in the block, in a step or an evaluation of post-training."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        rows, window = stream.batch(0).tokens.shape
        raise MemoryError(
            f"post-training ran out of memory on {adapt(sparse).device}, with steps of {rows} rows "
            f"of {window} tokens; `sparse-tl doctor --window {window}` estimates what one row "
            "needs. To use less, take more micro-batches (the stream's accumulate, --accumulate), "
            "checkpointed_activations (--checkpoint-activations), shorter windows, bf16 "
            "(--precision), more processes (shard_model, --shard), or low-rank adapters in place "
            "of the weights (add_lora, --trained lora); or, if it was in an evaluation, fewer or "
            f"shorter validation rows. ({reason(error)})"
        ) from error


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

    objective = SparsityObjective(sparse, None, torch.tensor([1.0]), LossConstraint())
    batch = TokenBatch.next_token(torch.zeros(1, n_tokens, dtype=torch.long)).to(device)
    generator = torch.Generator(device).manual_seed(0)
    with (
        autograd(True),
        all_activations(sparse),
        nullcontext() if whole else checkpointed_activations(sparse),
        torch.autograd.graph.saved_tensors_hooks(note, lambda values: values),
    ):
        loss, _ = objective.measure(batch, generator, 0.0)
        del loss
    return sum(storages.values())
