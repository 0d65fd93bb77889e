"""The frozen dense model that post-training compares with, and its predictions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_tl.backend import (
    Model,
    adapt,
    check_raw,
    gate_hooks,
    has_sharded_weights,
    lora_off,
    lora_parameters,
    read_parameters,
)
from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import SparseTransformer
from sparse_tl.gates.sparse.computed_gates import attention_by_blocks, using

Reference = Model | SparseTransformer
"""A dense model, or a sparse one that `as_dense` makes dense within a block."""
KEPT = 2**30
"""Bytes of main memory, and of a checkpoint, for rows that may recur; the first ones are kept. At a
residual stream of 576 entries, 2,000 windows of 128 tokens take 0.6 GB."""


def reference_of(
    sparse: SparseTransformer, trained: Iterable[str], precision: str = "float32"
) -> Reference:
    """The dense reference of a sparse model while some of its parameters are trained.

    If only gates and low-rank adapters are trained, it is the sparse model itself: with its gates
    open and its adapters off, that stays the dense model. Otherwise it is a copy.

    Args:
        sparse: trained model.
        trained: names of the trained parameters.
        precision: "bf16" makes the copy in bfloat16, which halves its memory.

    Raises:
        ValueError: the weights were processed, so the model can be neither copied nor saved.
    """
    if not needs_copy(sparse, trained):
        check_raw(sparse.model)
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
def as_dense(reference: Reference) -> Iterator[None]:
    """Make a reference compute as the dense model within the block."""
    if not isinstance(reference, SparseTransformer):
        yield
        return
    with reference.opened(), lora_off(reference):
        yield


@contextmanager
def predicting(reference: Reference) -> Iterator[None]:
    """Make a reference predict as the dense model within the block, long prompts by blocks."""
    with as_dense(reference):
        if isinstance(reference, SparseTransformer):
            by_blocks = using([reference.gates], by_blocks=True)
        else:
            by_blocks = attention_by_blocks(reference)
        with by_blocks:
            yield


class DensePredictions:
    """The dense model's logits at the labels of batches, computed once for rows that recur.

    Training goes over the same windows many times, while the dense model does not change. For each
    row, the residual stream after the last layer is kept at its labels. From it, the final norm and
    the unembedding compute the exact logits: a few hundred numbers in place of tens of thousands of
    logits, at a fifth or less of the cost of a forward pass.

    Args:
        model: the frozen dense model, or a sparse one that is run as such.
        capacity: maximum number of bytes to keep.

    Raises:
        ValueError: the dense model is inside a sparse one, whose gates would act on it.
    """

    def __init__(self, model: Reference, capacity: int = KEPT) -> None:
        if not isinstance(model, SparseTransformer) and gate_hooks(adapt(model)):
            raise ValueError(
                "the dense model is the one inside the sparse model, whose gates act on it; load "
                "it anew, or give the sparse model, which is then run with its gates open"
            )
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
        if adapt(self.model).core.training:  # with dropout, every pass differs
            return self._run(batch)
        sizes, device = batch.loss_mask.sum(dim=1).tolist(), batch.tokens.device
        keys = _keys(batch)
        new = [row for row, key in enumerate(keys) if sizes[row] and key not in self._kept]
        computed: dict[int, Tensor] = {}
        if new:
            final = self._run(batch.select(torch.tensor(new, device=device)))
            computed = dict(zip(new, final.split([sizes[row] for row in new]), strict=True))
            for row, values in computed.items():
                self._keep(keys[row], values)
            if sum(map(bool, sizes)) == len(new):
                return final
        parts = [
            computed[row] if row in computed else self._kept[key].to(device)
            for row, key in enumerate(keys)
            if sizes[row]
        ]
        return torch.cat(parts)

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
        """Keep a row if the capacity allows."""
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
            for key, values in zip(
                sizes, state["dense_final"].split([*sizes.values()]), strict=True
            ):
                self._keep(key, values)


def _keys(batch: TokenBatch) -> list[str]:
    """A hash of everything that each row's final residual stream at its labels depends on."""
    parts = [batch.tokens, batch.loss_mask.long()]
    if batch.attention_mask is not None:
        parts.append(batch.attention_mask.long())
    rows = torch.cat(parts, dim=1).cpu().numpy()
    return [hashlib.blake2b(row.data, digest_size=16).hexdigest() for row in rows]
