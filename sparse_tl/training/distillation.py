"""The frozen dense model, its predictions, and cross-entropy and divergence from them.

With the log-probabilities ``l = log softmax(logits)``, the dense model's probabilities ``q``, a
label ``y`` and the share ``d`` of the prediction,

    loss = -l_y,    minimised = (1 - d) loss - d sum_v q_v l_v
    d minimised / d logits_v  =  exp(l_v) - (1 - d) [v = y] - d q_v

At tens of thousands of tokens, these tensors are the largest of a step, and each operation reads
and writes one in main memory. Here the labels are processed in small chunks, so that intermediate
values stay in the cache, and the gradient overwrites the dense model's logits. If the unembedding
is frozen, no logits are kept: each chunk's gradient with respect to the final residual stream is
computed at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparse_tl.backend import (
    Model,
    adapt,
    has_sharded_weights,
    lora_off,
    lora_parameters,
    read_parameters,
)
from sparse_tl.contexts import autograd
from sparse_tl.data.batches import TokenBatch, log_probabilities
from sparse_tl.devices import SizeByDevice
from sparse_tl.gates import SparseTransformer
from sparse_tl.gates.sparse.learned_gates import using

Reference = Model | SparseTransformer
"""A dense model, or a sparse one that `as_dense` makes dense within a block."""
KEPT = 2**30
"""Bytes of main memory, and of a checkpoint, for rows that may recur; the first ones are kept."""
LOGITS_PER_CHUNK = SizeByDevice(cpu=2**19, elsewhere=2**25)
"""Logits per chunk of labels; on a CPU, its intermediate values fit into the cache."""
LOGITS_AT_ONCE = SizeByDevice(cpu=2**22, elsewhere=2**28)
"""Logits that are computed at once from the residual stream, each of which reads all weights."""

Unembed = Callable[[Tensor], Tensor]
"""Function from the final residual stream ``[label, d_model]`` to logits ``[label, vocab]``."""


def reference_of(
    sparse: SparseTransformer, trained: Iterable[str], precision: str = "float32"
) -> Reference:
    """The dense reference of a sparse model while the named parameters are trained.

    If only gates and low-rank adapters are trained, it is the sparse model itself, which stays the
    dense model under open gates without adapters. Otherwise it is a copy, in bfloat16 for "bf16".
    """
    if not needs_copy(sparse, trained):
        return sparse
    copy = sparse.dense_copy()
    return copy if precision == "float32" else copy.to(torch.bfloat16)


def needs_copy(sparse: SparseTransformer, trained: Iterable[str]) -> bool:
    """Whether the dense model's own weights are among the trained parameters."""
    dense = {id(p) for p in sparse.model.parameters()} - {id(p) for p in lora_parameters(sparse)}
    parameters = read_parameters(sparse)
    return any(id(parameters[name]) in dense for name in trained)


@contextmanager
def under_gates(model: Reference) -> Iterator[SparseTransformer]:
    """Wrap a dense model in gates within the block; a sparse model is its own wrapper."""
    if isinstance(model, SparseTransformer):
        yield model
        return
    wrapped = SparseTransformer(model)
    try:
        yield wrapped
    finally:
        wrapped.unwrap()


@contextmanager
def as_dense(sparse: SparseTransformer) -> Iterator[None]:
    """Make a sparse model compute as the dense one within the block."""
    with sparse.opened(), lora_off(sparse):
        yield


@contextmanager
def predicting(reference: Reference) -> Iterator[None]:
    """Make a reference predict as the dense model within the block, long prompts by blocks."""
    with (
        under_gates(reference) as wrapped,
        as_dense(wrapped),
        using([wrapped.gates], by_blocks=True),
    ):
        yield


class DensePredictions:
    """The dense model's logits at the labels of batches, computed once for rows that recur.

    For each row, the residual stream after the last layer is kept at its labels: a few hundred
    numbers, from which the final norm and the unembedding compute the exact logits at a fifth or
    less of the cost of a forward pass.

    Args:
        model: the frozen dense model, or a sparse one that is run as such.
        capacity: maximum number of bytes to keep.

    Raises:
        ValueError: when it is run, the dense model is the one inside a sparse model.
    """

    def __init__(self, model: Reference, capacity: int = KEPT) -> None:
        self.model, self._free = model, capacity
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def logits(self, batch: TokenBatch) -> Float[Tensor, "label vocab"]:
        """The logits at the labels of a batch, in row-major order, as a new tensor."""
        adapter = adapt(self.model)
        if has_sharded_weights(adapter.core):  # only passes of the full model gather weights
            with predicting(self.model), adapter.only_at(batch.loss_mask) as logits_at:
                return logits_at(self.model(batch.tokens, **batch.model_kwargs))
        return self.unembed(self.final(batch))

    @torch.no_grad()
    def final(self, batch: TokenBatch) -> Float[Tensor, "label d_model"]:
        """The residual stream after the last layer at the labels of a batch."""
        if adapt(self.model).random:
            return self._run(batch)
        keys, sizes = _keys(batch), batch.loss_mask.sum(dim=1).tolist()
        device = batch.tokens.device
        found = {
            row: self._kept[key].to(device) for row, key in enumerate(keys) if key in self._kept
        }
        new = [row for row, size in enumerate(sizes) if size and row not in found]
        if new:
            final = self._run(batch.select(torch.tensor(new, device=device)))
            for row, values in zip(new, final.split([sizes[row] for row in new]), strict=True):
                self._keep(keys[row], values)
                found[row] = values
        return torch.cat([found[row] for row, size in enumerate(sizes) if size])

    @torch.no_grad()
    def unembed(self, final: Float[Tensor, "label d_model"]) -> Float[Tensor, "label vocab"]:
        """The logits for a final residual stream."""
        return adapt(self.model).unembed(final)

    def _run(self, batch: TokenBatch) -> Float[Tensor, "label d_model"]:
        read = batch.loss_mask
        with predicting(self.model):
            final = adapt(self.model).final(batch.tokens, read=read, **batch.model_kwargs)
        return final[read]

    def _keep(self, key: str, values: Float[Tensor, "label d_model"]) -> None:
        if key not in self._kept and values.nbytes <= self._free:
            self._kept[key] = values.to("cpu", copy=True)
            self._free -= values.nbytes

    def state(self) -> dict[str, Any]:
        """The kept rows, for a checkpoint.

        A resumed run needs them to compute the same numbers: the last bits of a row's numbers
        depend on the other rows of its pass.
        """
        if not self._kept:
            return {}
        sizes = {key: len(values) for key, values in self._kept.items()}
        return {"dense_sizes": sizes, "dense_final": torch.cat([*self._kept.values()])}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the state in a checkpoint."""
        if sizes := state.get("dense_sizes"):
            rows = state["dense_final"].split([*sizes.values()])
            for key, values in zip(sizes, rows, strict=True):
                self._keep(key, values)


def _keys(batch: TokenBatch) -> list[str]:
    """A hash of everything that each row's final residual stream at its labels depends on."""
    parts = [batch.tokens, batch.loss_mask.long()]
    if batch.attention_mask is not None:
        parts.append(batch.attention_mask.long())
    rows = torch.cat(parts, dim=1).cpu().numpy()
    return [hashlib.blake2b(row.data, digest_size=16).hexdigest() for row in rows]


def distilled_from(
    final: Float[Tensor, "label d_model"],
    unembed: Unembed,
    dense: Float[Tensor, "label d_model"],
    dense_unembed: Unembed,
    labels: Int[Tensor, " label"],
    share: float,
) -> tuple[Float[Tensor, " label"], Float[Tensor, " label"]]:
    """As `distilled`, from the final residual stream of both models."""
    one = unembed(final[:1].detach())
    if one.requires_grad or not len(labels):  # it is trained
        return distilled(unembed(final), dense_unembed(dense), labels, share)
    return _FromFinal.apply(final, unembed, dense, dense_unembed, labels, share, one.shape[1])


def distilled(
    logits: Float[Tensor, "label vocab"],
    dense: Float[Tensor, "label vocab"],
    labels: Int[Tensor, " label"],
    share: float,
) -> tuple[Float[Tensor, " label"], Float[Tensor, " label"]]:
    """The minimised value of every label, which has a gradient, and its loss; both in nats.

    The logits of the dense model are overwritten.
    """
    return _Distilled.apply(logits, dense, labels, share)


def losses_and_divergences(
    logits: Float[Tensor, "label vocab"],
    dense: Float[Tensor, "label vocab"],
    labels: Int[Tensor, " label"],
) -> tuple[Float[Tensor, " label"], Float[Tensor, " label"]]:
    """Loss and divergence ``sum_v q_v (log q_v - l_v)`` of every label, in nats; no gradients."""
    losses, divergences = [], []
    for rows in _chunks(labels, logits.shape[1], LOGITS_PER_CHUNK):
        log_p, log_q = log_probabilities(logits[rows]), log_probabilities(dense[rows])
        losses.append(-log_p.gather(1, labels[rows, None])[:, 0])
        divergences.append((log_q.exp() * log_q.sub_(log_p)).sum(dim=-1))
    return torch.cat(losses), torch.cat(divergences)


def _chunks(labels: Tensor, vocabulary: int, most: SizeByDevice) -> Iterator[slice]:
    """Slices of labels with at most `most` logits each."""
    size = max(1, most.on(labels.device) // vocabulary)
    return (slice(start, start + size) for start in range(0, max(1, len(labels)), size))


class _FromFinal(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        final: Tensor,
        unembed: Unembed,
        dense: Tensor,
        dense_unembed: Unembed,
        labels: Tensor,
        share: float,
        vocabulary: int,
    ) -> tuple[Tensor, Tensor]:
        by_final = torch.empty_like(final)
        found = []
        for rows in _chunks(final, vocabulary, LOGITS_AT_ONCE):
            with autograd(True):
                read = final[rows].detach().requires_grad_()
                logits = unembed(read)
                pair = distilled(logits, dense_unembed(dense[rows]), labels[rows], share)
                (by_final[rows],) = torch.autograd.grad(pair[0].sum(), read)
            found.append([values.detach() for values in pair])
        minimised, loss = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(by_final)
        ctx.mark_non_differentiable(loss)
        return minimised, loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, by_minimised: Tensor, _by_loss: Tensor
    ) -> Any:
        (by_final,) = ctx.saved_tensors
        return by_final * by_minimised[:, None].to(by_final.dtype), *[None] * 6


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, dense: Tensor, labels: Tensor, share: float
    ) -> tuple[Tensor, Tensor]:
        by_logits = dense if dense.dtype == logits.dtype else torch.empty_like(logits)
        losses, crossed = [], []
        for rows in _chunks(labels, logits.shape[1], LOGITS_PER_CHUNK):
            label = labels[rows, None]
            log_p = log_probabilities(logits[rows])
            q = dense[rows].to(log_p).softmax(dim=-1)
            losses.append(-log_p.gather(1, label)[:, 0])
            crossed.append(-(q * log_p).sum(dim=-1))
            slope = log_p.exp_().sub_(q, alpha=share)
            slope.scatter_add_(1, label, torch.full_like(label, share - 1, dtype=slope.dtype))
            by_logits[rows] = slope
        loss = torch.cat(losses)
        ctx.by_logits = by_logits
        ctx.mark_non_differentiable(loss)
        return (1 - share) * loss + share * torch.cat(crossed), loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_minimised: Tensor, _by_loss: Tensor) -> Any:  # type: ignore[override]
        by_logits, ctx.by_logits = ctx.by_logits, None  # overwritten, so a second pass fails
        return by_logits.mul_(by_minimised[:, None]), None, None, None
