"""Attention patterns: the static heat maps, and circuitsvis's component with the network off."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
import torch

from sparse_tl.plots import attention_maps

TOKENS = list("36+28=")


@pytest.fixture
def patterns():
    scores = torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(0))
    return scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf).softmax(-1)


def heat_maps(svg: str) -> dict[str, ElementTree.Element]:
    return {
        e.attrib["data-head"]: e
        for e in ElementTree.fromstring(svg).iter()
        if "data-head" in e.attrib
    }


def test_every_head_has_a_heat_map_of_its_weights():
    weights = torch.zeros(2, 3, 3)
    weights[0, 2, 1], weights[0, 1, 0], weights[1, 0, 0] = 1.0, 0.2, 0.1
    figure = attention_maps(weights, ["a", "b", "c"], ["a0.h0", "a0.h1"])
    maps = heat_maps(figure.svg)
    paths = [e for e in maps["a0.h0"] if e.tag.endswith("path")]
    assert [path.get("d") for path in paths] == ["M0 1h1v1h-1z", "M1 2h1v1h-1z"]
    light, dark = (int(path.attrib["fill"][1:3], 16) for path in paths)
    assert dark < light
    assert len([e for e in maps["a0.h1"] if e.tag.endswith("path")]) == 1
    assert repr(figure) == "AttentionView(a0.h0, a0.h1)"


def test_heads_without_attention_are_listed_and_not_drawn(patterns):
    weights = patterns.clone()
    weights[1] = 0
    svg = attention_maps(weights, TOKENS, ["a0.h0", "a0.h1", "a1.h0"]).svg
    assert set(heat_maps(svg)) == {"a0.h0", "a1.h0"}
    assert ">No attention: a0.h1.</text>" in svg
    assert "No attention" not in attention_maps(patterns, TOKENS, ["a", "b", "c"]).svg
    nothing = attention_maps(0 * patterns, TOKENS, ["a", "b", "c"]).svg
    assert not heat_maps(nothing) and ">No attention: a, b, c.</text>" in nothing


def test_masked_cells_are_told_from_zero(patterns):
    sample, masked = "Masked: keys after the query", 'data-role="masked"'
    causal = attention_maps(patterns, TOKENS, ["a", "b", "c"])
    assert causal.svg.count(masked) == 3 and sample in causal.svg
    both_ways = patterns.clone()
    both_ways[0, 0, 5] = 0.3
    seen = attention_maps(both_ways, TOKENS, ["a", "b", "c"])
    assert masked not in seen.svg and sample not in seen.svg
    assert '"maskUpperTri":true' in str(causal) and '"maskUpperTri":false' in str(seen)


def test_right_to_left_tokens_are_listed_from_left_to_right():
    svg = attention_maps(torch.eye(60)[None], ["ש", "ל"] * 30, ["a0.h0"]).svg
    (line,) = (e.text for e in ElementTree.fromstring(svg).iter() if "Tokens:" in (e.text or ""))
    assert line.startswith("Tokens: 0:ש\u200e 1:ל\u200e 2:ש\u200e ")


def test_too_many_numbers_are_refused():
    with pytest.raises(ValueError, match="at most 200,000 attention weights; got 250,000"):
        attention_maps(torch.zeros(1, 500, 500), ["x"] * 500, ["a"])


@pytest.mark.long
def test_circuitsvis_shows_the_heads_with_the_network_off(page, tmp_path, patterns):
    names = ["a0.h0", "a0.h1", "a1.h0"]
    figure = attention_maps(patterns, TOKENS, names, title="A model")
    page.goto(figure.save(tmp_path / "view.html").as_uri())
    page.wait_for_selector(".sparse-tl-attention[data-ready]")
    assert page.locator(".static").is_visible() and page.locator("canvas").count() == 0
    page.locator("summary").click()
    page.wait_for_selector("canvas")
    text = page.locator(".browser").inner_text()
    assert all(name in text for name in names)
