"""The interactive figure in a browser without a network, against the static figure."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from component_examples import ATTACK
from reachability import reached_by_networkx

from sparse_tl.plots import CircuitDiagram, attention_diagram

READ_LINES = """panel => [...panel.querySelectorAll('[data-role=edges] path')].map(
    path => ['data-kind', 'd', 'stroke', 'stroke-width'].map(name => path.getAttribute(name)))"""
READ_REACHED = """panel => [...panel.querySelectorAll('circle[data-reached=true]')].map(
    node => [Number(node.dataset.level), Number(node.dataset.column)])"""


def show(page: Any, folder: Path, *figures: CircuitDiagram) -> None:
    path = folder / "page.html"
    if len(figures) == 1:
        figures[0].save(path)
    else:
        body = "".join(map(str, figures))
        path.write_text(f"<!DOCTYPE html><meta charset='utf-8'><body>{body}</body>")
    page.goto(path.as_uri())


def panel(page: Any, index: int, figure: int = 0) -> Any:
    return page.locator(".sparse-tl-circuit").nth(figure).locator(f"g[data-panel='{index}']")


def node(page: Any, index: int, level: int, column: int) -> Any:
    place = f"circle[data-level='{level}'][data-column='{column}']"
    return panel(page, index).locator(place)


def center(locator: Any) -> tuple[float, float]:
    box = locator.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def hover_edge(page: Any, index: int, layer: int, query: int, key: int, share: float = 0.5) -> None:
    start, end = center(node(page, index, layer, key)), center(node(page, index, layer + 1, query))
    page.mouse.move(*(a + share * (b - a) for a, b in zip(start, end, strict=True)))


def set_threshold(page: Any, value: float) -> None:
    page.locator("input[name=threshold]").fill(str(value))


def assert_equals_static(page: Any, figure: CircuitDiagram) -> None:
    """The page draws the lines, the nodes, the arrow and the words of the static figure."""
    root = ElementTree.fromstring(figure.svg)
    groups = [group for group in root.iter() if "data-panel" in group.attrib]
    for index, group in enumerate(groups):
        part = {e.get("data-role"): e for e in group.iter() if "data-role" in e.attrib}
        names = ("data-kind", "d", "stroke", "stroke-width")
        expected = [[path.get(name) for name in names] for path in part["edges"]]
        assert panel(page, index).evaluate(READ_LINES) == expected
        reached = [
            [int(e.get("data-level", "")), int(e.get("data-column", ""))]
            for e in part["nodes"]
            if e.get("data-reached") == "true"
        ]
        assert panel(page, index).evaluate(READ_REACHED) == reached
        for role in ("arrow", "arrow-head", "residual-path"):
            shown = panel(page, index).locator(f"[data-role='{role}']").get_attribute("d")
            assert (shown or "") == part[role].get("d")
        caption = panel(page, index).locator("[data-role='caption']")
        assert caption.text_content() == part["caption"].text
        for name in ("data-edges-shown", "data-edges-on-path", "data-attention-edges"):
            assert panel(page, index).get_attribute(name) == group.get(name)
        bold = [text.get("data-column") for text in part["output"] if "font-weight" in text.attrib]
        predicted = panel(page, index).locator("[data-role='output'] text[font-weight='bold']")
        assert [predicted.get_attribute("data-column")] == bold


@pytest.mark.long
def test_every_choice_equals_its_static_figure(page, tmp_path, make_random_flow):
    # Some are read at their own column, and others one to the left.
    targets = tuple((column, column - column % 2) for column in range(6, 11))
    panels = {
        "a": make_random_flow(targets=targets),
        "b": make_random_flow(n_layers=3, n_heads=2, targets=targets, seed=1),
    }
    effect, mlps = 2 * panels["b"].attribution, torch.eye(3, 11, dtype=torch.bool)
    panels["b"] = dataclasses.replace(panels["b"], effect=effect, mlps=mlps)
    show(page, tmp_path, attention_diagram(panels, threshold=0.125))
    assert page.locator(".sparse-tl-circuit").get_attribute("data-ready") == ""
    assert_equals_static(page, attention_diagram(panels, threshold=0.125))
    for weight in ("effect", "first-order", "attention"):
        page.locator("select[name=weight]").select_option(weight)
        for target, threshold in ((0, 0.0), (3, 0.3), (4, 0.99)):
            page.locator("select[name=target]").select_option(str(target))
            set_threshold(page, threshold)
            static = attention_diagram(panels, weight=weight, target=target, threshold=threshold)
            assert_equals_static(page, static)


def test_hovering_an_edge_tells_all_about_it(page, tmp_path, make_flow):
    flow = make_flow({(0, 1, 9, 0): 0.42, (0, 3, 9, 0): 0.31, (1, 3, 10, 9): 0.93})
    show(page, tmp_path, attention_diagram({"model": flow}))
    tip = page.locator(".tip")
    assert not tip.is_visible()
    hover_edge(page, 0, 0, 9, 0)
    assert tip.inner_text().splitlines() == [
        "Layer 0, head 1",
        "from position 0: “3”",
        "to position 9: “?”, output “6”",
        "attention 0.420, gate open",
        "also head 3: attention 0.310",
    ]
    page.mouse.move(5, 5)
    assert not tip.is_visible()
    hover_edge(page, 0, 1, 10, 9)
    assert "Layer 1, head 3" in tip.inner_text() and "0.930" in tip.inner_text()


def test_effects_are_told_as_they_are_however_large_another_is(page, tmp_path, make_flow):
    """Also where they are no whole thousandth of the largest, and where they are too small to be
    sent; and in every head of a line, whichever is drawn."""
    exact = {
        (1, 3, 10, 9): -1613.7,
        (1, 1, 10, 9): 4.7291,
        (1, 0, 10, 9): 0.12,
        (0, 2, 9, 9): -27.183,
        (0, 1, 9, 9): 2.8,
    }
    weights = {place: 0.5 + 0.01 * i for i, place in enumerate(exact)}
    effect = torch.zeros(5, 4, 4, 11, 11, dtype=torch.float64)
    for place, value in exact.items():
        effect[:, *place] = value
    flow = make_flow(weights, effect=effect, metric="log_probability", answers=tuple("00064"))
    show(page, tmp_path, attention_diagram({"model": flow}))
    tip = page.locator(".tip")
    hover_edge(page, 0, 1, 10, 9)
    assert tip.inner_text().splitlines()[3:] == [
        "attention 0.520, gate open",
        "effect of removing it within ±0.807 nats on log P(“4”)",
        "also head 1: attention 0.510, effect 4.73",
        "also head 3: attention 0.500, effect −1,610",
    ]
    page.locator("select[name=weight]").select_option("effect")
    set_threshold(page, 0)
    hover_edge(page, 0, 1, 10, 9)
    assert tip.inner_text().splitlines()[3:] == [
        "attention 0.500, gate open",
        "effect of removing it −1,610 nats on log P(“4”)",
        "also head 1: attention 0.510, effect 4.73",
    ]
    x, y = center(node(page, 0, 0, 9))
    _, top = center(node(page, 0, 1, 9))
    page.mouse.move(x + 18, (y + top) / 2)  # the arc of the edge within a column
    said = tip.inner_text()
    assert "effect of removing it −27.2 nats" in said
    assert "also head 1: attention 0.540, effect 2.80" in said


def test_effects_that_were_not_computed_are_not_told(page, tmp_path, make_flow):
    """Whatever the lines show; what is told is the estimate."""
    flow = make_flow({(0, 1, 9, 0): 0.5, (1, 2, 10, 9): 1.0})
    attribution = -flow.attention.expand(5, -1, -1, -1, -1)
    effect = torch.where(flow.gates, torch.nan, 0.0).expand_as(attribution).clone()
    effect[:, 1, 2, 10, 9] = 2.0
    flow = dataclasses.replace(flow, attribution=attribution, effect=effect)
    show(page, tmp_path, attention_diagram({"model": flow}, weight="effect"))
    legend = page.locator("[data-legend=estimate]")
    for weight in ("effect", "attention"):
        page.locator("select[name=weight]").select_option(weight)
        assert_equals_static(page, attention_diagram({"model": flow}, weight=weight))
        assert legend.is_visible() == (weight == "effect")
        hover_edge(page, 0, 0, 9, 0)
        told = page.locator(".tip").inner_text()
        assert "effect of removing it" not in told
        assert "first-order attribution −0.500 logits" in told
        hover_edge(page, 0, 1, 10, 9)
        assert "effect of removing it 2.00 logits" in page.locator(".tip").inner_text()


def test_clicking_a_node_shows_its_ancestors(page, tmp_path, two_panels):
    show(page, tmp_path, attention_diagram(two_panels, threshold=0.25))
    before = [panel(page, i).evaluate(READ_REACHED) for i in (0, 1)]
    node(page, 0, 2, 7).click()
    merged = two_panels["Base Model"].attention.amax(dim=1) >= 0.2495
    expected = reached_by_networkx(merged, 7, 2)
    assert set(map(tuple, panel(page, 0).evaluate(READ_REACHED))) == expected
    assert panel(page, 0).get_attribute("data-focus") == "2,7"
    assert panel(page, 1).evaluate(READ_REACHED) == before[1]
    assert float(node(page, 0, 4, 10).get_attribute("opacity")) < 0.5
    assert float(node(page, 0, 2, 7).get_attribute("opacity")) == 1
    node(page, 0, 2, 7).click()
    assert panel(page, 0).evaluate(READ_REACHED) == before[0]
    node(page, 0, 1, 3).click()
    node(page, 1, 1, 9).click()  # the other panel takes over
    assert panel(page, 0).get_attribute("data-focus") == ""
    assert panel(page, 1).get_attribute("data-edges-on-path") == "4"
    node(page, 1, 1, 8).press("Enter")  # which keeps the keyboard's place
    assert page.evaluate("document.activeElement.dataset.column") == "8"
    page.keyboard.press("Escape")
    assert [panel(page, i).evaluate(READ_REACHED) for i in (0, 1)] == before


def test_layers_unfold_on_a_click_and_where_lines_appear(page, tmp_path, make_flow):
    attention = torch.zeros(30, 1, 11, 11)
    attention[:, 0, 10, 3] = 0.9
    attention[[3, 4, 5, 6, 14, 15], 0, 10, 3] = 0.05
    attention[[20, 21]] = 0
    mlps = torch.eye(30, 11, dtype=torch.bool)
    flow = make_flow({}, attention=attention, gates=attention != 0, mlps=mlps)
    panels = {"a": dataclasses.replace(flow, mlps=None), "b": flow}
    show(page, tmp_path, attention_diagram(panels))
    assert not node(page, 0, 15, 3).is_visible()
    band = panel(page, 0).locator("rect[data-last='15']")
    band.hover()
    assert page.locator(".tip").inner_text().startswith("Layers 14 to 15")
    band.press("Enter")
    assert node(page, 0, 15, 3).is_visible() and not node(page, 0, 5, 3).is_visible()
    set_threshold(page, 0.02)
    expected = attention_diagram(panels, threshold=0.02)
    # Everything stands where it does in a figure that had these lines from the start.
    parts = "svg, svg text, svg rect, svg circle, svg path:not([data-role=transition] path)"
    boxes = f"""() => [...document.querySelectorAll("{parts}")].map(part =>
        Object.values(part.getBoundingClientRect().toJSON()).map(Math.round))
        .filter(([,, width, height]) => width || height)"""
    found = page.evaluate(boxes)
    show(page, tmp_path, expected)
    assert found == page.evaluate(boxes)


def test_one_head_alone(page, tmp_path, two_panels):
    show(page, tmp_path, attention_diagram(two_panels))
    reached = panel(page, 1).evaluate(READ_REACHED)
    shown = []
    for head in range(4):
        page.locator("select[name=head]").select_option(str(head))
        shown.append(int(panel(page, 1).get_attribute("data-edges-shown")))
        expected = int((two_panels["Base Model"].attention[:, head] >= 0.0995).sum())
        assert int(panel(page, 0).get_attribute("data-edges-shown")) == expected
        assert panel(page, 1).evaluate(READ_REACHED) == reached  # over all heads
    assert shown == [0, 2, 2, 1]
    page.locator("select[name=head]").select_option("-1")
    assert_equals_static(page, attention_diagram(two_panels))


def test_choosing_a_token_moves_the_prediction_along_the_row(page, tmp_path, make_flow, circuit):
    targets = tuple((column, column - 1) for column in range(1, 11))
    texts = {"input_tokens": tuple("36+28=0006?"), "output_tokens": tuple("354+8=00064")}
    panels = {"a": make_flow(circuit, targets=targets, **texts)}
    show(page, tmp_path, attention_diagram(panels))
    row = "row => [...row.children].map(text => text.firstChild.data).join('')"
    output = panel(page, 0).locator("[data-role='output']")
    assert output.evaluate(row) == "36+28=00064"
    output.locator("text").nth(1).click()
    assert page.locator("select[name=target]").input_value() == "0"
    assert output.evaluate(row) == "35+28=00064"
    assert output.locator("title").nth(1).text_content() == "5"
    assert_equals_static(page, attention_diagram(panels, target=0))
    page.locator("select[name=target]").select_option(label="“4”  position 10")
    assert output.evaluate(row) == "36+28=00064"
    assert_equals_static(page, attention_diagram(panels))
    # Nothing else to draw than attention, and what to do about it.
    assert "trace with attribution=True" in page.locator(".controls").inner_text()


def test_each_weight_has_its_own_smallest_threshold(page, tmp_path, make_random_flow):
    tokens = tuple(f" t{i}" for i in range(30))
    targets = tuple((column, column - 1) for column in range(1, 30))
    flow = make_random_flow(6, 6, tokens, tokens, targets)
    figure = attention_diagram({"model": flow}, threshold=0.02)
    show(page, tmp_path, figure)
    floors = figure.data["floors"]
    assert floors["attention"] == 1 and floors["first-order"] > 20
    legend = page.locator("[data-legend='negative']")
    assert not legend.is_visible()
    page.locator("select[name=weight]").select_option("first-order")
    assert legend.is_visible()
    slider = page.locator("input[name=threshold]")
    assert float(slider.get_attribute("min")) >= floors["first-order"] / 1000
    limit = floors["first-order"] / 1000
    assert page.locator("output").text_content() in (f"{limit:.2f}", f"{limit:.3f}")
    expected = attention_diagram({"model": flow}, weight="first-order", threshold=limit)
    assert_equals_static(page, expected)
    page.locator("select[name=weight]").select_option("attention")
    assert float(slider.get_attribute("min")) == 0


def test_hostile_tokens_stay_text(page, tmp_path, make_flow, circuit):
    hostile = ['"&<', "<!--<script", "</script", "<!--", "</style>", "'", "${x}", "`", "�", "4"]
    tokens = (ATTACK, *hostile)
    flow = make_flow(circuit, input_tokens=tokens, output_tokens=tokens)
    show(page, tmp_path, attention_diagram({ATTACK: flow, "b": flow}, title=ATTACK))
    assert page.locator("img").count() == 0
    hover_edge(page, 0, 0, 9, 0)
    assert f"“{ATTACK}”" in page.locator(".tip").inner_text()
    assert page.locator("select[name=target] option").count() == 5
    assert page.title() == ATTACK
    page.wait_for_timeout(50)  # an image that fails to load would call alert by now


def test_figures_on_one_page_do_not_touch_each_other(page, tmp_path, two_panels, sparse_flow):
    figure = attention_diagram(two_panels)
    show(page, tmp_path, figure, figure, attention_diagram({"other": sparse_flow}))
    assert page.locator(".sparse-tl-circuit[data-ready]").count() == 3
    page.locator("input[name=threshold]").nth(1).fill("0.6")
    assert [panel(page, 1, i).get_attribute("data-edges-shown") for i in (0, 1)] == ["5", "2"]
    assert panel(page, 0, 2).get_attribute("data-edges-shown") == "5"
    assert page.evaluate("Object.keys(window).filter(name => /circuit/i.test(name))") == []
