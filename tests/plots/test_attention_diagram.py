"""The static figure, what it is made of, and what it refuses."""

from __future__ import annotations

import dataclasses
import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

import pytest
import torch
from component_examples import SVG, panels_of
from reachability import reached_by_networkx

from sparse_tl.circuits.prompt.attention import AttentionGraph
from sparse_tl.plots import CircuitDiagram, attention_diagram
from sparse_tl.plots.page.rendering import run_script
from sparse_tl.plots.page.token_text import visible_text

OPEN = "of 1,056 attention edges open; drawn:"
MakeFlow = Callable[..., AttentionGraph]

SELECTED = "((data) => selectEdges(data.panels[0], data, data.state))"
REACHED = """((data, nodes) => nodes.map(([level, column]) => [...selectEdges(
    { ...data.panels[0], index: 0 }, data,
    { ...data.state, focus: { panel: 0, level, column } }).reached]))"""


def selected(figure: CircuitDiagram) -> dict[str, Any]:
    """What the script says of the first view of a figure's only panel."""
    return run_script(CircuitDiagram.drawing, SELECTED, figure.data)


def part(panel: ElementTree.Element, role: str) -> ElementTree.Element:
    found = [element for element in panel.iter() if element.get("data-role") == role]
    assert len(found) == 1
    return found[0]


def lines_of(panel: ElementTree.Element, *kinds: str) -> set[tuple[float, ...]]:
    """(start x, start y, end x, end y) of every drawn line of these kinds."""
    lines = set()
    for path in part(panel, "edges"):
        if path.get("data-kind") in kinds:
            for line in path.get("d", "").split("M")[1:]:
                numbers = [float(number) for number in re.findall(r"[\d.]+", line)]
                lines.add((*numbers[:2], *numbers[-2:]))
    return lines


def nodes_of(panel: ElementTree.Element) -> dict[tuple[int, int], ElementTree.Element]:
    return {
        (int(node.get("data-level", "")), int(node.get("data-column", ""))): node
        for node in part(panel, "nodes")
    }


def line_of_edge(panel: ElementTree.Element, layer: int, query: int, key: int) -> tuple[float, ...]:
    """Where the line of an edge must run, read from the circles at its ends."""
    nodes = nodes_of(panel)
    start, end = nodes[layer, key], nodes[layer + 1, query]
    return tuple(float(node.get(axis, "")) for node in (start, end) for axis in ("cx", "cy"))


# ---- what is drawn ------------------------------------------------------------------------------


def test_the_sparse_circuit_is_drawn_dark_and_nothing_else(two_panels, circuit):
    sparse = panels_of(attention_diagram(two_panels))[1]
    expected = {line_of_edge(sparse, layer, query, key) for layer, _, query, key in circuit}
    assert lines_of(sparse, "main") == expected
    assert lines_of(sparse, "open", "path") == set()
    reached = {
        place for place, node in nodes_of(sparse).items() if node.get("data-reached") == "true"
    }
    # The inputs of the circuit, the column of the 6 up to Layer 0, and the whole last column.
    assert reached == {(0, 0), (0, 1), (0, 3), (0, 4), (0, 9), (1, 9)} | {(i, 10) for i in range(5)}


def test_edges_that_cannot_reach_the_prediction_stay_light(make_flow, circuit):
    stray = {(2, 0, 7, 2): 0.9, (1, 0, 9, 5): 0.9}  # column 9 is read at Layer 0 only
    (panel,) = panels_of(attention_diagram({"model": make_flow(circuit | stray)}))
    assert lines_of(panel, "open") == {line_of_edge(panel, 2, 7, 2), line_of_edge(panel, 1, 9, 5)}
    assert len(lines_of(panel, "main")) == len(circuit)


@pytest.mark.parametrize("seed", range(12))
def test_what_reaches_a_node_equals_networkx(seed):
    generator = torch.Generator().manual_seed(seed)
    n_layers, n_columns = 1 + seed % 5, 1 + seed
    density = 0.05 + 0.1 * (seed % 4)
    edges = torch.rand(n_layers, n_columns, n_columns, generator=generator).tril() > 1 - density
    tokens = ("a",) * n_columns
    graph = AttentionGraph(edges[:, None].float(), edges[:, None], tokens, tokens, ((0, 0),))
    columns = sorted({0, n_columns // 2, n_columns - 1})
    nodes = [(level, column) for level in range(n_layers + 1) for column in columns]
    data = attention_diagram({"model": graph}).data
    found = run_script(CircuitDiagram.drawing, REACHED, data, nodes)
    for (level, column), names in zip(nodes, found, strict=True):
        reached = {tuple(map(int, name.split(","))) for name in names}
        assert reached == reached_by_networkx(edges, column, level)


def test_an_autoregressive_prediction_is_followed_from_where_it_is_read(make_flow, circuit):
    targets = tuple((column, column - 1) for column in range(6, 11))
    (panel,) = panels_of(attention_diagram({"model": make_flow(circuit, targets=targets)}))
    assert len(lines_of(panel, "main")) == 4
    arrow = [float(x) for x in re.findall(r"[\d.]+", part(panel, "arrow").get("d", ""))]
    columns = [float(nodes_of(panel)[4, column].get("cx", "")) for column in (9, 10)]
    assert abs(arrow[0] - columns[0]) < 10 and abs(arrow[-2] - columns[1]) < 10
    tokens = part(panel, "output")
    assert max(arrow[1::2]) < float(tokens[9].get("y", ""))  # it arches over the row


def test_heads_are_merged_by_their_largest_weight(make_flow):
    flow = make_flow({(0, 0, 10, 3): 0.2, (0, 1, 10, 3): 0.7, (0, 2, 10, 3): 0.4})
    view = selected(attention_diagram({"model": flow}))
    assert [(line["query"], line["key"], line["value"]) for line in view["lines"]] == [(10, 3, 700)]
    assert view["count"] == 3


def test_merging_keeps_the_sign_of_the_strongest_head(make_flow):
    attribution = torch.zeros(5, 4, 4, 11, 11)
    attribution[4, 0, 1, 10, 3], attribution[4, 0, 2, 10, 3] = -2.0, 1.0
    flow = make_flow({(0, 1, 10, 3): 0.5, (0, 2, 10, 3): 0.5}, attribution=attribution)
    (line,) = selected(attention_diagram({"model": flow}, weight="first-order"))["lines"]
    assert line["value"] == 1000  # it helps: removing it lowers the logit


@pytest.mark.parametrize(("weight", "shown"), [(0.0999, 1), (0.1, 1), (0.0994, 0)])
def test_the_threshold_is_inclusive_after_rounding_to_thousandths(make_flow, weight, shown):
    (panel,) = panels_of(attention_diagram({"model": make_flow({(0, 0, 10, 3): weight})}))
    assert panel.get("data-edges-shown") == str(shown)


def test_threshold_zero_shows_every_edge_that_is_not_zero(dense_flow, sparse_flow):
    dense, sparse = panels_of(attention_diagram({"a": dense_flow, "b": sparse_flow}, threshold=0))
    assert dense.get("data-edges-shown") == str(4 * 66)
    assert sparse.get("data-edges-shown") == "5"


def test_main_edges_carry_the_most(make_flow):
    # A strong edge is not enough: what it feeds has to reach the prediction too.
    weak = {(2, 0, 5, 1): 1.0, (3, 0, 10, 5): 0.1}
    crowd = {(0, 0, 10, key): 0.5 for key in range(10)} | {
        (1, 0, 10, key): 0.5 for key in range(10)
    }
    crowd |= {(2, 0, 10, key): 0.5 for key in range(10)} | {(3, 1, 10, 9): 0.5, (3, 1, 10, 8): 0.5}
    flow = make_flow(crowd | weak)
    lines = selected(attention_diagram({"model": flow}))["lines"]
    kinds = {(line["layer"], line["query"], line["key"]): line["kind"] for line in lines}
    assert sum(kind == "main" for kind in kinds.values()) == len(crowd) == 32
    assert kinds[2, 5, 1] == kinds[3, 10, 5] == "path"  # carries 1.0 * 0.1


def _with_a_sink(make_flow: MakeFlow, circuit: dict) -> AttentionGraph:
    """In every layer, the last column attends to the first one most, and reads nothing there."""
    sink = {(layer, 0, 10, 0): 0.97 for layer in range(4)}
    carried = torch.zeros(4, 4, 11, 11)
    for place in circuit:
        carried[place] = 0.2 * circuit[place]
    return make_flow(circuit | sink, carried=carried)


def test_an_edge_that_carries_nothing_is_never_dark_however_much_it_is_attended(make_flow, circuit):
    flow = _with_a_sink(make_flow, circuit)
    (panel,) = panels_of(attention_diagram({"model": flow}))
    expected = {line_of_edge(panel, layer, query, key) for layer, _, query, key in circuit}
    assert lines_of(panel, "main") == expected
    assert lines_of(panel, "path") == {line_of_edge(panel, layer, 10, 0) for layer in range(4)}
    (panel,) = panels_of(attention_diagram({"model": flow}, weight="carried"))
    assert lines_of(panel, "main") == expected and lines_of(panel, "path", "open") == set()
    caption = f"9 {OPEN} 5 ≥ 0.10 of the largest share carried, 100\u202f% of all carried"
    assert part(panel, "caption").text == caption


def test_a_merged_line_carries_what_its_strongest_head_does(make_flow):
    attention = {(0, 0, 10, 3): 0.9, (0, 1, 10, 3): 0.3, (0, 2, 10, 4): 0.9}
    carried = torch.zeros(4, 4, 11, 11)
    carried[0, 1, 10, 3], carried[0, 2, 10, 4] = 0.5, 0.25
    view = selected(attention_diagram({"model": make_flow(attention, carried=carried)}))
    assert [(line["key"], line["share"]) for line in view["lines"]] == [(3, 0.5), (4, 0.25)]


def test_an_effect_carries_itself_and_not_its_product_with_later_ones(make_flow):
    attribution = torch.zeros(5, 4, 4, 11, 11)
    attribution[4, 0, 0, 9, 3], attribution[4, 1, 0, 10, 9] = -2.0, -1.0
    flow = make_flow({(0, 0, 9, 3): 0.5, (1, 0, 10, 9): 0.5}, attribution=attribution)
    view = selected(attention_diagram({"model": flow}, weight="first-order"))
    assert [line["share"] for line in view["lines"]] == [1.0, 0.5]


@pytest.mark.parametrize("weight", ["carried", "first-order"])
def test_all_panels_have_one_scale(make_flow, weight):
    """An edge with a tenth of the other panel's largest share is drawn at 0.1, not at 0.11."""
    shares = torch.zeros(4, 4, 11, 11)
    shares[0, 0, 10, 3] = 0.5
    flows = {}
    for name, share in {"strong": 1.0, "weak": 0.1}.items():
        scores = {
            "carried": share * shares,
            "attribution": (share * shares).expand(5, -1, -1, -1, -1),
        }
        flows[name] = make_flow({(0, 0, 10, 3): 0.5}, **scores)
    for threshold, n_lines in ((0.1, [1, 1]), (0.11, [1, 0])):
        figure = attention_diagram(flows, weight=weight, threshold=threshold)
        assert [
            len(lines_of(panel, "main", "path", "open")) for panel in panels_of(figure)
        ] == n_lines


def test_open_mlps_are_squares_and_closed_ones_are_not_drawn(make_flow, circuit):
    mlps = torch.zeros(4, 11, dtype=torch.bool)
    mlps[0, 4] = mlps[2, 10] = True
    with_gates, without = panels_of(
        attention_diagram({"a": make_flow(circuit, mlps=mlps), "b": make_flow(circuit)})
    )
    caption = part(with_gates, "caption").text
    assert caption == f"5 {OPEN} 5 with attention ≥ 0.10; 2 of 44 MLPs open"
    nodes = {(n.get("data-level"), n.get("data-column")): n for n in part(with_gates, "nodes")}
    for square, place in zip(part(with_gates, "mlps"), [("1", "4"), ("3", "10")], strict=True):
        middle = float(square.get("x", "")) + float(square.get("width", "")) / 2
        assert middle == pytest.approx(float(nodes[place].get("cx", "")))
    assert not any(e.get("data-role") == "mlps" for e in without.iter())


def test_above_given_columns_stands_what_was_given_except_at_the_prediction(make_flow, circuit):
    # An autoregressive model predicts all but the first character, the digits of the sum badly.
    targets = tuple((column, column - 1) for column in range(1, 11))
    texts = {"input_tokens": tuple("36+28=0006?"), "output_tokens": tuple("354+8=00064")}
    flow = make_flow(circuit, targets=targets, **texts)
    assert flow.given == tuple(range(1, 10))
    for target, row in ((-1, "36+28=00064"), (0, "35+28=00064"), (1, "36428=00064")):
        (panel,) = panels_of(attention_diagram({"model": flow}, target=target))
        assert [text.text for text in part(panel, "output")] == list(row)
    assert make_flow(circuit).given == ()


def test_characters_that_no_file_can_hold_are_replaced():
    assert visible_text("\ud800\ufffe\u202e\u2028") == "\ufffd" * 4


# ---- one piece of HTML --------------------------------------------------------------------------


def test_every_form_is_the_same_offline_html(two_panels, monkeypatch):
    import circuitsvis.utils.render as render

    def no_probe() -> bool:
        raise AssertionError("the figure asked whether the internet is there")

    monkeypatch.setattr(render, "internet_on", no_probe)
    figure = attention_diagram(two_panels)
    html = figure._repr_html_()
    assert html == str(figure) == figure.__html__() == figure.show_code()
    assert isinstance(figure, render.RenderedHTML)
    loads = re.findall(r"(?:src|href|url|import)\s*[=(]\s*[\"']?[\w/:.]+", html)
    assert loads == [] and "http" not in html.replace("http://www.w3.org/2000/svg", "")


# ---- files --------------------------------------------------------------------------------------


def test_save_html_and_svg(two_panels, tmp_path):
    figure = attention_diagram(two_panels, title="Effect & cause")
    page = figure.save(tmp_path / "figure.HTML").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and figure.light_html in page
    assert "<title>Effect &amp; cause</title>" in page
    root = ElementTree.parse(figure.save(str(tmp_path / "figure.svg"))).getroot()
    assert root.tag == f"{SVG}svg"
    assert sorted(os.listdir(tmp_path)) == ["figure.HTML", "figure.svg"]


def test_png_has_text_without_system_fonts(sparse_flow, monkeypatch):
    resvg_py = pytest.importorskip("resvg_py", reason="resvg-py is not installed")
    from sparse_tl.plots.page.rendering import svg_to_png

    draw = resvg_py.svg_to_bytes
    monkeypatch.setattr(
        resvg_py, "svg_to_bytes", lambda **options: draw(**(options | {"skip_system_fonts": True}))
    )
    svg = attention_diagram({"Base Model": sparse_flow}).svg
    without_text = re.sub(r"<text.*?</text>", "", svg)
    assert svg_to_png(svg, scale=1) != svg_to_png(without_text, scale=1)


# ---- bad input ----------------------------------------------------------------------------------


def test_effects_are_exact_where_they_are_known_and_else_named_first_order(two_panels):
    sparse = two_panels["Sparse Model"]
    exact = dataclasses.replace(sparse, effect=-sparse.attention.expand(5, -1, -1, -1, -1))
    panels = panels_of(attention_diagram(two_panels | {"Sparse Model": exact}, weight="effect"))
    estimated, known = (part(panel, "caption").text for panel in panels)
    assert estimated.endswith("of the largest first-order attribution of the logit")
    assert known == f"5 {OPEN} 5 ≥ 0.10 of the largest effect on the logit"


def test_estimates_are_dotted_and_exact_effects_are_not(make_flow, circuit):
    """The strongest edge helps by its estimate and hurts exactly; another is only estimated."""
    flow = make_flow({(0, 1, 9, 0): 0.5, (0, 3, 9, 0): 0.25, (1, 2, 10, 9): 1.0, (2, 0, 7, 7): 0.5})
    attribution = -flow.attention.expand(5, -1, -1, -1, -1)
    effect = torch.full_like(attribution, torch.nan)
    effect[:, ~flow.gates] = 0
    effect[:, 1, 2, 10, 9], effect[:, 0, 3, 9, 0] = 2.0, -0.5
    flow = dataclasses.replace(flow, attribution=attribution, effect=effect)
    figure = attention_diagram({"model": flow}, weight="effect")
    lines = {
        (line["layer"], line["head"], line["query"], line["key"]): (
            line["value"],
            line["estimated"],
        )
        for line in selected(figure)["lines"]
    }
    # In thousandths of the largest effect, 2; positive helps.
    assert lines[1, 2, 10, 9] == (-1000, False)
    assert lines[2, 0, 7, 7] == (250, True)
    assert lines[0, 1, 9, 0] == (250, True)
    (panel,) = panels_of(figure)
    dotted = {path.get("stroke-dasharray") is not None for path in part(panel, "edges")}
    assert dotted == {True, False}
    for path in part(panel, "edges"):
        assert (path.get("data-estimate") is None) == (path.get("stroke-dasharray") is None)
    assert str(part(panel, "caption").text).endswith("effect on the logit; 2 are estimated")


def test_effects_on_different_metrics_are_not_compared(two_panels):
    dense = two_panels["Base Model"]
    other = dataclasses.replace(dense, metric="log_probability")
    with pytest.raises(ValueError, match="'a': 'answer_logit', 'b': 'log_probability'"):
        attention_diagram({"a": dense, "b": other, "c": two_panels["Sparse Model"]})


def test_panels_of_different_prompts(sparse_flow, make_random_flow, make_flow, circuit):
    shorter = make_random_flow(input_tokens=INPUT_8, output_tokens=INPUT_8, targets=((6, 6),))
    with pytest.raises(ValueError, match=r"columns and targets are {'a': \(11"):
        attention_diagram({"a": sparse_flow, "b": shorter})
    with pytest.raises(ValueError, match=r"'b': \(11, \(\(10, 9\),\)\)"):
        attention_diagram({"a": sparse_flow, "b": make_flow(circuit, targets=((10, 9),))})


INPUT_8 = tuple("36+28=??")
