"""The frozen dense model that post-training compares with; copied only if necessary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from sparse_tl.calls.scopes import scope
from sparse_tl.gates import SparseTransformer
from sparse_tl.gates.sparse.attention import attention_by_blocks
from sparse_tl.gates.sparse.computed_gates import using
from sparse_tl.lens import Model, check_raw, lora_off, lora_parameters, read_parameters

Reference = Model | SparseTransformer
"""A dense model, or a sparse one that `as_dense` makes dense within a block."""


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


@scope
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


@scope
def as_dense(reference: Reference) -> Iterator[None]:
    """Make a reference compute as the dense model within the block."""
    if not isinstance(reference, SparseTransformer):
        yield
        return
    with reference.opened(), lora_off(reference):
        yield


@scope
def predicting(reference: Reference) -> Iterator[None]:
    """Make a reference predict as the dense model within the block, long prompts by blocks."""
    with as_dense(reference):
        if isinstance(reference, SparseTransformer):
            by_blocks = using([reference.gates], by_blocks=True)
        else:
            by_blocks = attention_by_blocks(reference)
        with by_blocks:
            yield
