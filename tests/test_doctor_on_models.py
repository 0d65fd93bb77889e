"""`run_doctor` on models of every kind: what works is named, and what does not, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from architectures import plain_transformer
from tiny import tiny_model

from sparse_tl import SparseTransformer, save_model
from sparse_tl.lens import boot
from sparse_tl.runs import run_doctor

PARTS = ("gates", "circuits", "padding", "saving")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}


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


@pytest.mark.filterwarnings("ignore")
def test_what_does_not_work_is_named(tmp_path: Path) -> None:
    config: Any = transformers.OPTConfig(
        **SIZES, ffn_dim=48, max_position_embeddings=40, word_embed_proj_dim=32, pad_token_id=0
    )
    said = found(of_folder(transformers.OPTForCausalLM(config), tmp_path / "opt"))
    assert [part for part, (works, _) in said.items() if not works] == ["gates", "circuits"]
    assert "edits to its attention scores do not reach the pattern" in said["gates"][1]
    assert "never fires" in said["circuits"][1]
    config = transformers.PhiConfig(**SIZES, intermediate_size=48, max_position_embeddings=40)
    said = found(of_folder(transformers.PhiForCausalLM(config), tmp_path / "phi"))
    assert [part for part, (works, _) in said.items() if not works] == ["circuits"]


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
    assert not works and "expected the same outputs for prompts with and without padding" in said


def test_another_model_than_that_of_transformers(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=16, vocab_size=20, scale_attn_weights=False
    )
    model = transformers.GPT2LMHeadModel(config)
    for weight in model.parameters():
        weight.data.mul_(5)
    said = found(of_folder(model, tmp_path / "gpt2"))
    assert set(said) == {"load"} and not said["load"][0]
    assert "computes what transformers does" in said["load"][1]
