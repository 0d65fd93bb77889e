"""A SparseTransformer around a bridge as a folder: transformers reads the model, we gates too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

from sparse_tl.backend import load_model
from sparse_tl.gates import HardConcreteGate, SparseTransformer
from sparse_tl.gates.sparse.sparse_transformer import load_dense_or_sparse
from sparse_tl.storage.files import read_json, write_json
from sparse_tl.tasks.addition import addition_tokenizer

CONFIGS = {
    "joint projections": GPT2Config(
        n_layer=2, n_embd=16, n_head=2, n_positions=16, vocab_size=13, activation_function="relu"
    ),
    "grouped": LlamaConfig(
        num_hidden_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        vocab_size=13,
        max_position_embeddings=16,
    ),
}
TOKENS = torch.randint(13, (3, 9), generator=torch.Generator().manual_seed(0))


def _plain(kind: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()
        for parameter in model.parameters():
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


def _trained(kind: str, dtype: torch.dtype = torch.float32) -> SparseTransformer:
    """Gates and weights as after some training."""
    dense = load_model(_plain(kind).to(dtype), tokenizer=addition_tokenizer())
    sparse = SparseTransformer(dense, distribution=HardConcreteGate())
    with torch.no_grad():
        sparse.gates.bias.normal_(generator=torch.Generator().manual_seed(1))
        for block in dense.blocks:
            for slot in "qk":
                getattr(block.attn, slot).original_component.weight.mul_(1.5)
    return sparse


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_was_trained_comes_back(tmp_path: Path, kind: str) -> None:
    sparse = _trained(kind)
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
    assert loaded.to_tokens("36+28=").tolist() == [[3, 6, 10, 2, 8, 11]]
    again = loaded.save_pretrained(folder)  # in place of the first
    assert torch.equal(
        SparseTransformer.from_pretrained(again, device="cpu")(TOKENS), sparse(TOKENS)
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_transformers_reads_the_dense_model(tmp_path: Path, kind: str) -> None:
    sparse = _trained(kind)
    folder = sparse.save_pretrained(tmp_path / "sparse")
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with sparse.opened():
        torch.testing.assert_close(plain(TOKENS).logits, sparse(TOKENS))
    assert not torch.allclose(plain(TOKENS).logits, sparse(TOKENS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    sparse = _trained("grouped", dtype)
    loaded = SparseTransformer.from_pretrained(sparse.save_pretrained(tmp_path / "s"), device="cpu")
    assert loaded.cfg.dtype == loaded.embed.W_E.dtype == dtype
    assert loaded.gates.bias.dtype == sparse.gates.bias.dtype
    torch.testing.assert_close(loaded(TOKENS), sparse(TOKENS))


def test_gates_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = _trained("grouped").save_pretrained(tmp_path / "one")
    other = _trained("joint projections").save_pretrained(tmp_path / "other")
    (folder / "gates.safetensors").replace(other / "gates.safetensors")
    with pytest.raises(ValueError, match="size mismatch for bias"):
        SparseTransformer.from_pretrained(other, device="cpu")


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    write_json(tmp_path / "model" / "notes.json", {})
    with pytest.raises(ValueError, match="would be deleted"):
        _trained("grouped").save_pretrained(tmp_path / "model")
    assert read_json(tmp_path / "model" / "notes.json") == {}
