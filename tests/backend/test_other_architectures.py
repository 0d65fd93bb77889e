"""Architectures beside the fourteen: what is supported, and what is refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from small_models import VOCABULARY, random_model

from sparse_tl import SparseTransformer, ablate_heads, load_model, save_model
from sparse_tl.backend import adapt, boot, check_circuits

TOKENS = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_joint_projection_under_another_name_is_copied_and_saved(tmp_path: Path) -> None:
    """MPT calls it Wqkv; what the bridge trains are its three parts."""
    plain = random_model("MptForCausalLM")
    expected, joint = plain(TOKENS).logits, plain.transformer.blocks[0].attn.Wqkv.weight.clone()
    model = boot(plain)
    near(adapt(model).copy()(TOKENS), expected)
    model.blocks[0].attn.k.original_component.weight.mul_(1.5)
    save_model(model, tmp_path)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    joint.chunk(3)[1].mul_(1.5)
    assert torch.equal(saved.transformer.blocks[0].attn.Wqkv.weight, joint)
    near(saved(TOKENS).logits, model(TOKENS))


def test_a_joint_projection_without_a_name_is_refused() -> None:
    model = boot(random_model("GPT2LMHeadModel"))
    del model.blocks[1].attn.submodules["qkv"]
    why = "GPT2Attention cannot be copied, trained or saved: .*'q', 'k', 'v'"
    with pytest.raises(ValueError, match=why):
        adapt(model).copy()


@torch.no_grad()
def test_scores_that_depend_on_what_follows() -> None:
    """MPT's position bias counts from the last key; softmax ignores that, gates would not."""
    model = boot(random_model("MptForCausalLM"))
    cache = [
        model.run_with_cache(some)[1]["blocks.0.attn.hook_attn_scores"]
        for some in (TOKENS, TOKENS[:, :4])
    ]
    assert not torch.allclose(cache[0][:, :, :1, :1], cache[1][:, :, :1, :1], atol=0.1)
    why = r"stay the same when tokens follow.*in layer 0 .* they change by .*length of the prompt"
    with pytest.raises(ValueError, match=why):
        SparseTransformer(model, gates="score")
    check_circuits(adapt(model))
    with ablate_heads(model, [(0, 1)]):
        assert model(TOKENS).isfinite().all()


@pytest.mark.parametrize("name", ["LlavaForConditionalGeneration", "Emu3ForConditionalGeneration"])
@torch.no_grad()
def test_language_models_that_read_images_too_are_saved_and_loaded(
    name: str, tmp_path: Path
) -> None:
    """AutoModelForCausalLM does not know Llava, and takes Emu3 for its language model alone."""
    plain = random_model(name)
    expected = plain(TOKENS).logits
    sparse = SparseTransformer(load_model(plain), initial_bias=100.0)
    sparse.save_pretrained(tmp_path / "sparse")
    again = SparseTransformer.from_pretrained(tmp_path / "sparse", device="cpu")
    near(again(TOKENS), expected)
    read = getattr(transformers, name).from_pretrained(tmp_path / "sparse")
    near(read(TOKENS).logits, expected)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ViTModel", "ViTModel is not a causal language model: it reads pixel_values"),
        ("BloomModel", "BloomModel is not a causal language model: it predicts no tokens"),
        ("GraniteMoeHybridForCausalLM", "what transformers does; .* fails with RuntimeError"),
    ],
)
def test_what_no_bridge_can_be_put_around(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        boot(random_model(name))


@pytest.mark.parametrize("name", ["BambaForCausalLM", "JetMoeForCausalLM", "MambaForCausalLM"])
def test_layers_without_attention(name: str) -> None:
    model = boot(random_model(name))
    why = "expected attention with hook points in every layer; layer 0 of .* has no attn.hook_"
    with pytest.raises(ValueError, match=why):
        SparseTransformer(model)
    with pytest.raises(ValueError, match=why):
        check_circuits(adapt(model))


def test_norms_that_transformer_lens_does_not_describe() -> None:
    model = boot(random_model("Gemma4ForCausalLM"))
    with pytest.raises(ValueError, match="a norm of .*Gemma4"):
        check_circuits(adapt(model))
