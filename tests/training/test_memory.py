"""What is said when there is not enough memory."""

from __future__ import annotations

import pytest
import torch

from sparse_tl import (
    AdditionTask,
    ShuffledStream,
    SparseTransformer,
    TokenBatch,
    load_addition_models,
    post_train,
)
from sparse_tl.training.objectives import SparsityObjective


def _addition() -> tuple[SparseTransformer, TokenBatch]:
    _, sparse = load_addition_models()
    return sparse, AdditionTask().split()[0].select(slice(0, 32))


def _post_train(sparse: SparseTransformer, rows: TokenBatch) -> None:
    stream = ShuffledStream(rows, 8, accumulate=2)
    post_train(sparse, stream, target_loss="+1.0", validation=rows, steps=2, progress=False)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 80 bytes"),
    ],
)
def test_out_of_memory_says_where_it_goes(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    plain = SparsityObjective.measure

    def fail(self: SparsityObjective, batch: object, *args: object) -> object:
        if len(batch) > 1:  # type: ignore[arg-type]
            raise error
        return plain(self, batch, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(SparsityObjective, "measure", fail)
    with pytest.raises(MemoryError, match="ran out of memory on cpu") as caught:
        _post_train(*_addition())
    said = str(caught.value)
    for part in ("8 rows of", "2 micro-batches", "activations of", "--accumulate", "allocate"):
        assert part in said, part


def test_other_errors_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("another")

    monkeypatch.setattr(SparsityObjective, "measure", fail)
    with pytest.raises(RuntimeError, match="^another$"):
        _post_train(*_addition())
