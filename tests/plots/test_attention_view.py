"""Attention patterns: the static heat maps, and circuitsvis's component with the network off."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from sparse_tl.plots import attention_view

ATTACK = "</script><img src=x onerror=alert(1)>"
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
    figure = attention_view(weights, ["a", "b", "c"], ["a0.h0", "a0.h1"])
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
    svg = attention_view(weights, TOKENS, ["a0.h0", "a0.h1", "a1.h0"]).svg
    assert set(heat_maps(svg)) == {"a0.h0", "a1.h0"}
    assert ">No attention: a0.h1.</text>" in svg
    assert "No attention" not in attention_view(patterns, TOKENS, ["a", "b", "c"]).svg
    nothing = attention_view(0 * patterns, TOKENS, ["a", "b", "c"]).svg
    assert not heat_maps(nothing) and ">No attention: a, b, c.</text>" in nothing


def test_masked_cells_are_told_from_zero(patterns):
    sample, masked = "Masked: keys after the query", 'data-role="masked"'
    causal = attention_view(patterns, TOKENS, ["a", "b", "c"])
    assert causal.svg.count(masked) == 3 and sample in causal.svg
    both_ways = patterns.clone()
    both_ways[0, 0, 5] = 0.3
    seen = attention_view(both_ways, TOKENS, ["a", "b", "c"])
    assert masked not in seen.svg and sample not in seen.svg
    assert '"maskUpperTri":true' in str(causal) and '"maskUpperTri":false' in str(seen)


def test_axes_and_the_colour_bar_are_labelled(patterns):
    svg = attention_view(patterns, TOKENS, ["a", "b", "c"]).svg
    assert svg.count(">Key</text>") == 3 and svg.count(">Query</text>") == 1
    for text in ("Attention weight", "0", "0.5", "1"):
        assert svg.count(f">{text}</text>") == 1


def test_tokens_are_written_where_there_is_room_and_else_positions(patterns):
    assert ">+</text>" in attention_view(patterns, TOKENS, ["a", "b", "c"]).svg
    words = [" Mary", " and", " John", " went", " to", " the"]
    assert 'rotate(-90)" text-anchor="end">·Mary' in attention_view(patterns, words, "abc").svg
    many = attention_view(torch.eye(80)[None].repeat(3, 1, 1), ["+"] * 80, ["a", "b", "c"]).svg
    assert ">+</text>" not in many and many.count(">60</text>") == 4  # two rows, two columns
    assert ">Tokens: 0:+ 1:+" in many


@pytest.mark.parametrize(("n_heads", "n_tokens"), [(9, 15), (9, 40), (12, 15), (16, 11), (4, 30)])
def test_the_heads_of_a_layer_fit_a_screen(n_heads, n_tokens):
    """With the axes of each row and column of maps told once, and every token."""
    weights = torch.ones(n_heads, n_tokens, n_tokens).tril() / n_tokens
    tokens = ["<|im_start|>", *(f" word{i}" for i in range(1, n_tokens))]
    svg = attention_view(weights, tokens, [f"a3.h{i}" for i in range(n_heads)]).svg
    root = ElementTree.fromstring(svg)
    assert float(root.attrib["height"]) <= (950 if n_heads <= 9 else 1150)
    places = [
        tuple(map(float, re.findall(r"[-\d.]+", m.attrib["transform"])[:2]))
        for m in heat_maps(svg).values()
    ]
    rows, columns = ({place[axis] for place in places} for axis in (1, 0))
    assert svg.count(">Query</text>") == len(rows) and svg.count(">Key</text>") == len(columns)
    said = "".join(root.itertext())
    for i in range(1, n_tokens):
        assert f"\u00b7word{i}" in said
    assert {float(e.attrib["font-size"]) for e in root.iter() if "font-size" in e.attrib} == {
        11.0,
        12.0,
    }


def test_a_column_that_ends_a_row_early_has_its_own_axis():
    """Of seven maps in rows of three, two columns end in the row before the last."""
    weights = torch.ones(7, 15, 15).tril() / 15
    svg = attention_view(weights, [" word"] * 15, [f"a3.h{i}" for i in range(7)]).svg
    places = re.findall(r'data-head="a3.h\d" transform="translate\(([\d.]+) ([\d.]+)\)', svg)
    assert len({x for x, _ in places}) == len({y for _, y in places}) == 3
    keys = re.findall(r'<text x="[\d.]+" y="([\d.]+)"[^>]*>Key</text>', svg)
    last, before = sorted({float(y) for _, y in places})[:0:-1]
    ends = [float(y) - row for y, row in zip(keys, (before, before, last), strict=True)]
    assert ends == pytest.approx([ends[0]] * 3, abs=0.02)


def test_many_heads_are_drawn_small(patterns):
    names = [f"a{index}" for index in range(30)]
    svg = attention_view(patterns.repeat(10, 1, 1), TOKENS, names).svg
    assert len(heat_maps(svg)) == 30 and ">Key</text>" not in svg
    assert ">Rows are queries, columns are keys.</text>" in svg


def test_the_html_is_whole_and_holds_everything(patterns):
    html = str(attention_view(patterns, TOKENS, ["a", "b", "c"], title="A model"))
    assert html.count("<div") == html.count("</div>") == 4
    assert html.count("<script") - html.count('"<script>') == 1
    assert len(re.findall(r"</script", html)) == 1
    assert "unpkg" not in html and "sourceMappingURL" not in html


@pytest.mark.parametrize(
    ("shape", "problem"),
    [((3, 5, 5), "3 heads over 6 tokens"), ((3, 6, 5), "got shape"), ((2, 6, 6), "got shape")],
)
def test_shapes_that_disagree_are_refused(shape, problem):
    with pytest.raises(ValueError, match=problem):
        attention_view(torch.zeros(shape), TOKENS, ["a", "b", "c"])


def test_other_numbers_are_refused(patterns):
    for bad in (-patterns, 2 * patterns, patterns * torch.nan):
        with pytest.raises(ValueError, match=r"weights in 0\.\.1"):
            attention_view(bad, TOKENS, ["a", "b", "c"])
    with pytest.raises(ValueError, match="at most 200,000 attention weights.*got 250,000"):
        attention_view(torch.zeros(1, 500, 500), ["x"] * 500, ["a"])
    with pytest.raises(ValueError, match="at least one"):
        attention_view(torch.zeros(0, 6, 6), TOKENS, [])


def test_it_saves_as_html_svg_and_png(patterns, tmp_path):
    figure = attention_view(patterns, TOKENS, ["a", "b", "c"])
    for suffix in ("html", "svg", "png"):
        assert figure.save(tmp_path / f"view.{suffix}").stat().st_size > 1000


@pytest.mark.long
def test_circuitsvis_shows_the_heads_with_the_network_off(page, tmp_path, patterns):
    names = ["a0.h0", "a0.h1", "a1.h0"]
    figure = attention_view(patterns, TOKENS, names, title="A model")
    page.goto(figure.save(tmp_path / "view.html").as_uri())
    page.wait_for_selector(".sparse-tl-attention[data-ready]")
    assert page.locator(".static").is_visible() and page.locator("canvas").count() == 0
    page.locator("summary").click()
    page.wait_for_selector("canvas")
    text = page.locator(".browser").inner_text()
    assert all(name in text for name in names)


def test_without_a_script_the_heat_maps_are_seen(browser, tmp_path, patterns):
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(attention_view(patterns, TOKENS, ["a", "b", "c"]).save(tmp_path / "v.html").as_uri())
    assert page.locator("g[data-head]").count() == 3
    assert page.locator(".static").is_visible() and not page.locator("summary").is_visible()
    context.close()


def test_two_copies_on_a_page_both_start(page, tmp_path, patterns):
    figure = attention_view(patterns, TOKENS, ["a", "b", "c"])
    path = tmp_path / "page.html"
    path.write_text(f"<!DOCTYPE html><meta charset='utf-8'><body>{figure}{figure}</body>")
    page.goto(path.as_uri())
    for summary in page.locator("[data-ready] summary").all():
        summary.click()
    page.wait_for_function("document.querySelectorAll('canvas').length >= 2")
    assert page.locator("[data-ready]").count() == 2


def test_hostile_tokens_and_names_stay_text(page, tmp_path, patterns):
    tokens = [ATTACK, *TOKENS[1:]]
    figure = attention_view(patterns, tokens, [ATTACK, "b", "c"], title=ATTACK)
    page.goto(figure.save(tmp_path / "view.html").as_uri())
    page.locator("summary").click()
    page.wait_for_selector("canvas")
    assert page.locator("img").count() == 0
    assert ATTACK in page.locator(".static").text_content()
