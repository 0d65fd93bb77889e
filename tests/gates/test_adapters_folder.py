"""Folders with adapters and gates alone: small, exact, and only for the base of the adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import VOCABULARY, plain_transformer
from torch import Tensor

from sparse_tl.backend import add_lora, boot, load_model, save_model
from sparse_tl.backend.lora import lora_off, lora_parameters
from sparse_tl.gates import SparseTransformer

NAMES = ["llama", "gpt2", "mixtral"]


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))


def trained(name: str, gates: Any = "share", **settings: Any) -> SparseTransformer:
    """A model under gates whose adapters and gates are no longer at their start."""
    sparse = SparseTransformer(add_lora(boot(plain_transformer(name)), 4), gates=gates, **settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in [*lora_parameters(sparse.model), *sparse.gates.parameters()]:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return sparse


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gates", ["share", "score"])
def test_adapters_come_back_on_their_base(name: str, gates: str, tmp_path: Path) -> None:
    sparse, base = trained(name, gates, mlps=True), boot(plain_transformer(name))
    dense = base(tokens()).detach()
    folder = sparse.save_pretrained(tmp_path / "small", adapters_only=True)
    assert {path.name for path in folder.iterdir()} == {
        *("adapters.safetensors", "gates.json", "gates.safetensors")
    }
    loaded = SparseTransformer.from_pretrained(folder, base=base)
    assert loaded.model is base and loaded.gates.kind == gates
    with torch.no_grad():
        assert torch.equal(loaded(tokens()), sparse(tokens()))
    with lora_off(loaded), loaded.opened():
        assert torch.allclose(loaded(tokens()), dense, atol=1e-5)
    assert len(lora_parameters(loaded)) == len(lora_parameters(sparse))


def test_the_base_may_be_a_folder(tmp_path: Path) -> None:
    save_model(boot(plain_transformer("llama")), tmp_path / "base")
    model = load_model(tmp_path / "base", device="cpu")
    sparse = SparseTransformer(add_lora(model, 2))
    folder = sparse.save_pretrained(tmp_path / "small", adapters_only=True)
    loaded = SparseTransformer.from_pretrained(folder, base=tmp_path / "base", device="cpu")
    with torch.no_grad():
        assert torch.equal(loaded(tokens()), sparse(tokens()))


def test_a_whole_folder_replaces_a_small_one_and_back(tmp_path: Path) -> None:
    sparse, folder = trained("llama"), tmp_path / "sparse"
    with torch.no_grad():
        expected = sparse(tokens())
        for adapters_only in (True, False, True):
            sparse.save_pretrained(folder, adapters_only=adapters_only)
            base = boot(plain_transformer("llama")) if adapters_only else None
            loaded = SparseTransformer.from_pretrained(folder, base=base, device=None)
            assert torch.allclose(loaded(tokens()).cpu(), expected, atol=1e-4)


def test_another_base_is_refused_before_it_changes(tmp_path: Path) -> None:
    folder = trained("llama").save_pretrained(tmp_path / "small", adapters_only=True)
    other = boot(plain_transformer("llama"))
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-3
    with pytest.raises(ValueError, match=r"weights of hash \w{12}, on which the adapters"):
        SparseTransformer.from_pretrained(folder, base=other)
    assert not lora_parameters(other)
    adapted = add_lora(boot(plain_transformer("llama")), 4)
    with pytest.raises(ValueError, match="a base model without adapters"):
        SparseTransformer.from_pretrained(folder, base=adapted)


def test_a_base_is_needed_by_adapters_and_by_nothing_else(tmp_path: Path) -> None:
    sparse = trained("llama")
    small = sparse.save_pretrained(tmp_path / "small", adapters_only=True)
    with pytest.raises(ValueError, match=r"from_pretrained\(folder, base=\.\.\.\)"):
        SparseTransformer.from_pretrained(small)
    whole = sparse.save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match="holds a whole model"):
        SparseTransformer.from_pretrained(whole, base=boot(plain_transformer("llama")))
