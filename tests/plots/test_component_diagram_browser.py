"""The interactive component diagram in a browser without a network."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from component_examples import ATTACK, EDGES, draw

from sparse_tl.graph import CircuitGraph
from sparse_tl.plots import ComponentDiagram
from sparse_tl.plots.palette import KEY, OPEN_PORT

LOOKS = ("data-edge", "data-reader", "data-kind", "stroke", "stroke-width")
READ_PATHS = f"""panel => [...panel.querySelectorAll('[data-edge]')].map(
    path => {list(LOOKS)}.map(name => path.getAttribute(name)))"""
READ_PLACES = """panel => [...panel.querySelectorAll('[data-edge]')].map(
    path => path.getAttribute('d'))"""
READ_STATES = """panel => Object.fromEntries([...panel.querySelectorAll('[data-node]')].map(
    node => [node.dataset.node, node.dataset.state]))"""
READ_NEAR = """panel => [...panel.querySelectorAll('[data-node]')].filter(
    node => !node.hasAttribute('opacity')).map(node => node.dataset.node).sort()"""


def show(page: Any, folder: Path, figure: ComponentDiagram, copies: int = 1) -> None:
    path = folder / "page.html"
    if copies == 1:
        figure.save(path)
    else:
        path.write_text(f"<!DOCTYPE html><meta charset='utf-8'><body>{str(figure) * copies}</body>")
    page.goto(path.as_uri())


def panel(page: Any, index: int = 0) -> Any:
    return page.locator(f"g[data-panel='{index}']").first


def node(page: Any, name: str, index: int = 0) -> Any:
    return panel(page, index).locator(f"g[data-node='{name}']")


def tip(page: Any) -> list[str]:
    return page.locator(".tip").first.inner_text().splitlines()


def hover_edge(page: Any, rank: int, index: int = 0) -> None:
    """Moves to the middle of a line."""
    x, y = (
        panel(page, index)
        .locator(f"path[data-edge='{rank}']")
        .evaluate(
            """path => {
            const point = path.getPointAtLength(path.getTotalLength() / 2);
            const {x, y} = point.matrixTransform(path.getScreenCTM());
            return [x, y];
        }"""
        )
    )
    page.mouse.move(x, y)


def static_panels(figure: ComponentDiagram) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(figure.svg)
    return [group for group in root.iter() if "data-panel" in group.attrib]


def assert_looks_like(page: Any, figure: ComponentDiagram) -> None:
    """The page draws the edges and words of a static figure, and the nodes that it has."""
    for index, group in enumerate(static_panels(figure)):
        elements = [e for e in group.iter() if "data-edge" in e.attrib]
        expected = [[e.get(name) for name in LOOKS] for e in elements]
        assert panel(page, index).evaluate(READ_PATHS) == expected
        caption = panel(page, index).locator("[data-role='caption']").text_content()
        assert [caption] == [e.text for e in group.iter() if e.get("data-role") == "caption"]
        states = panel(page, index).evaluate(READ_STATES)
        nodes = [e for e in group.iter() if "data-node" in e.attrib]
        drawn = {e.get("data-node", ""): e.get("data-state") for e in nodes}
        assert {name: states[name] for name in drawn} == drawn
        assert {states[name] for name in states.keys() - drawn} <= {"absent"}


def test_every_choice_looks_like_its_static_figure(page, tmp_path, make_random_circuit):
    panels = {"a": make_random_circuit(), "b": make_random_circuit(n_edges=10, seed=1)}
    figure = draw(panels)
    show(page, tmp_path, figure)
    assert page.locator(".sparse-tl-circuit").get_attribute("data-ready") == ""
    assert_looks_like(page, figure)
    for index, group in enumerate(static_panels(figure)):
        places = [e.get("d") for e in group.iter() if "data-edge" in e.attrib]
        assert panel(page, index).evaluate(READ_PLACES) == places
    for n_edges, colour in ((25, "slot"), (7, "sign"), (1, "sign"), (60, "slot")):
        page.locator("input[name=edges]").fill(str(n_edges))
        page.locator("select[name=colour]").select_option(colour)
        assert page.locator("output").text_content() == str(n_edges)
        assert_looks_like(page, draw(panels, max_circuit_edges=n_edges, colour=colour))
        assert page.locator(f"[data-legend='{colour}']").is_visible()
        other = {"slot": "sign", "sign": "slot"}[colour]
        assert not page.locator(f"[data-legend='{other}']").is_visible()


def test_hovering_an_edge_tells_its_name_and_score(page, tmp_path, make_circuit):
    show(page, tmp_path, draw({"m": make_circuit(EDGES)}, unit="logits"))
    assert not page.locator(".tip").is_visible()
    hover_edge(page, 3)
    assert tip(page) == [
        "m1->a2.h1<q>",
        "score −0.25 logits (helps)",
        "rank 4 of 6 by |score|",
    ]
    hover_edge(page, 2)
    assert tip(page)[:2] == ["a0.h0->m1", "score 0.49 logits (hurts)"]
    hover_edge(page, 4)
    assert tip(page)[-1] == "on no path from input to logits"
    page.mouse.move(5, 5)
    assert not page.locator(".tip").is_visible()
    # A hidden edge cannot be hovered.
    place = panel(page).locator("path[data-edge='5']").bounding_box()
    page.locator("input[name=edges]").fill("5")
    page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    assert "m0->logits" not in page.locator(".tip").text_content()


def test_hovering_a_node_lists_its_edges(page, tmp_path, make_circuit):
    show(page, tmp_path, draw({"m": make_circuit(EDGES)}))
    node(page, "a2.h1").hover()
    assert tip(page) == [
        "a2.h1",
        "reads (1):",
        "m1->a2.h1<q> −0.25",
        "is read (1):",
        "a2.h1->logits −1",
    ]
    page.locator("input[name=edges]").fill("1")
    node(page, "m1").hover()
    assert tip(page) == ["m1", "no edge shown here"]


def test_clicking_a_node_shows_its_ancestors_and_descendants(page, tmp_path, make_circuit):
    circuit = make_circuit(EDGES)
    show(page, tmp_path, draw({"a": circuit, "b": circuit}))
    node(page, "m1").click()
    near = ["a0.h0", "a2.h1", "input", "logits", "m1"]
    assert panel(page).evaluate(READ_NEAR) == near
    assert panel(page).get_attribute("data-focus") == "m1"
    dimmed = panel(page).locator("path[data-edge][opacity]")
    assert sorted(dimmed.evaluate_all("all => all.map(e => e.dataset.edge)")) == ["4", "5"]
    assert len(panel(page, 1).evaluate(READ_NEAR)) == 7  # the other panel is left alone
    node(page, "a1.h1", 1).click()  # and takes over
    assert panel(page).get_attribute("data-focus") == ""
    assert panel(page, 1).evaluate(READ_NEAR) == ["a1.h1", "input"]
    node(page, "a1.h1", 1).click()
    assert len(panel(page, 1).evaluate(READ_NEAR)) == 7
    node(page, "m0").click()
    page.keyboard.press("Escape")
    assert len(panel(page).evaluate(READ_NEAR)) == 7


def test_a_focus_follows_the_shown_edges(page, tmp_path, make_circuit):
    show(page, tmp_path, draw({"m": make_circuit(EDGES)}))
    node(page, "a0.h0").click()
    page.locator("input[name=edges]").fill("3")
    assert panel(page).evaluate(READ_NEAR) == ["a0.h0", "input", "m1"]


def test_the_keyboard_reaches_nodes_and_tells_their_edges(page, tmp_path, make_circuit):
    show(page, tmp_path, draw({"m": make_circuit(EDGES)}))
    assert panel(page).locator("g[tabindex='0']").get_attribute("aria-label") == "logits"
    page.locator("select[name=colour]").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    assert tip(page)[0] == "a2.h1"
    page.keyboard.press("Enter")
    assert panel(page).get_attribute("data-focus") == "a2.h1"
    assert node(page, "a2.h1").get_attribute("aria-pressed") == "true"
    for key in ("ArrowDown", "ArrowLeft", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    row = page.evaluate("document.activeElement.dataset.node")
    assert row in ("m1", "a1.h1") and tip(page)[0] == row
    page.keyboard.press(" ")
    assert panel(page).get_attribute("data-focus") == row
    page.keyboard.press("Escape")
    assert panel(page).get_attribute("data-focus") == ""


def test_edges_without_scores_have_no_slider(page, tmp_path, make_circuit):
    show(page, tmp_path, draw({"m": make_circuit(EDGES, scored=False)}))
    assert page.locator("input").count() == page.locator("select").count() == 0
    hover_edge(page, 0)
    assert tip(page) == ["input->a0.h0<v>"]
    node(page, "m1").click()
    assert panel(page).get_attribute("data-focus") == "m1"


def test_an_edge_with_several_readers(page, tmp_path, make_circuit):
    edges = {"input->a1.kv0<k>": -1.0, "a1.h0->logits": 0.5, "a1.h1->logits": 0.4}
    show(page, tmp_path, draw({"m": make_circuit(edges, CircuitGraph(2, 4, 2))}))
    node(page, "a1.h1").click()
    assert panel(page).evaluate(READ_NEAR) == ["a1.h1", "input", "logits"]
    node(page, "a1.h0").hover()
    assert tip(page)[2] == "input->a1.kv0<k> −1"


def test_heads_that_share_a_key_look_like_the_static_figure(page, tmp_path, make_circuit):
    edges = {"input->a0.kv0<k>": -1.0, "a0.h1->logits": 0.5, "a0.h0->m1": 0.4}
    figure = draw({"m": make_circuit(edges, CircuitGraph(2, 4, 2))})
    show(page, tmp_path, figure)
    assert_looks_like(page, figure)
    port = "[data-node='{}'] [data-slot='k']"
    ports = [page.locator(port.format(head)).get_attribute("fill") for head in ("a0.h0", "a0.h1")]
    assert ports == [OPEN_PORT, KEY]


def test_hostile_names_stay_text(page, tmp_path, make_circuit):
    circuit = make_circuit(EDGES)
    figure = draw({ATTACK: circuit, "b": circuit}, title=ATTACK, unit=ATTACK)
    show(page, tmp_path, figure)
    assert page.title() == ATTACK
    hover_edge(page, 0)
    assert ATTACK in page.locator(".tip").inner_text()
    assert page.locator("img").count() == 0


def test_without_a_script_the_page_shows_the_static_figure(browser, tmp_path, make_circuit):
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    show(page, tmp_path, draw({"m": make_circuit(EDGES)}))
    assert page.locator("path[data-edge]").count() == 6
    assert page.locator("text=a2.h1").is_visible()
    assert page.locator(".controls").inner_text() == ""
    context.close()


def test_a_figure_shown_twice_works_twice(page, tmp_path, make_circuit):
    show(page, tmp_path, draw({"m": make_circuit(EDGES)}), copies=2)
    assert page.locator("[data-ready]").count() == 2
    page.locator("input[name=edges]").nth(1).fill("2")
    shown = page.locator("g[data-panel]").evaluate_all("all => all.map(e => e.dataset.edgesShown)")
    assert shown == ["6", "2"]
