"""`run_doctor` on this machine and on models of every kind: what works, and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import plain_transformer
from tiny import tiny_model

from sparse_tl import SparseTransformer, load_addition_models, save_model
from sparse_tl.backend import boot
from sparse_tl.jobs import Check, run_doctor
from sparse_tl.training.memory import TrainingMemory, training_memory

pytestmark = pytest.mark.long


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
    assert len(said) == len(found)
    assert said["torch"] == torch.__version__
    assert "writable" in said["cache folder"]
    assert "gates act" in said["small model: gates"]


def test_a_broken_folder(tmp_path: Path) -> None:
    save_model(tiny_model(), tmp_path)
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


PARTS = ("gates", "circuits", "padding", "saving")


def found(source: Any) -> dict[str, tuple[bool, str]]:
    """By what is checked: whether it works, and what is said."""
    name = source if isinstance(source, Path) else "model"
    checks = {check.name: check for check in run_doctor(source, device="cpu")}
    model = checks[f"model {name}"]
    said = {"load": (model.works, model.found)}
    for part in PARTS:
        check = checks.get(f"model {name}: {part}")
        if check is not None:
            said[part] = check.works, check.found
    return said


def of_folder(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["hugging face", "ours", "sparse", "object", "sparse object"])
def test_all_works(kind: str, tmp_path: Path) -> None:
    source: Any = tmp_path / "folder"
    wrapped = "TransformerBridge around a LlamaForCausalLM: 3 layers of 4 heads on cpu in float32"
    if kind == "hugging face":
        of_folder(plain_transformer("llama"), source)
    elif kind == "ours":
        source.mkdir()
        save_model(tiny_model(), source)
        wrapped = "2 layers of 2 heads on cpu in float32, 13 tokens without a tokenizer, context 16"
    elif kind == "sparse":
        SparseTransformer(boot(plain_transformer("llama"))).save_pretrained(source)
        wrapped = "SparseTransformer around a LlamaForCausalLM"
    elif kind == "object":
        source = boot(plain_transformer("llama"))
    else:
        source = SparseTransformer(boot(plain_transformer("llama")))
        wrapped = "SparseTransformer around a LlamaForCausalLM"
    said = found(source)
    assert set(said) == {"load", *PARTS}
    assert all(works for works, _ in said.values()), said
    assert wrapped in said["load"][1]
    assert "circuit edges" in said["circuits"][1]


def test_processed_weights_and_padding_in_float64() -> None:
    model = boot(plain_transformer("qwen2"))
    model.enable_compatibility_mode(disable_warnings=True)
    said = found(model)
    assert [part for part, (works, _) in said.items() if not works] == ["saving"]
    said = found(boot(plain_transformer("llama", "float64")))
    assert [part for part, (works, _) in said.items() if not works] == ["padding"]
    assert "padded on the right" in said["padding"][1]


def test_padding_that_is_ignored_beside_a_large_activation() -> None:
    """Real models have them at the first token alone."""
    plain = plain_transformer("llama", "bfloat16")
    plain.model.embed_tokens.weight.data[0, 5] = 26_368
    model, final = boot(plain), plain.forward
    assert found(model)["padding"][0]

    def unpadded(*args: Any, attention_mask: Any = None, position_ids: Any = None, **k: Any) -> Any:
        return final(*args, **k)

    plain.__dict__["forward"] = unpadded
    works, said = found(model)["padding"]
    assert not works and "with and without padding on the left differ by" in said
