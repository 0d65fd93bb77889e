"""The interactive component diagram in a browser without a network."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import Any

from component_examples import ATTACK, EDGES, draw, neurons_of

from sparse_tl.circuits import Circuit
from sparse_tl.graph import CircuitGraph, PositionedGraph
from sparse_tl.plots import ComponentDiagram, component_diagram

READ = """() => [...document.querySelectorAll('.canvas > svg :is(path, rect, text)')]
    .filter(shape => shape.dataset.role !== 'hover').map(shape =>
        [...['d', 'x', 'y', 'width', 'fill', 'stroke', 'stroke-width', 'stroke-dasharray']
            .map(name => shape.getAttribute(name)), shape.textContent || null])"""
NAMES = """() => [...document.querySelectorAll('g[data-node]')].map(node => node.dataset.node)"""


def show(page: Any, folder: Path, figure: ComponentDiagram, width: int = 752) -> None:
    """At the width at which the page has the width of the static figure."""
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(figure.save(folder / "page.html").as_uri())


def node(page: Any, name: str, index: int = 0) -> Any:
    return page.locator(f"g[data-panel='{index}'] g[data-node='{name}']")


def tip(page: Any) -> list[str]:
    return page.locator(".tip").first.inner_text().splitlines()


def hover(page: Any, link: str) -> list[str]:
    """What the page tells of a link under the pointer."""
    x, y = page.locator(f"path[data-link='{link}']").first.evaluate(
        """path => {
        const point = path.getPointAtLength(path.getTotalLength() / 2);
        const {x, y} = point.matrixTransform(path.getScreenCTM());
        return [x, y];
    }"""
    )
    page.mouse.move(x, y)
    return tip(page)


def set_edges(page: Any, n: int) -> None:
    page.locator("input[name=edges]").fill(str(n))
    page.locator("input[name=edges]").press("Tab")


def assert_looks_like(page: Any, figure: ComponentDiagram) -> None:
    """The page shows what it shows as a static file."""
    names = ("d", "x", "y", "width", "fill", "stroke", "stroke-width", "stroke-dasharray")
    assert page.evaluate(READ) == [
        [*(shape.get(name) for name in names), shape.text]
        for shape in ElementTree.fromstring(figure.svg).iter()
        if shape.tag.endswith(("path", "rect", "text"))
    ]


def test_every_choice_looks_like_its_static_figure(page, tmp_path, make_random_circuit):
    panels = {"a": make_random_circuit(), "b": make_random_circuit(n_edges=30, seed=1)}
    show(page, tmp_path, draw(panels))
    assert_looks_like(page, draw(panels))
    for n_edges, colour in ((25, "slot"), (7, "sign"), (60, "slot")):
        set_edges(page, n_edges)
        page.locator("select[name=colour]").select_option(colour)
        assert_looks_like(page, draw(panels, max_circuit_edges=n_edges, colour=colour))
    page.locator("input[name=slots]").check()
    page.locator("input[name=off_path]").check()
    assert_looks_like(page, draw(panels, slots=True, off_path=True, max_circuit_edges=60))
    page.locator("input[name=slots]").uncheck()
    page.locator("input[name=off_path]").uncheck()
    page.locator("select[name=by]").select_option("score")
    state = {"format": "sparse_tl component diagram 1", "by": "score", "edges": 12}
    set_edges(page, 12)
    assert_looks_like(page, draw(panels, state=state))
    page.locator("input[name=difference]").check()
    assert_looks_like(page, draw(panels, state=state, difference=True))


def test_the_card_of_an_mlp_opens_to_its_neurons(page, tmp_path, make_circuit):
    circuits = {"one": make_circuit(EDGES), "two": make_circuit(EDGES)}
    neurons = {"two": [neurons_of("m1", before="</b>" + "x" * 90), neurons_of("m0", n=1)]}
    show(page, tmp_path, draw(circuits, neurons=neurons, unit="nats"), 1000)
    card = page.locator(".card")
    for name, panel in (("m1", 0), ("a2.h1", 1)):  # neurons are given for the other panel
        node(page, name, panel).click()
        assert card.is_visible() and card.locator("details").count() == 0
        page.keyboard.press("Escape")
    node(page, "m1", 1).click()
    assert card.locator("h4").first.text_content() == "neurons (2 of 1,536)"
    rows = card.locator("summary")
    assert rows.all_inner_texts()[0].split() == ["m1.n0", "−0.5", "0.5", "→", "−0.125"]
    rows.first.focus()
    page.keyboard.press("Enter")
    assert card.locator(".prompt").first.is_visible()
    prompt = card.locator(".prompt").first.text_content()
    assert prompt == "x" * 80 + " to her  2.5 → −0.125"
    logits = card.locator("details").first.locator("p:not(.prompt)").all_text_contents()
    assert logits == [f"promotes ·Mary {ATTACK[:40]} ↵"]
    page.keyboard.press("Escape")
    # Two circuits as one: the neurons of both.
    page.locator("input[name=difference]").check()
    node(page, "m1").click()
    assert card.locator("h4").first.text_content() == "neurons in two (2 of 1,536)"


def test_neurons_at_positions_and_in_supernodes(page, tmp_path):
    site = PositionedGraph(CircuitGraph(2, 2, 2), ("A", "END"))
    names = ["input->m0@A", "m0->a1.h1<v>@A", "a1.h1->logits@END"]
    figure = component_diagram(Circuit.of(site, names), neurons=neurons_of("m0"))
    show(page, tmp_path, figure)
    node(page, "m0@A").click()
    assert page.locator(".card details").count() == 2
    state = {"format": "sparse_tl component diagram 1", "groups": {"m0": ["m0@A", "a1.h1@END"]}}
    figure = component_diagram(Circuit.of(site, names), neurons=neurons_of("m0"), state=state)
    show(page, tmp_path, figure)
    node(page, "m0").click()
    assert page.locator(".card details").count() == 0


def test_whole_paths_through_what_is_under_the_pointer_are_lit(page, tmp_path, make_circuit):
    """A trunk to an MLP and to heads has the colour of what is lit in it."""
    paths = (("m0",), ("a2.h0<k>",), ("a1.h0<q>", "m2"))
    steps = [pair for path in paths for pair in pairwise(("input", *path, "logits"))]
    edges = {f"{source.split('<')[0]}->{reader}": 1.0 for source, reader in steps}
    show(page, tmp_path, draw({"m": make_circuit(edges)}))
    lines = page.locator("[data-role=links] path")
    read = """all => all.map(line => [line.dataset.link ?? "trunk", line.getAttribute("stroke"),
        line.getAttribute("opacity")])"""
    before = lines.evaluate_all(read)
    assert all(opacity is None for *_, opacity in before)
    node(page, "m2").hover()
    lit = {link: stroke for link, stroke, opacity in lines.evaluate_all(read) if not opacity}
    assert lit.keys() == {"trunk", "input->a1.h0", "a1.h0->m2", "m2->logits"}
    assert lit["trunk"] == lit["input->a1.h0"]
    assert lit["trunk"] != next(stroke for link, stroke, _ in before if link == "trunk")
    hover(page, "m0->logits")
    lit = {link for link, _, opacity in lines.evaluate_all(read) if not opacity}
    assert lit >= {"input->m0", "m0->logits"} and "m2->logits" not in lit
    page.mouse.move(5, 5)
    assert lines.evaluate_all(read) == before


def test_the_difference_tells_the_scores_of_each_circuit(page, tmp_path, make_circuit):
    one = make_circuit({"input->logits": 1.0, "input->m0": 0.5, "m0->logits": 0.5})
    two = make_circuit({"input->m1": -3.0, "m1->logits": -2.0, "input->logits": -4.0})
    show(page, tmp_path, draw({"dense": one, "sparse": two}, difference=True))
    assert hover(page, "input->m1")[1:3] == ["sparse:", "input->m1 −3"]
    assert hover(page, "input->m0")[1:3] == ["dense:", "input->m0 0.5"]
    assert hover(page, "input->logits")[1:5] == [
        *("dense:", "input->logits 1"),
        *("sparse:", "input->logits −4"),
    ]
    node(page, "m1").click()
    headings = page.locator(".card h4").all_text_contents()
    assert headings == [
        *("reads, in dense (0)", "is read by, in dense (0)"),
        *("reads, in sparse (1)", "is read by, in sparse (1)"),
    ]
    assert page.locator(".card td").all_text_contents()[2] == "−3"


def test_an_edge_that_several_heads_of_a_supernode_read_counts_once(page, tmp_path, make_circuit):
    scores = {
        "input->a1.kv0<k>": 1.0,  # one edge, which the queries of both heads read
        "input->m0": 1.25,
        "a1.h0->logits": 1.0,
        "a1.h1->logits": 1.0,
        "m0->logits": 1.25,
    }
    circuit = make_circuit(scores, CircuitGraph(2, 2, 1))
    state = {
        "format": "sparse_tl component diagram 1",
        "groups": {"both": ["a1.h0", "a1.h1"]},
        "by": "score",
    }
    show(page, tmp_path, draw({"m": circuit}, state=state))
    widths = [
        float(page.locator(f"path[data-link='{link}']").first.get_attribute("stroke-width"))
        for link in ("input->both", "input->m0")
    ]
    assert widths[0] < widths[1]  # 1, not 2, against 1.25
    assert sum("a1.kv0<k>" in line for line in hover(page, "input->both")) == 1


def test_supernodes_by_hand_and_by_layers(page, tmp_path, make_random_circuit):
    circuit = make_random_circuit()
    show(page, tmp_path, draw({"m": circuit}))
    names = [name for name in page.evaluate(NAMES) if name.startswith("a")][:2]
    for name in names:
        node(page, name).click(modifiers=["Shift"])
    page.locator("button[name=group]").click()
    assert set(names).isdisjoint(page.evaluate(NAMES))
    page.locator(".card input[name=label]").fill("copiers")
    page.locator(".card input[name=label]").press("Enter")
    assert node(page, "Group 1").locator("text").text_content() == "copiers (2)"
    state = {"format": "sparse_tl component diagram 1"}
    state |= {"groups": {"Group 1": names}, "labels": {"Group 1": "copiers"}}
    page.locator(".card button[name=close]").click()
    assert_looks_like(page, draw({"m": circuit}, state=state))
    node(page, "Group 1").click()
    page.locator("button[name=ungroup]").click()
    assert set(names) <= set(page.evaluate(NAMES))
    page.locator("select[name=groups]").select_option("2")
    assert set(page.evaluate(NAMES)) == {"input", "Layers 0–1", "Layers 2–3", "logits"}
    status = page.locator(".status")
    assert status.text_content() == "2 supernodes"
    page.locator("select[name=groups]").select_option("readers")
    page.locator("select[name=groups]").select_option("")
    assert status.text_content() == ""
    assert set(names) <= set(page.evaluate(NAMES))


def test_supernodes_by_shared_readers(page, tmp_path, make_circuit):
    written = {"a0.h0": ["a2.h0<q>", "m2"], "a0.h1": ["m2"], "m0": ["a2.h0<v>", "m2"]}
    written |= {"a1.h0": ["m2", "logits"], "a1.h1": ["logits", "m2"], "m1": ["m2"]}
    edges = {f"input->{n}" + "<v>" * n.startswith("a"): 1.0 for n in written}
    edges |= {f"{head}->{reader}": 1.0 for head, readers in written.items() for reader in readers}
    edges |= {"a2.h0->logits": 1.0, "m2->logits": 1.0}
    figure = draw({"m": make_circuit(edges)})
    show(page, tmp_path, figure)
    page.locator("select[name=groups]").select_option("readers")
    # Only nodes of one layer with all readers in common, by whatever slot these read.
    groups = {"L0 → a2.h0, m2": ["a0.h0", "m0"], "L1 → logits, m2": ["a1.h0", "a1.h1"]}
    groups["L2 → logits"] = ["a2.h0", "m2"]
    alone = {"input", "a0.h1", "m1", "logits"}
    assert set(page.evaluate(NAMES)) == {*groups} | alone
    state = {"format": "sparse_tl component diagram 1", "groups": groups}
    assert_looks_like(page, draw({"m": make_circuit(edges)}, state=state))


def test_a_state_is_saved_and_opened_again(page, tmp_path, make_random_circuit):
    circuit = make_random_circuit(n_edges=80)
    figure = draw({"m": circuit})
    show(page, tmp_path, figure)
    last = [name for name in page.evaluate(NAMES) if name.startswith("a")][-1]
    set_edges(page, 5)
    page.locator("input[name=search]").fill(last)
    page.keyboard.press("Enter")
    page.locator("button[name=pin]").click()
    assert node(page, last).count() == 1
    page.locator(".card textarea").fill("seen in </script> the paper")
    page.locator(".card input[name=label]").fill(ATTACK)
    with page.expect_download() as waiting:
        page.locator("button[name=save]").click()
    path = tmp_path / "state.json"
    waiting.value.save_as(path)
    state = json.loads(path.read_text())
    assert state["pins"] == [last] and state["labels"][last] == ATTACK and state["edges"] == 5
    assert "img" not in page.evaluate(
        "() => [...document.querySelectorAll('*')].map(e => e.localName)"
    )
    static = draw({"m": circuit}, state=path)
    page.locator(".card button[name=close]").click()
    assert_looks_like(page, static)
    show(page, tmp_path, figure)
    page.locator("input[name=state]").set_input_files(path)
    page.locator(".status", has_text="opened").wait_for()
    assert_looks_like(page, static)
    path.write_text('{"format": "other"}')
    page.locator("input[name=state]").set_input_files(path)
    page.locator(".status", has_text="not opened: expected a state").wait_for()
    with page.expect_download() as waiting:
        page.locator("button[name=picture]").click()
    waiting.value.save_as(tmp_path / "picture.svg")
    assert ElementTree.parse(tmp_path / "picture.svg").getroot().tag.endswith("svg")


def test_positions_and_grouped_queries(page, tmp_path, make_random_circuit):
    site = PositionedGraph(CircuitGraph(2, 2, 2), ("0", "1"))
    names = [
        "input->a0.h0<v>@0",
        "a0.h0->a1.h1<k>@1",
        "a1.h1->logits@1",
        "a0.h0->m0@1",
        "m0->logits@1",
    ]
    figure = component_diagram(Circuit.of(site, names), tokens=["The", ATTACK])
    show(page, tmp_path, figure)
    assert_looks_like(page, figure)
    assert page.locator("g[data-node='a0.h0<kv>@0']").count() == 1
    grouped = draw({"m": make_random_circuit(n_kv_heads=2)})
    show(page, tmp_path, grouped)
    assert_looks_like(page, grouped)
