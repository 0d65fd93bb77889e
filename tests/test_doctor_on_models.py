"""`run_doctor` on models of every kind: what works is named, and what does not, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from architectures import plain_transformer
from tiny import tiny_model

from sparse_tl import SparseTransformer, save_model
from sparse_tl.backend import boot
from sparse_tl.jobs import run_doctor

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
