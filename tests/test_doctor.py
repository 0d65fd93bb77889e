"""`run_doctor` on this machine, on real and tiny models, and on what is broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sparse_tl import load_addition_models
from sparse_tl.backend import Model, save_model
from sparse_tl.jobs import Check, run_doctor
from sparse_tl.training.memory import TrainingMemory, training_memory


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, for this test."""
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache"


def failed(checks: list[Check]) -> list[Check]:
    return [check for check in checks if not check.works]


def test_this_machine_is_healthy_and_random_numbers_are_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    found = run_doctor()
    assert torch.equal(torch.rand(3), expected)
    assert not failed(found), found
    said = {check.name: check.found for check in found}
    assert said["torch"] == torch.__version__
    assert "writable" in said["cache folder"]
    assert "gates act" in said["small model: gates"]


def test_a_broken_folder(build_tiny: Callable[..., Model], tmp_path: Path) -> None:
    save_model(build_tiny(), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    (found,) = failed(run_doctor(tmp_path, device="cpu"))
    assert found.name == f"model {tmp_path}"


def test_memory_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts, counted another way; longer windows are extrapolated from shorter ones."""
    _, sparse = load_addition_models()
    memory = training_memory(sparse, 10)
    sparse(torch.arange(10)[None]).sum().backward()
    read = [p for p in sparse.model.parameters() if p.grad is not None]
    assert memory.weights == sum(p.nbytes for p in read)
    assert memory.logits == 2 * 10 * sparse.cfg.d_vocab_out * 4
    width, layers = sparse.cfg.d_model, sparse.cfg.n_layers
    assert layers * 10 * 10 * width * 4 < memory.activations < layers * 100 * 10 * width * 4
    assert 10 * width * 4 * layers < memory.checkpointed < memory.activations
    monkeypatch.setattr("sparse_tl.training.memory.PROBED", (4, 8))
    monkeypatch.setattr("sparse_tl.backend.deferred.LONG", 4)
    exact = training_memory(sparse, 8).activations
    monkeypatch.setattr("sparse_tl.training.memory.PROBED", (4, 6))
    assert training_memory(sparse, 8).activations == pytest.approx(exact, rel=0.02)
    checks = {check.name: check.found for check in run_doctor(sparse, window=10)}
    assert str(training_memory(sparse, 10)) in checks.values()
    with pytest.raises(ValueError, match="at most"):
        training_memory(sparse, 10**6)


def test_the_peak_is_in_the_forward_pass_or_in_the_optimizer() -> None:
    parts = {"weights": 10, "trained": 10, "dense": 10, "activations": 30, "checkpointed": 5}
    memory = TrainingMemory(8, masters=0, logits=2, **parts)
    assert (memory.peak, memory.least_peak) == (10 + 62, 10 + 50)
    memory = TrainingMemory(8, masters=7, logits=2, **parts)
    assert (memory.peak, memory.least_peak) == (17 + 62, 17 + 50)
