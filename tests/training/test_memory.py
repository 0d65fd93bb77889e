"""What needs how much memory, and what is said when there is not enough."""

from __future__ import annotations

from typing import Any

import pytest

from sparse_tl import (
    AdditionTask,
    ShuffledStream,
    SparseTransformer,
    TokenBatch,
    attribute_heads,
    load_addition_models,
    logit_difference,
    post_train,
)
from sparse_tl.backend import Model, read_parameters
from sparse_tl.training import evaluate_held_out
from sparse_tl.training.distillation import reference_of
from sparse_tl.training.loop import in_precision
from sparse_tl.zoo import addition_recipe


def _addition() -> tuple[SparseTransformer, TokenBatch]:
    _, sparse = load_addition_models()
    return sparse, AdditionTask().split()[0].select(slice(0, 32))


@pytest.mark.parametrize("batch_size", [32, 2])
def test_prompts_that_do_not_fit_at_once(batch_size: int) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    sparse, _ = _addition()
    sparse.model.add_hook("blocks.1.hook_mlp_out", fail, is_permanent=True)
    settings: dict[str, Any] = {"batch_size": batch_size, "progress": False}
    with pytest.raises(MemoryError, match=f"batch_size={batch_size}"):
        attribute_heads(sparse, AdditionTask().pairs("units", 4), logit_difference, **settings)


def _small() -> SparseTransformer:
    recipe = addition_recipe()
    size = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_inner": 32}
    small = recipe.changed(architecture={**recipe.architecture, **size})
    return SparseTransformer(small.build(device="cpu"), initial_bias=2.0)


@pytest.mark.long
def test_the_dense_copy_in_bf16() -> None:
    """Its loss is the model's to the precision of bfloat16, and it takes half the memory."""
    sparse, rows = _small(), AdditionTask().split()[0].select(slice(0, 32))
    whole, half = (reference_of(sparse, list(read_parameters(sparse)), k) for k in PRECISIONS)
    assert isinstance(whole, Model) and isinstance(half, Model)
    one, other = (evaluate_held_out(model, rows).loss for model in (whole, half))
    assert one != other and other == pytest.approx(one, rel=0.02, abs=0.02)
    found = [sum(p.nbytes for p in model.parameters()) for model in (whole, half)]
    assert found[0] == 2 * found[1]
    for precision in PRECISIONS:
        sparse = _small()
        outcome = post_train(
            sparse,
            ShuffledStream(rows, 16),
            target_loss="+1.0",
            validation=rows,
            steps=2,
            precision=precision,  # type: ignore[arg-type]
            progress=False,
        )
        sparse = _small()
        with sparse.opened(), in_precision(precision, rows.tokens.device):
            assert outcome.dense.loss == evaluate_held_out(sparse, rows).loss


PRECISIONS = ("float32", "bf16")
