"""SmolLM2-135M-Instruct, a real language model, where `sparse-tl get smollm2` put it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparse_tl import load_language_model
from sparse_tl.lens import adapt

PROMPT = "When Mary and John went to the store, John gave a drink to"


def test_the_bridge_equals_transformers(smollm2: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32, attn_implementation="eager"
    )
    model = load_language_model(device="cpu")
    assert model.cfg.model_name == "SmolLM2-135M-Instruct.Q4_1"
    assert (adapt(model).graph.n_edges, model.cfg.n_layers, model.cfg.n_heads) == (70_651, 30, 9)
    tokens = model.to_tokens(PROMPT)
    assert tokens.shape == (1, 14)  # no BOS token before it
    with torch.no_grad():
        found, expected = model(tokens), plain.eval()(tokens).logits
        continued = plain.generate(tokens, max_new_tokens=3, do_sample=False)
    assert (found - expected).abs().max() < 1e-5
    assert model.tokenizer.decode(found[0, -1].argmax()) == " Mary"
    assert found[0, -1].softmax(-1).max().item() == pytest.approx(0.923, abs=0.001)
    assert torch.equal(model.generate(tokens, max_new_tokens=3, do_sample=False), continued)
    assert model.tokenizer.tokenize("1732") == ["1", "7", "3", "2"]
