"""A SparseTransformer around a bridge as a folder, whole or with adapters and gates alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import VOCABULARY, plain_transformer
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from sparse_tl.backend import add_lora, boot, load_model, save_model
from sparse_tl.backend.lora import lora_off, lora_parameters
from sparse_tl.gates import HardConcreteGate, SparseTransformer
from sparse_tl.gates.sparse.sparse_transformer import load_dense_or_sparse
from sparse_tl.storage.files import read_tensors, write_tensors
from sparse_tl.tasks.addition import addition_tokenizer

TOKENS = torch.randint(13, (3, 9), generator=torch.Generator().manual_seed(0))


def _trained(name: str, dtype: str) -> SparseTransformer:
    """Gates and weights as after some training."""
    plain = plain_transformer(name, dtype, vocab_size=13)
    dense = load_model(plain, tokenizer=addition_tokenizer())
    sparse = SparseTransformer(dense, distribution=HardConcreteGate())
    with torch.no_grad():
        sparse.gates.bias.normal_(generator=torch.Generator().manual_seed(1))
        for block in dense.blocks:
            for slot in "qk":
                getattr(block.attn, slot).original_component.weight.mul_(1.5)
    return sparse


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", "bfloat16"), ("llama", "float32")])
def test_what_was_trained_comes_back(tmp_path: Path, name: str, dtype: str) -> None:
    sparse = _trained(name, dtype)
    folder = sparse.save_pretrained(tmp_path / "sparse")
    found = {file.suffix or file.name for file in folder.iterdir()}
    assert found == {".json", ".safetensors"}
    loaded = load_dense_or_sparse(folder, device="cpu")
    assert isinstance(loaded, SparseTransformer)
    assert isinstance(loaded.model, TransformerBridge)
    assert torch.equal(loaded(TOKENS), sparse(TOKENS))
    assert torch.equal(
        loaded.count_attention_edges(TOKENS).active, sparse.count_attention_edges(TOKENS).active
    )
    assert loaded.gates.distribution == sparse.gates.distribution
    assert loaded.cfg.dtype == loaded.embed.W_E.dtype == getattr(torch, dtype)
    assert loaded.gates.bias.dtype == sparse.gates.bias.dtype
    assert loaded.to_tokens("36+28=").tolist() == [[3, 6, 10, 2, 8, 11]]
    again = loaded.save_pretrained(folder)  # in place of the first
    assert torch.equal(
        SparseTransformer.from_pretrained(again, device="cpu")(TOKENS), sparse(TOKENS)
    )


# Adapters and gates alone: small, exact, and only for the base of the adapters

ADAPTED = ["llama", "gpt2", "mixtral"]


def _prompts() -> Tensor:
    return torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))


def _adapted(name: str, gates: Any = "share", **settings: Any) -> SparseTransformer:
    """A model under gates whose adapters and gates are no longer at their start."""
    sparse = SparseTransformer(add_lora(boot(plain_transformer(name)), 4), gates=gates, **settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in [*lora_parameters(sparse.model), *sparse.gates.parameters()]:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return sparse


@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.parametrize("gates", ["share", "score"])
def test_adapters_come_back_on_their_base(name: str, gates: str, tmp_path: Path) -> None:
    sparse, base = _adapted(name, gates, mlps=True), boot(plain_transformer(name))
    dense = base(_prompts()).detach()
    folder = sparse.save_pretrained(tmp_path / "small", adapters_only=True)
    assert {path.name for path in folder.iterdir()} == {
        *("adapters.safetensors", "gates.json", "gates.safetensors")
    }
    loaded = SparseTransformer.from_pretrained(folder, base=base)
    assert loaded.model is base and loaded.gates.kind == gates
    with torch.no_grad():
        assert torch.equal(loaded(_prompts()), sparse(_prompts()))
    with lora_off(loaded), loaded.opened():
        assert torch.allclose(loaded(_prompts()), dense, atol=1e-5)
    assert len(lora_parameters(loaded)) == len(lora_parameters(sparse))


def test_the_base_may_be_a_folder(tmp_path: Path) -> None:
    save_model(boot(plain_transformer("llama")), tmp_path / "base")
    model = load_model(tmp_path / "base", device="cpu")
    sparse = SparseTransformer(add_lora(model, 2))
    folder = sparse.save_pretrained(tmp_path / "small", adapters_only=True)
    loaded = SparseTransformer.from_pretrained(folder, base=tmp_path / "base", device="cpu")
    with torch.no_grad():
        assert torch.equal(loaded(_prompts()), sparse(_prompts()))


def test_a_whole_folder_replaces_a_small_one_and_back(tmp_path: Path) -> None:
    sparse, folder = _adapted("llama"), tmp_path / "sparse"
    with torch.no_grad():
        expected = sparse(_prompts())
        for adapters_only in (True, False, True):
            sparse.save_pretrained(folder, adapters_only=adapters_only)
            base = boot(plain_transformer("llama")) if adapters_only else None
            loaded = SparseTransformer.from_pretrained(folder, base=base, device=None)
            assert torch.allclose(loaded(_prompts()).cpu(), expected, atol=1e-4)


def test_another_base_is_refused_before_it_changes(tmp_path: Path) -> None:
    folder = _adapted("llama").save_pretrained(tmp_path / "small", adapters_only=True)
    other = boot(plain_transformer("llama"))
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-3
    with pytest.raises(ValueError, match=r"weights of hash \w{12}, on which the adapters"):
        SparseTransformer.from_pretrained(folder, base=other)
    assert not lora_parameters(other)
    adapted = add_lora(boot(plain_transformer("llama")), 4)
    with pytest.raises(ValueError, match="a base model without adapters"):
        SparseTransformer.from_pretrained(folder, base=adapted)


def test_adapters_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = _adapted("llama").save_pretrained(tmp_path / "small", adapters_only=True)
    stored = read_tensors(folder / "adapters.safetensors")
    name = next(iter(stored))
    write_tensors(folder / "adapters.safetensors", stored | {name: stored[name][:1].contiguous()})
    with pytest.raises(ValueError, match="other projections or sizes"):
        SparseTransformer.from_pretrained(folder, base=boot(plain_transformer("llama")))


def test_a_base_is_needed_by_adapters_and_by_nothing_else(tmp_path: Path) -> None:
    sparse = _adapted("llama")
    small = sparse.save_pretrained(tmp_path / "small", adapters_only=True)
    with pytest.raises(ValueError, match=r"from_pretrained\(folder, base=\.\.\.\)"):
        SparseTransformer.from_pretrained(small)
    whole = sparse.save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match="holds a whole model"):
        SparseTransformer.from_pretrained(whole, base=boot(plain_transformer("llama")))
    with pytest.raises(ValueError, match="there is no such folder"):
        SparseTransformer.from_pretrained(tmp_path / "none")
