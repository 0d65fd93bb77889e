"""Post-training of low-rank adapters: only they and the gates move, and nothing is copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from architectures import plain_transformer
from short_runs import (
    check_resumes,
    moved,
    often,
    post_train_module,
    random_rows,
    short_run,
    weights,
)
from tiny import keep_last_weights

from sparse_tl.backend import adapt, add_lora, boot, lora_parameters
from sparse_tl.data import ShuffledStream, TokenStream
from sparse_tl.gates import SparseTransformer
from sparse_tl.storage.files import read_tensors
from sparse_tl.training import PostTraining, evaluate_held_out

LORA = {"gates": 1e-1, "lora": 1e-2}


def adapted(name: str = "llama", **settings: Any) -> SparseTransformer:
    model = add_lora(boot(plain_transformer(name)), 4)
    return SparseTransformer(model, initial_bias=2.0, **settings)


def trained(sparse: SparseTransformer, **settings: Any) -> PostTraining:
    stream = ShuffledStream(random_rows(), 16)
    defaults = {"target_loss": "+0.5", "learning_rate": LORA, "stream": stream}
    return short_run(sparse, random_rows, **{**defaults, **settings})


@pytest.fixture
def last_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was measured, so that the weights that are left are trained ones."""
    keep_last_weights(monkeypatch)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("rates", [1e-2, LORA], ids=["all", "by name"])
def test_only_adapters_and_gates_move(name: str, rates: Any, last_is_kept: None) -> None:
    sparse = adapted(name)
    before = weights(sparse)
    flags = [p.requires_grad for p in sparse.parameters()]
    trained(sparse, learning_rate=rates)
    assert moved(before, sparse) == {key for key in before if "lora_" in key} | {"gates.bias"}
    assert [p.requires_grad for p in sparse.parameters()] == flags


@pytest.mark.long
def test_a_run_without_a_copy_is_the_run_with_one(
    last_is_kept: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, beside = adapted(), adapted()
    measured = evaluate_held_out(alone.dense_copy(), random_rows(seed=1))
    found = trained(alone)
    assert found.dense.loss == measured.loss
    assert found.dense.active_attention_edges == measured.possible_attention_edges
    monkeypatch.setattr(post_train_module, "reference_of", lambda sparse, *_: sparse.dense_copy())
    expected = trained(beside)
    for column in ("loss", "size", "validation_loss", "lambda"):
        assert found.history[column].notna().any()
        assert found.history[column].equals(expected.history[column])
    theirs = weights(beside)
    assert all(torch.equal(now, theirs[key]) for key, now in weights(alone).items())


def test_what_is_copied_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[SparseTransformer] = []
    copy = SparseTransformer.dense_copy

    def noted(self: SparseTransformer) -> Any:
        copies.append(self)
        return copy(self)

    monkeypatch.setattr(SparseTransformer, "dense_copy", noted)
    trained(adapted(), steps=1)
    sparse = SparseTransformer(boot(plain_transformer("llama")), initial_bias=2.0)
    trained(sparse, steps=1, learning_rate={"gates": 1e-2})
    assert not copies
    trained(sparse, steps=1, learning_rate={"qk": 1e-2})
    assert copies == [sparse]


@pytest.mark.long
def test_it_learns(last_is_kept: None) -> None:
    """On the rows that it is trained on, of gates that stay open."""
    sparse = adapted()
    before = evaluate_held_out(sparse, random_rows()).loss
    trained(sparse, steps=40, learning_rate={"lora": 1e-2}, target_loss="+0.01")
    assert evaluate_held_out(sparse, random_rows()).loss < before - 0.5


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_is_saved_has_them_in_its_weights(
    name: str, last_is_kept: None, tmp_path: Path
) -> None:
    sparse, tokens = adapted(name), random_rows(seed=2).tokens
    trained(sparse)
    found = sparse(tokens)
    loaded = SparseTransformer.from_pretrained(sparse.save_pretrained(tmp_path / "sparse"))
    assert not lora_parameters(loaded)
    assert torch.allclose(loaded(tokens), found, rtol=1e-4, atol=1e-4)
    assert torch.equal(loaded.gates.bias, sparse.gates.bias)
    assert torch.equal(sparse(tokens), found)


@pytest.mark.long
def test_a_stopped_run_goes_on_exactly(
    last_is_kept: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    often(monkeypatch, 6)

    def run(stream: TokenStream, **settings: Any) -> tuple[SparseTransformer, pd.DataFrame]:
        sparse = adapted()
        return sparse, trained(sparse, stream=stream, **settings).history

    _, resumed = check_resumes(run, ShuffledStream(random_rows(), 16), tmp_path / "c", 4)
    held = read_tensors(tmp_path / "c" / "tensors.safetensors")
    names = {key.partition("/")[2] for key in held if key.startswith(("weights/", "best/"))}
    assert names == {key for key in weights(resumed) if "lora_" in key} | {"gates.bias"}


@pytest.mark.parametrize("name", ["use_attn_result", "use_split_qkv_input"])
def test_switches_that_leave_adapters_out(name: str) -> None:
    sparse = adapted()
    setattr(sparse.cfg, name, True)
    with pytest.raises(ValueError, match=rf"{name} of .*merge_lora"):
        trained(sparse)
    with pytest.raises(ValueError, match=name):
        _ = adapt(sparse).graph
