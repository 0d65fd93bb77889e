"""The component diagram as its script draws it, here without a page."""

from __future__ import annotations

import asyncio
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from component_examples import ATTACK, EDGES, SVG, Scored, draw, head_roles_of, panels_of

from sparse_tl.circuits import Circuit, HeadBehaviour
from sparse_tl.graph import CircuitGraph, PositionedGraph
from sparse_tl.plots import component_diagram
from sparse_tl.plots.diagrams.component_diagram import ONLY, STATE_FORMAT
from sparse_tl.plots.page.palette import KEY, KINDS_OF_HEADS, MARKS, OPEN_EDGE, QUERY, ROLES, VALUE


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
    with pytest.raises(ValueError, match="of two circuits; got 1"):
        draw({"m": one}, difference=True)


def test_rows_are_layers_upwards_and_unused_layers_take_no_room(make_circuit):
    edges = {"input->a0.h1<v>": 1.0, "a0.h1->m2": 1.0, "m2->logits": 1.0, "input->a2.h0<q>": 1.0}
    (panel,) = panels_of(draw({"m": make_circuit(edges | {"a2.h0->logits": 1.0})}))
    y = {e.get("data-node"): float(e[0].get("y", "")) for e in panel.iter() if e.get("data-node")}
    assert y["input"] > y["a0.h1"] > y["m2"] == y["a2.h0"] > y["logits"]
    assert [text for text in texts_of(panel) if text.startswith("Layer")] == ["Layer 0", "Layer 2"]


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
    roles = head_roles_of(trajectories)
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
