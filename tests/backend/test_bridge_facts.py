"""What bridges do that costs a wrong number where an adapter does not know it.

Masks by their number, and windows; edits of what attention writes; joint weights and experts in
files; hooks of others. `test_seam` has what can be said of every adapter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import (
    ARCHITECTURES,
    CONTEXT,
    N_HEADS,
    off,
    plain_transformer,
    random_tokens as tokens,
)
from transformers import AutoModelForCausalLM

from sparse_tl import PromptPairs, SparseTransformer, load_model, save_model
from sparse_tl.backend import EMBEDDED, Order, adapt, attached, boot, check_circuits, record
from sparse_tl.circuits import attribute_circuit_edges
from sparse_tl.metrics import logit_difference
from sparse_tl.tasks.addition import addition_tokenizer

BRIDGES = list(ARCHITECTURES)
WINDOWS = {
    "mistral": (4, 4, 4),
    "gemma2": (4, None, 4),
    "gemma3": (4, None, 4),
    "gpt_oss": (4, None, 4),
}


@pytest.mark.filterwarnings("ignore:.* does not support fold_ln")
@pytest.mark.parametrize("name", BRIDGES)
def test_possible_edges_are_those_that_masks_leave(name: str) -> None:
    """After processing -inf stands for what is masked; for finfo.min see gates/test_masks.py."""
    model = boot(plain_transformer(name))
    model.enable_compatibility_mode(disable_warnings=True)
    counts = SparseTransformer(model).count_attention_edges(tokens())
    for layer, window in enumerate(WINDOWS.get(name, (None,) * 3)):
        expected = sum(min(query, window or 9) for query in range(1, 10))
        assert counts.possible[layer].unique().tolist() == [expected]


@pytest.mark.parametrize("name", BRIDGES)
@torch.no_grad()
def test_what_attention_writes_is_edited_where_all_readers_see_it(name: str) -> None:
    """At ``hook_resid_mid`` a bridge shows what the MLP reads: the next layer does not see it."""
    adapter = adapt(boot(plain_transformer(name)))
    names = [EMBEDDED, "blocks.0.hook_mlp_out", "blocks.1.hook_resid_pre"]
    with attached(adapter, [("blocks.0.hook_attn_out", Order.LAST, torch.zeros_like)]):
        kept, _ = record(adapter, tokens(), names)
    embedded, mlp, after = (kept[point] for point in names)
    assert off(after, embedded + mlp) < 1e-6


@pytest.mark.parametrize("name", BRIDGES)
@torch.no_grad()
def test_saved_and_read_back(name: str, tmp_path: Path) -> None:
    """With q and k trained: joint weights and experts come from the parts that passes read."""
    model, prompts = boot(plain_transformer(name), name=name), tokens()
    generator = torch.Generator().manual_seed(0)
    for parameter in adapt(model).parameters("all"):
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    expected = model(prompts)
    save_model(model, tmp_path)
    assert torch.equal(load_model(tmp_path, device="cpu")(prompts), expected)
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert off(plain(prompts).logits, expected) < 1e-6


def test_hooks_of_others_are_no_part_of_the_checks() -> None:
    model = boot(plain_transformer("llama"))
    uniform = torch.full((1, N_HEADS, 1, 1), 0.1)
    for layer in range(3):
        model.add_hook(
            f"blocks.{layer}.attn.hook_pattern",
            lambda pattern, hook: uniform.expand_as(pattern).clone(),
            is_permanent=True,
        )
    check_circuits(adapt(model))
    prompts = tokens()
    expected = model(prompts)
    sparse = SparseTransformer(model, initial_bias=-100.0)
    with sparse.opened():
        assert torch.equal(sparse(prompts), expected)


def test_a_tokenizer_changes_no_size() -> None:
    """A second assignment would, on bridges: vocabularies are padded."""
    model = load_model(plain_transformer("llama"), tokenizer=addition_tokenizer())
    assert model.cfg.d_vocab == 61
    assert adapt(adapt(model).copy()).d_vocab == 61


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_prompts_beyond_the_context(name: str) -> None:
    """Rotary models compute something for them."""
    clean = tokens(2, CONTEXT + 1)
    ones = torch.ones(2, 1, dtype=torch.long)
    pairs = PromptPairs(clean, clean.flip(0), ones, ones + 1, CONTEXT * ones[:, 0])
    with pytest.raises(ValueError, match=f"at most {CONTEXT} tokens, the model's context; got 41"):
        attribute_circuit_edges(
            boot(plain_transformer(name)), pairs, logit_difference, progress=False
        )
