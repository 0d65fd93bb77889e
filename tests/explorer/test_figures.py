"""Which attention patterns a view of a model shows."""

from __future__ import annotations

import json
import re

import pytest
import torch

from sparse_tl.explorer import attention_view

PROMPT = "36+28=?????"


def shown(figure) -> torch.Tensor:
    found = re.search(r'"attention":(\[\[\[.*?\]\]\])', str(figure))
    assert found is not None
    return torch.tensor(json.loads(found[1]))


@pytest.mark.parametrize("panel", ["Dense", "Sparse"])
def test_a_view_shows_the_gated_patterns(models, panel):
    model = models[panel]
    figure = attention_view(model, PROMPT)
    assert figure.heads == ("a0.h0", "a0.h1", "a1.h0", "a1.h1")
    with torch.no_grad():
        _, cache = model.run_with_cache(model.to_tokens(PROMPT))
    patterns = torch.cat([cache[f"blocks.{layer}.attn.hook_pattern"][0] for layer in range(2)])
    torch.testing.assert_close(shown(figure), patterns.float(), rtol=0, atol=6e-5)


def test_heads_can_be_chosen(models):
    model = models["Dense"]
    whole = shown(attention_view(model, PROMPT))
    one_layer = attention_view(model, PROMPT, layer=1)
    assert one_layer.heads == ("a1.h0", "a1.h1")
    assert torch.equal(shown(one_layer), whole[2:])
    two = attention_view(model, PROMPT, heads=[(1, 0), (0, 1)])
    assert two.heads == ("a1.h0", "a0.h1")
    assert torch.equal(shown(two), whole[[2, 1]])


def test_a_prompt_without_mask_tokens_is_shown_whole(models):
    assert shown(attention_view(models["Dense"], "36+28=")).shape == (4, 6, 6)


def test_what_cannot_be_shown_is_refused(models):
    model = models["Dense"]
    for problem, options in {
        r"of 2 layers of 2 heads; got \(2, 0\)": {"layer": 2},
        r"of 2 layers of 2 heads; got \(0, 5\)": {"heads": [(0, 5)]},
        "at least one head .*; got none": {"heads": []},
        "a layer or heads": {"layer": 0, "heads": [(0, 0)]},
    }.items():
        with pytest.raises(ValueError, match=problem):
            attention_view(model, PROMPT, **options)
    with pytest.raises(ValueError, match="no token for 'x'"):
        attention_view(model, "3x6")
    with pytest.raises(ValueError, match="at most 16 tokens"):
        attention_view(model, "1" * 20)
