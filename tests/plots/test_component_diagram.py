"""The component diagram as its script draws it, here without a page."""

from __future__ import annotations

import asyncio
import itertools
import re
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from component_examples import ATTACK, EDGES, Scored, draw

from sparse_tl.circuits import Circuit, HeadBehaviour, Scores
from sparse_tl.head_roles import HeadRoles
from sparse_tl.parts.graph import CircuitGraph
from sparse_tl.parts.positioned_graph import PositionedGraph
from sparse_tl.plots import ComponentDiagram, component_diagram
from sparse_tl.plots.diagrams.component_data import STATE_FORMAT
from sparse_tl.plots.diagrams.component_style import ONLY
from sparse_tl.plots.page.interactive_html import COMPONENT_DRAWING
from sparse_tl.plots.page.javascript import run_script
from sparse_tl.plots.page.palette import KEY, KINDS_OF_HEADS, MARKS, OPEN_EDGE, QUERY, ROLES, VALUE

SVG = "{http://www.w3.org/2000/svg}"


def panels_of(figure: ComponentDiagram) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(figure.svg)
    return [group for group in root.iter() if "data-panel" in group.attrib]


def nodes_of(panel: ElementTree.Element) -> dict[str, str]:
    return {
        e.get("data-node", ""): e.get("data-state", "") for e in panel.iter() if e.get("data-node")
    }


def links_of(panel: ElementTree.Element) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for e in panel.iter():
        if e.get("data-link"):
            found.setdefault(e.get("data-link", ""), []).append(e.get("stroke", ""))
    return found


def texts_of(element: ElementTree.Element) -> list[str]:
    return [e.text or "" for e in element.iter() if e.tag == f"{SVG}text"]


def test_only_whole_paths_are_drawn_unless_asked_for(make_circuit):
    circuit = make_circuit(EDGES)
    (panel,) = panels_of(draw({"m": circuit}))
    path = {"input->a0.h0", "a0.h0->m1", "m1->a2.h1", "a2.h1->logits"}
    assert links_of(panel).keys() == path
    assert set(nodes_of(panel).values()) == {"path"}
    assert texts_of(panel)[1] == (
        f"4 of 6 circuit edges, by influence, in whole paths from input to logits (model: "
        f"{circuit.circuit.graph.n_edges})"
    )
    (panel,) = panels_of(draw({"m": circuit}, off_path=True))
    links = links_of(panel)
    assert links.keys() == path | {"input->a1.h1", "m0->logits"}
    assert set(links["m0->logits"]) == set(links["input->a1.h1"]) == {OPEN_EDGE}
    assert OPEN_EDGE not in [stroke for name in path for stroke in links[name]]
    assert "2 links on no path" in texts_of(panel)[1]


def test_the_inputs_of_a_head_are_merged_until_asked_for(make_circuit):
    circuit = make_circuit(
        {f"input->a1.h0<{s}>": -1.0 for s in "qkv"} | {"a1.h0->logits": 2.0, "input->m0": 1.0}
    )
    (panel,) = panels_of(draw({"m": circuit}))
    assert [len(strokes) for strokes in links_of(panel).values()] == [1, 1]
    (panel,) = panels_of(draw({"m": circuit}, slots=True))
    strokes = links_of(panel)["input->a1.h0"]
    assert len(set(strokes)) == 3
    (panel,) = panels_of(draw({"m": make_circuit({"input->a0.h0<q>": 1.0, "a0.h0->logits": 1.0})}))
    assert links_of(panel)["input->a0.h0"] == [QUERY]
    assert {QUERY, KEY, VALUE}.isdisjoint(links_of(panel)["a0.h0->logits"])


def test_colours_tell_whether_edges_help(make_circuit):
    (panel,) = panels_of(draw({"m": make_circuit(EDGES)}, colour="sign"))
    links = links_of(panel)
    helping = {links[name][0] for name in ("input->a0.h0", "a2.h1->logits")}
    assert links["a0.h0->m1"][0] not in helping


def test_the_difference_tells_whose_a_link_is(make_circuit):
    one = make_circuit({"input->m0": 1.0, "m0->logits": 1.0, "input->logits": 1.0})
    two = make_circuit({"input->m1": 1.0, "m1->logits": 1.0, "input->logits": 1.0})
    (panel,) = panels_of(draw({"dense": one, "sparse": two}, difference=True))
    links = links_of(panel)
    assert set(links["m0->logits"]) == {ONLY[0]} and set(links["m1->logits"]) == {ONLY[1]}
    assert set(links["input->logits"]).isdisjoint(ONLY)
    assert texts_of(panel)[1] == "2 links only in dense, 2 only in sparse, 1 in both"
    with pytest.raises(ValueError, match="expected two circuits .*got 1"):
        draw({"m": one}, difference=True)


def test_a_node_has_one_place_in_all_panels(make_random_circuit):
    figure = draw({"dense": make_random_circuit(), "sparse": make_random_circuit(n_edges=20)})
    dense, sparse = panels_of(figure)
    assert nodes_of(dense).keys() == nodes_of(sparse).keys()
    assert "absent" in nodes_of(sparse).values() and "absent" not in nodes_of(dense).values()
    places = [
        {e.get("data-node"): e[0].get("x") for e in panel.iter() if e.get("data-node")}
        for panel in (dense, sparse)
    ]
    assert places[0] == places[1]


SIZES = [
    {},
    {"n_layers": 12, "n_heads": 12, "n_edges": 60, "seed": 3},
    {"n_layers": 12, "n_heads": 12, "n_edges": 300},
    {"n_layers": 3, "n_heads": 40, "n_edges": 150},
]


LAYOUT = """(data => {
    const { layout, panels: [panel] } = viewOf(data, data.view, 720);
    const passed = ([i, row]) => layout.heights.flatMap((y, r) =>
        r > row && r <= layout.top.get(i) ? [[layout.bend(i, r), y]] : []);
    const paths = shapesOf(layout, panel.links, () => "#000000", "#000000").map(({ d }) => d);
    return [[...layout.boxes.values()], [...layout.rows].flatMap(passed), paths, layout.columns];
})"""
"""The boxes of nodes, the bends of trunks, the curves and the columns."""


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("slots", [False, True])
def test_nodes_are_apart_and_no_line_runs_through_one(make_random_circuit, sizes, slots):
    panels = {"m": make_random_circuit(**sizes)}
    figure = draw(panels, max_circuit_edges=10**6, slots=slots, off_path=True)
    boxes, bends, paths, ((left, right),) = run_script(COMPONENT_DRAWING, LAYOUT, figure.data)
    assert right == 704
    rows: dict[float, list] = {}
    for box in boxes:
        rows.setdefault(box["y"], []).append(box)
        assert box["x"] - box["width"] / 2 > left - 8 and box["x"] + box["width"] / 2 < right + 8
    for row in rows.values():
        row.sort(key=lambda box: box["x"])
        for first, second in itertools.pairwise(row):
            assert second["x"] - first["x"] >= (first["width"] + second["width"]) / 2 + 3.9
    # Lines turn between rows; within one they are straight, at a bend.
    assert bends and paths
    for x, y in bends:
        for box in rows[y]:
            assert abs(x - box["x"]) > box["width"] / 2 + 1.9
    for path in paths:
        for y in map(float, re.findall(r"[M ][\d.]+ ([\d.]+)(?=C|M|V|$)", path)):
            row = min(rows, key=lambda at: abs(at - y))
            assert abs(row - y) >= 19 / 2 - 0.06


def test_rows_are_layers_upwards_and_unused_layers_take_no_room(make_circuit):
    edges = {"input->a0.h1<v>": 1.0, "a0.h1->m2": 1.0, "m2->logits": 1.0, "input->a2.h0<q>": 1.0}
    (panel,) = panels_of(draw({"m": make_circuit(edges | {"a2.h0->logits": 1.0})}))
    y = {e.get("data-node"): float(e[0].get("y", "")) for e in panel.iter() if e.get("data-node")}
    assert y["input"] > y["a0.h1"] > y["m2"] == y["a2.h0"] > y["logits"]
    assert [text for text in texts_of(panel) if text.startswith("Layer")] == ["Layer 0", "Layer 2"]
    above = make_circuit(edges | {"a2.h0->m2": 1.0})
    (panel,) = panels_of(draw({"m": above}))
    y = {e.get("data-node"): float(e[0].get("y", "")) for e in panel.iter() if e.get("data-node")}
    assert y["a2.h0"] > y["m2"]


def test_scores_by_position_draw_their_strongest_edges() -> None:
    site = PositionedGraph(CircuitGraph(2, 2, 2), ("A", "END"))
    values = torch.rand(site.exists.shape) * site.exists
    scores = Scores(site, values, "eap")
    figure = scores.figure(title="By position", size=5)
    assert isinstance(figure, ComponentDiagram)
    assert set(links_of(panels_of(figure)[0])) == set(
        links_of(panels_of(component_diagram({"By position": scores.top(5)}, scores=scores))[0])
    )


def test_positions_are_columns_and_paths_cross_them():
    graph = CircuitGraph(2, 2, 2)
    site = PositionedGraph(graph, ("0", "1", "2"))
    names = ["input->a0.h0<v>@0", "a0.h0->a1.h1<k>@1", "a1.h1->logits@2", "input->m0@1"]
    circuit = Circuit.of(site, names)
    figure = circuit.figure(tokens=["The", ATTACK, "x" * 10_000])
    (panel,) = panels_of(figure)
    assert links_of(panel).keys() == {
        "input@0->a0.h0<kv>@0",
        "a0.h0<kv>@0->a0.h0@1",
        "a0.h0@1->a1.h1<kv>@1",
        "a1.h1<kv>@1->a1.h1@2",
        "a1.h1@2->logits@2",
    }
    assert set(nodes_of(panel).values()) == {"path"}
    x = {
        e.get("data-node"): float(e[0].get("x", "")) + float(e[0].get("width", "")) / 2
        for e in panel.iter()
        if e.get("data-node")
    }
    assert x["input@0"] < x["a0.h0@1"] < x["logits@2"]
    assert "The" in texts_of(panel) and "kv" in " ".join(texts_of(panel))
    assert "<img" not in str(figure) and str(figure).count("</script>") == 1
    assert "attention: keys and values to query" in texts_of(ElementTree.fromstring(figure.svg))
    with pytest.raises(ValueError, match="one text for each of 3 positions; got 1"):
        circuit.figure(tokens=["The"])
    with pytest.raises(ValueError, match="the same positions"):
        component_diagram({"a": circuit, "b": circuit.at(0)})


def test_groups_pins_and_labels_of_a_state_are_drawn(make_circuit):
    circuit = make_circuit(EDGES)
    state = {
        "format": "sparse_tl component diagram 1",
        "groups": {"early": ["a0.h0", "m1"]},
        "labels": {"a2.h1": "mover"},
        "edges": 3,
    }
    (panel,) = panels_of(draw({"m": circuit}, state=state))
    assert links_of(panel).keys() == {"input->early", "early->a2.h1", "a2.h1->logits"}
    assert {"mover", "early (2)"} <= set(texts_of(panel))


def test_marked_heads_are_framed(make_circuit):
    circuit = make_circuit(EDGES)
    (panel,) = panels_of(draw({"m": circuit}, marked={"mover": [(2, 1)], "other": ["a0.h0"]}))
    marks = {e.get("data-mark"): e.get("stroke") for e in panel.iter() if e.get("data-mark")}
    assert marks == {"a2.h1": MARKS[0], "a0.h0": MARKS[1]}


def test_a_large_circuit_holds_its_strongest_edges_and_says_so(make_random_circuit):
    circuit, scores = make_random_circuit(12, 12, 2500)
    figure = component_diagram(circuit, scores=scores)
    assert "2,000 strongest of 2,500 circuit edges" in figure.svg
    with pytest.raises(ValueError, match="to choose the 2,000 strongest of the 2,500"):
        component_diagram(circuit)
    assert circuit._repr_html_().startswith("<p>")


# ---- layered drawing ----------------------------------------------------------------------------


CROSSINGS = "((rows, segments) => countCrossings(rows, gapsOf(rows, segments)))"


def count_crossings(rows: list[list[int]], segments: list[dict[str, Any]]) -> int:
    return run_script(COMPONENT_DRAWING, CROSSINGS, rows, segments)


def order_rows(rows: list[list[int]], segments: list[dict[str, Any]]) -> list[list[int]]:
    return run_script(COMPONENT_DRAWING, "orderRows", rows, segments)


def segment(lower: int, upper: int, port: float = 0.0) -> dict[str, Any]:
    return {"lower": lower, "upper": upper, "port": port, "weight": 1.0}


@pytest.mark.parametrize("seed", range(3))
def test_crossings_are_counted_as_by_comparing_every_pair(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = [[6 * r + i for i in range(6)] for r in range(3)]
    segments = [
        segment(rows[r][i], rows[r + 1][j], port)
        for r, i, j, port in itertools.product(range(2), range(6), range(6), (-5.0, 5.0))
        if torch.rand(1, generator=generator) < 0.2
    ]
    expected = 0
    for first, second in itertools.combinations(segments, 2):
        lower = [some["lower"] for some in (first, second)]
        upper = [(some["upper"], some["port"]) for some in (first, second)]
        if lower[0] // 6 == lower[1] // 6:
            expected += (lower[0] < lower[1] and upper[0] > upper[1]) or (
                lower[0] > lower[1] and upper[0] < upper[1]
            )
    assert count_crossings(rows, segments) == expected > 0
    ordered = order_rows(rows, segments)
    assert [sorted(row) for row in ordered] == rows
    assert count_crossings(ordered, segments) < expected


def test_a_graph_that_can_be_drawn_without_crossings_is():
    rows = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    segments = [segment(*pair) for pair in ((0, 5), (1, 3), (2, 4), (3, 7), (4, 8), (5, 6))]
    assert count_crossings(rows, segments) > 0
    assert count_crossings(order_rows(rows, segments), segments) == 0


def test_positions_are_the_least_squares_ones_under_the_separations():
    # 95 and 60, which have to be in order, meet at their mean by the weights 2 and 1.
    found = run_script(COMPONENT_DRAWING, "isotonic", [95, 60, 200], [2, 1, 1])
    assert found == pytest.approx([250 / 3] * 2 + [200])

    def place_rows(*arguments: Any) -> list[float]:
        return run_script(COMPONENT_DRAWING, "placeRows", [[0, 1], [2, 3]], *arguments)

    x = place_rows([segment(0, 2), segment(1, 3)], [[40], [60]], (0, 100))
    assert x == pytest.approx([20, 80, 20, 80])
    x = place_rows([segment(0, 3)], [[40], [40]], (90, 150))
    assert x[0] >= 90 and x[3] <= 150 and x[3] - x[2] >= 40


# ---- one piece of HTML, and files ---------------------------------------------------------------


def test_figures_are_drawn_in_any_thread_and_event_loop(make_circuit):
    panels = {"m": make_circuit(EDGES)}

    async def drawn() -> str:
        return draw(panels).svg

    with ThreadPoolExecutor(3) as pool:
        found = {*pool.map(lambda _: draw(panels).svg, range(6))}
        # In a thread, as a browser of other tests has a loop in this one.
        found.add(pool.submit(lambda: asyncio.run(drawn())).result())
    assert found == {draw(panels).svg}


# ---- bad input ----------------------------------------------------------------------------------


def test_scores_of_another_model_or_panel(make_circuit):
    circuit, scores = make_circuit(EDGES)
    _, other = make_circuit({"input->m0": 1.0}, CircuitGraph(2, 2, 2))
    for given in ({"m": other}, {"n": scores}):
        with pytest.raises(ValueError, match="scores of the circuit edges of a panel, one of"):
            component_diagram({"m": circuit}, scores=given)


def test_a_circuit_makes_its_own_figure(make_circuit):
    circuit, scores = make_circuit(EDGES)
    figure = circuit.figure(scores=scores, unit="logits")
    assert figure.svg == draw({"Circuit": Scored(circuit, scores)}, unit="logits").svg
    assert circuit._repr_html_() == str(circuit.figure())


def test_heads_have_the_colour_of_their_role(make_circuit):
    trajectories = torch.full((3, 1, 1, 3, 2), 0.9)
    trajectories[2] = 0.1  # G- closes all heads but one, which facilitates
    trajectories[2, 0, 0, 2, 1] = 0.9
    roles = HeadRoles(
        seeds=(0,),
        lambda_=0.1,
        trajectories=trajectories,
        recorded_at=(1,),
        losses=torch.zeros(3, 1),
        dense_loss=0.0,
        fitted=torch.ones(1, dtype=torch.bool),
        removed=torch.zeros(3, 2),
        removed_together=torch.zeros(2, 3, 1),
    )
    figure = draw({"m": make_circuit(EDGES)}, roles=roles)
    (panel,) = panels_of(figure)
    strokes = {e.get("data-node"): e[0].get("stroke") for e in panel.iter() if e.get("data-node")}
    assert strokes["a2.h1"] == ROLES["facilitation"]
    assert strokes["a0.h0"] == ROLES["irrelevance"]
    assert strokes["m1"] not in ROLES.values()
    assert {"facilitation", "irrelevance"} <= set(texts_of(ElementTree.fromstring(figure.svg)))


def test_heads_have_the_colour_and_the_label_of_what_they_do(make_circuit):
    behaviour = HeadBehaviour(
        {
            "induction": torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.6]]),
            "sink": torch.tensor([[0.7, 0.0], [0.0, 0.0], [0.0, 0.2]]),
            "copying": torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.8]]),
        }
    )
    figure = draw({"m": make_circuit(EDGES)}, roles=behaviour)
    (panel,) = panels_of(figure)
    strokes = {e.get("data-node"): e[0].get("stroke") for e in panel.iter() if e.get("data-node")}
    assert strokes["a2.h1"] == KINDS_OF_HEADS["induction"]
    assert strokes["a0.h0"] == KINDS_OF_HEADS["sink"]
    assert {"a2.h1 ind+", "a0.h0", "induction", "sink"} <= set(
        texts_of(ElementTree.fromstring(figure.svg))
    )
    state = {"format": STATE_FORMAT, "labels": {"a2.h1": "mine"}}
    named = draw({"m": make_circuit(EDGES)}, roles=behaviour, state=state)
    assert "mine" in texts_of(ElementTree.fromstring(named.svg))
    by_panel = draw({"m": make_circuit(EDGES)}, roles={"m": behaviour})
    assert "a2.h1" in texts_of(ElementTree.fromstring(by_panel.svg))
    other = HeadBehaviour({"sink": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"of HeadGrid\(3 layers x 2 heads\); got HeadGrid\(2 "):
        draw({"m": make_circuit(EDGES)}, roles=other)
