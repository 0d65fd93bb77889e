"""Weights in bfloat16 are trained through float32 copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from short_runs import check_resumes, short_run

from sparse_tl import AdditionTask, ShuffledStream, SparseTransformer, TokenBatch
from sparse_tl.backend import Model, adapt, load_model, read_parameters, save_model
from sparse_tl.data import TokenStream
from sparse_tl.training import pretrain
from sparse_tl.training.loop import PlainLoss
from sparse_tl.training.memory import training_memory
from sparse_tl.zoo import addition_recipe

SETTINGS: dict[str, Any] = {
    "steps": 4,
    "learning_rate": 1e-4,
    "warmup": 0,
    "decay": 0.0,
    "weight_decay": 0.01,
    "accumulate": 2,
    "evaluate_every": 4,
}


@pytest.fixture
def half(tmp_path: Path) -> Model:
    recipe = addition_recipe()
    size = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_inner": 32}
    small = recipe.changed(architecture={**recipe.architecture, **size})
    save_model(small.build(device="cpu"), tmp_path / "addition")
    return load_model(tmp_path / "addition", device="cpu", dtype="bfloat16")


@pytest.fixture
def rows() -> TokenBatch:
    return AdditionTask().split()[0].select(slice(0, 32))


def _pretrain(model: Model, rows: TokenBatch, **changed: Any) -> None:
    stream = ShuffledStream(rows, 16)
    pretrain(model, stream, validation=rows, progress=False, **{**SETTINGS, **changed})


def test_a_step_is_that_of_float32_weights_under_their_rounded_values(
    half: Model, rows: TokenBatch
) -> None:
    """By hand: gradients of bfloat16 weights, added up and followed in float32."""
    by_hand = {n: p.detach().float().requires_grad_() for n, p in read_parameters(half).items()}
    before = {name: value.detach().clone() for name, value in by_hand.items()}
    optimizer = torch.optim.AdamW(by_hand.values(), lr=1e-4, betas=(0.9, 0.98), weight_decay=0.01)
    stream = ShuffledStream(rows, 16)
    copy = adapt(half).copy()
    weights = read_parameters(copy)
    for step in range(4):
        for start in range(2):
            piece = stream.batch(step).select(slice(start, None, 2))
            loss, _ = PlainLoss(copy).measure(piece, torch.Generator(), 0.0)
            found = torch.autograd.grad(loss / 2, list(weights.values()), allow_unused=True)
            for master, gradient in zip(by_hand.values(), found, strict=True):
                if gradient is not None:
                    earlier = torch.zeros_like(master) if master.grad is None else master.grad
                    master.grad = earlier + gradient.float()
        torch.nn.utils.clip_grad_norm_(by_hand.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(by_hand[name])
    assert any(not torch.equal(by_hand[name], value) for name, value in before.items())
    _pretrain(half, rows)
    for name, weight in read_parameters(half).items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, by_hand[name].bfloat16()), name


@pytest.mark.long
def test_a_resumed_run_is_that_of_an_uninterrupted_one(
    half: Model, rows: TokenBatch, tmp_path: Path
) -> None:
    """The masters are in the checkpoint: their rounded values would not do."""

    def run(stream: TokenStream, **settings: Any) -> tuple[Model, pd.DataFrame]:
        model = adapt(half).copy()
        settings = {**SETTINGS, "checkpoint_every": 2, **settings}
        return model, pretrain(model, stream, validation=rows, progress=False, **settings)

    check_resumes(run, ShuffledStream(rows, 16), tmp_path / "run", 3)


def test_gradients_of_an_earlier_pass_are_not_added(half: Model, rows: TokenBatch) -> None:
    other = adapt(half).copy()
    for parameter in read_parameters(other).values():
        parameter.grad = torch.ones_like(parameter)
    for model in (half, other):
        _pretrain(model, rows)
    theirs = read_parameters(other)
    assert all(torch.equal(p, theirs[name]) for name, p in read_parameters(half).items())


def test_float16_is_refused(half: Model, rows: TokenBatch) -> None:
    with pytest.raises(ValueError, match="float16.*bfloat16"):
        _pretrain(half.to(torch.float16), rows)


def test_they_are_in_the_estimate_of_memory(half: Model, rows: TokenBatch) -> None:
    sparse = SparseTransformer(half)
    memory = training_memory(sparse, 11)
    weights = sum(p.nbytes for p in read_parameters(half).values())
    gates = sum(p.nbytes for n, p in read_parameters(sparse).items() if n.startswith("gates."))
    assert (memory.weights, memory.masters) == (weights, 2 * weights)
    assert memory.trained == 2 * weights + gates
    assert "float32 masters" in str(memory)
    outcome = short_run(sparse, lambda seed=0: rows, target_loss="+1", steps=2)
    assert outcome.history["step"].iloc[-1] == 2
    assert {p.dtype for p in read_parameters(half).values()} == {torch.bfloat16}
