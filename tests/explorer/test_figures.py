"""Which positions a diagram of a model offers, and which attention patterns a view shows."""

from __future__ import annotations

import json
import re

import pytest
import torch

from sparse_tl import SparseTransformer, explore
from sparse_tl.explorer import attention_view, figures
from sparse_tl.explorer.figures import circuit_diagram

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


# ---- circuit diagrams ----------------------------------------------------------------------------


def test_every_predicted_position_is_offered_and_one_is_shown_first(models):
    chosen = circuit_diagram(models, PROMPT, position=7)
    assert chosen.data["targets"] == [[column, column] for column in range(6, 11)]
    assert chosen.data["state"]["target"] == 1

    def plan(prompt, position=None, positions=None):
        columns, shown, _ = figures._plan(models["Dense"], prompt, position, positions, "attention")
        return columns, shown

    masked = [6, 7, 8, 9, 10]
    assert plan(PROMPT) == (masked, -1)  # the last one
    assert plan(PROMPT, 7) == plan(PROMPT, -4) == (masked, 1)
    assert plan("36+28=00", -1, [-1, 3]) == ([8, 3], 0)
    assert plan("36+28=00", 3) == ([*range(1, 9)], 2)
    assert plan(PROMPT, 3) == ([3, *masked], 0)  # also predicted, from the left
    assert plan(PROMPT, 7, [-1, 7]) == ([10, 7], 1)


def test_one_model_needs_no_title(models):
    one = circuit_diagram(models["Sparse"], PROMPT)
    titled = circuit_diagram({"Model": models["Sparse"]}, PROMPT)
    assert one.svg == titled.svg
    assert explore(models["Sparse"], PROMPT).exploration.titles == ("Model",)


def test_effects_of_too_many_positions_are_left_out_unasked(models, monkeypatch):
    dense = {"Dense": models["Dense"]}
    n_scores = 8 * 2 * 2 * 8**2
    monkeypatch.setattr(figures, "MAX_SCORES", n_scores)
    assert "first-order" in circuit_diagram(dense, "36+28=00").data["panels"][0]["weights"]
    monkeypatch.setattr(figures, "MAX_SCORES", n_scores - 1)
    attention = circuit_diagram(dense, "36+28=00")
    assert attention.data["panels"][0]["weights"].keys() == {"attention", "carried"}
    assert len(attention.data["targets"]) == 8
    one = circuit_diagram(dense, "36+28=00", weight="first-order", position=3)
    assert one.data["targets"] == [[3, 2]]
    asked = circuit_diagram(dense, "36+28=00", weight="first-order", positions=range(1, 9))
    assert len(asked.data["panels"][0]["weights"]["first-order"]["rows"]) == 8


def test_small_prompts_and_empty_circuits(build_tiny):
    model, tokens = build_tiny(), torch.tensor([3])
    one = circuit_diagram({"m": model}, tokens, labels=["a"])
    assert one.data["targets"] == [[1, 0]] and one.data["panels"][0]["input"] == ["a", "?"]
    closed = SparseTransformer(build_tiny(), initial_bias=-1e4)
    for weight in ("attention", "effect", "first-order"):
        empty = circuit_diagram({"m": closed}, torch.tensor([3, 4]), weight=weight)
        assert 'data-edges-shown="0"' in empty.svg
    open_one = SparseTransformer(build_tiny(), initial_bias=1e4)
    assert 'data-edges-shown="2"' in circuit_diagram({"m": open_one}, tokens).svg  # one a layer


# ---- attention patterns --------------------------------------------------------------------------


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
