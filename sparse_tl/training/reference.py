"""The frozen dense model that post-training compares with, without a copy where none is needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from sparse_tl.gates import SparseTransformer
from sparse_tl.gates.by_blocks import attention_by_blocks
from sparse_tl.lens import Model, check_raw, lora_off, lora_parameters, read_parameters
from sparse_tl.scopes import scope

Reference = Model | SparseTransformer
"""A dense model, or a sparse one that `as_dense` makes dense for the length of a block."""


def reference_of(
    sparse: SparseTransformer, trained: Iterable[str], precision: str = "float32"
) -> Reference:
    """What the dense model is read from while some parameters of the sparse one are trained.

    Where only gates and low-rank adapters are trained, it is the sparse model itself: with gates
    open and adapters off, it stays the dense model. Otherwise it is a copy.

    Args:
        sparse: model that is trained.
        trained: names of the trained parameters.
        precision: "bf16" makes the copy in bfloat16, in half the memory.

    Raises:
        ValueError: the weights were processed, so that the model cannot be copied or saved.
    """
    if not needs_copy(sparse, trained):
        check_raw(sparse.model)
        return sparse
    copy = sparse.dense_copy()
    return copy if precision == "float32" else copy.to(torch.bfloat16)


def needs_copy(sparse: SparseTransformer, trained: Iterable[str]) -> bool:
    """Whether weights of the model itself are among the trained parameters."""
    own = {id(p) for p in sparse.model.parameters()} - {id(p) for p in lora_parameters(sparse)}
    parameters = read_parameters(sparse)
    return any(id(parameters[name]) in own for name in trained)


@scope
def under_gates(model: Reference) -> Iterator[SparseTransformer]:
    """Inside the block, a dense model is under gates, which stay open in `opened`."""
    if isinstance(model, SparseTransformer):
        yield model
        return
    wrapped = SparseTransformer(model)
    try:
        yield wrapped
    finally:
        wrapped.unwrap()


@scope
def as_dense(reference: Reference) -> Iterator[None]:
    """Inside the block, a reference computes as the dense model."""
    if not isinstance(reference, SparseTransformer):
        yield
        return
    with reference.opened(), lora_off(reference):
        yield


@scope
def predicting(reference: Reference) -> Iterator[None]:
    """Inside the block, a reference computes as the dense model, long prompts by blocks."""
    with as_dense(reference):
        if isinstance(reference, SparseTransformer):
            by_blocks = reference.gates.using(by_blocks=True)
        else:
            by_blocks = attention_by_blocks(reference)
        with by_blocks:
            yield
