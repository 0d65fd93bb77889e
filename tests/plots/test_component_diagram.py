"""The static component diagram: what is drawn, where it lies, and what it refuses."""

from __future__ import annotations

import itertools
import re
import struct
import xml.etree.ElementTree as ElementTree

import networkx as nx
import pytest
import torch
from component_examples import ATTACK, EDGES, Scored, draw

from sparse_tl.graph import CircuitGraph
from sparse_tl.nodes import Node
from sparse_tl.plots import ComponentDiagram, component_diagram
from sparse_tl.plots.component_curves import NodeBox, line_curves
from sparse_tl.plots.component_layout import NODE_HEIGHT, ComponentLayout, lay_out, node_rows
from sparse_tl.plots.drawn_circuit import DrawnCircuit, Line, draw_strongest
from sparse_tl.plots.figure_frame import Surround
from sparse_tl.plots.layered_layout import (
    Segment,
    count_crossings,
    isotonic,
    order_rows,
    place_rows,
)
from sparse_tl.plots.palette import KEY, MARKS, OPEN_EDGE, OPEN_PORT

FRAME = ("x", "y", "width", "height")
SVG = "{http://www.w3.org/2000/svg}"


def panels_of(figure: ComponentDiagram) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(figure.svg)
    return [group for group in root.iter() if "data-panel" in group.attrib]


def paths_of(panel: ElementTree.Element) -> dict[int, ElementTree.Element]:
    return {int(e.get("data-edge", "")): e for e in panel.iter() if "data-edge" in e.attrib}


def nodes_of(panel: ElementTree.Element) -> dict[str, ElementTree.Element]:
    return {e.get("data-node", ""): e for e in panel.iter() if "data-node" in e.attrib}


def place_of(node: ElementTree.Element) -> tuple[float, float]:
    x, y = re.findall(r"[-\d.]+", node.get("transform", ""))
    return float(x), float(y)


def caption_of(panel: ElementTree.Element) -> str:
    (caption,) = [e for e in panel.iter() if e.get("data-role") == "caption"]
    return caption.text or ""


def numbers(data: str) -> list[tuple[float, float]]:
    values = [float(number) for number in re.findall(r"-?[\d.]+", data)]
    return list(zip(values[::2], values[1::2], strict=True))


def laid_out(*circuits: Scored) -> tuple[list[DrawnCircuit], ComponentLayout]:
    drawn = [draw_strongest(f"panel {i}", *circuit, 1000) for i, circuit in enumerate(circuits)]
    names = tuple(panel.name for panel in drawn)
    return drawn, lay_out(drawn, Surround(names, "title", "transition"))


# ---- what is drawn ------------------------------------------------------------------------------


def test_the_strongest_edges_come_first_and_ties_keep_the_order_of_the_graph(make_circuit):
    tied = {"input->m0": 0.5, "m0->m1": -0.5, "input->logits": 0.1, "m1->logits": -2.0}
    drawn = draw_strongest("m", *make_circuit(tied), 3)
    assert [str(edge.edge) for edge in drawn.edges] == ["m1->logits", "input->m0", "m0->m1"]
    assert [edge.strength for edge in drawn.edges] == [1.0, 0.25, 0.25]
    assert (drawn.n_kept, drawn.n_existing) == (4, CircuitGraph(3, 2, 2).n_edges)


def test_edges_off_the_path_are_open(make_circuit):
    (panel,) = panels_of(draw({"m": make_circuit(EDGES)}))
    kinds = [path.get("data-kind") for _, path in sorted(paths_of(panel).items())]
    assert kinds == ["path"] * 4 + ["open"] * 2
    states = {name: node.get("data-state") for name, node in nodes_of(panel).items()}
    on_path = ("input", "a0.h0", "m1", "a2.h1", "logits")
    assert states == dict.fromkeys(on_path, "path") | dict.fromkeys(("a1.h1", "m0"), "open")
    assert (panel.get("data-edges-shown"), panel.get("data-edges-on-path")) == ("6", "4")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_paths_are_those_of_networkx_with_any_number_of_edges(make_random_circuit, seed):
    circuit = make_random_circuit(n_edges=25, seed=seed)
    counts = []
    for n in range(1, 26):
        drawn = draw_strongest("m", *circuit, n)
        network = nx.DiGraph([("input", "input"), ("logits", "logits")])
        ends = [(str(e.edge.source), str(e.edge.destination.node)) for e in drawn.edges]
        network.add_edges_from(ends)
        between = (nx.descendants(network, "input") | {"input"}) & (
            nx.ancestors(network, "logits") | {"logits"}
        )
        expected = {rank for rank, pair in enumerate(ends) if set(pair) <= between}
        assert {
            rank for rank, e in enumerate(drawn.edges) if drawn.state(e.lines) == "path"
        } == expected
        counts.append(drawn.n_on_path)
        assert counts[-1] == len(expected)
    assert 0 < counts[-1] < 25


def test_an_edge_into_a_key_value_head_ends_at_the_heads_that_take_part(make_circuit):
    grouped = CircuitGraph(2, 4, 2)
    edges = {"input->a1.kv0<k>": -1.0, "a1.h1->logits": 0.5, "input->a0.kv1<v>": 0.2}
    drawn = draw_strongest("m", *make_circuit(edges, grouped), 10)
    readers = [[str(line.reader) for line in edge.lines] for edge in drawn.edges]
    assert readers == [["a1.h1"], ["logits"], ["a0.h2", "a0.h3"]]
    assert [drawn.state(edge.lines) for edge in drawn.edges] == ["path", "path", "open"]
    (panel,) = panels_of(draw({"m": make_circuit(edges, grouped)}))
    lines = [e for e in panel.iter() if "data-edge" in e.attrib]
    ends = sorted((e.get("data-edge"), e.get("data-reader")) for e in lines)
    assert ends == [("0", "a1.h1"), ("1", "logits"), ("2", "a0.h2"), ("2", "a0.h3")]
    assert all(line.get("d", "").count("M") == 1 for line in lines)


def test_of_the_heads_that_share_a_key_only_those_on_a_path_are_in_colour(make_circuit):
    edges = {"input->a0.kv0<k>": -1.0, "a0.h1->logits": 0.5, "a0.h0->m1": 0.4}
    (panel,) = panels_of(draw({"m": make_circuit(edges, CircuitGraph(2, 4, 2))}))
    looks = {
        line.get("data-reader"): (line.get("data-kind"), line.get("stroke"))
        for line in panel.iter()
        if line.get("data-edge") == "0"
    }
    assert looks == {"a0.h0": ("open", OPEN_EDGE), "a0.h1": ("path", KEY)}
    ports = {
        node.get("data-node"): port.get("fill")
        for node in panel.iter()
        if "data-node" in node.attrib
        for port in node
        if port.get("data-slot") == "k"
    }
    assert ports == {"a0.h0": OPEN_PORT, "a0.h1": KEY}


def test_lines_are_thicker_and_darker_with_score(make_circuit):
    chain = {f"m{i}->m{i + 1}": -(4.0**-i) for i in range(5)}
    circuit = make_circuit({"input->m0": -3.0, "m5->logits": 0.3, **chain}, CircuitGraph(6, 1, 1))
    (panel,) = panels_of(draw({"m": circuit}))
    paths = [path for _, path in sorted(paths_of(panel).items())]
    widths = [float(path.get("stroke-width", "")) for path in paths]
    assert widths == sorted(widths, reverse=True) and widths[0] > 4 * widths[-1]
    assert len(set(widths)) == len(widths)
    light = [int(path.get("stroke", "")[1:3], 16) for path in paths]
    assert light == sorted(light) and light[0] < light[-1]


def test_colours_tell_slots_or_signs(make_circuit):
    circuit = make_circuit({name: score / abs(score) for name, score in EDGES.items()})
    edges = [str(edge.edge) for edge in draw_strongest("m", *circuit, 10).edges]

    def strokes(colour: str) -> dict[str, str | None]:
        (panel,) = panels_of(draw({"m": circuit}, colour=colour))  # type: ignore
        return {edges[rank]: path.get("stroke") for rank, path in paths_of(panel).items()}

    by_slot = strokes("slot")
    assert by_slot["a0.h0->m1"] == by_slot["a2.h1->logits"]
    assert len({by_slot[e] for e in ("a0.h0->m1", "m1->a2.h1<q>", "input->a0.h0<v>")}) == 3
    by_sign = strokes("sign")
    helping = ("a2.h1->logits", "input->a0.h0<v>", "m1->a2.h1<q>")
    assert len({by_sign[edge] for edge in helping}) == 1
    assert by_sign["a0.h0->m1"] != by_sign["a2.h1->logits"]
    assert by_slot["m0->logits"] == by_sign["m0->logits"]  # on no path


def test_the_caption_counts(make_circuit):
    circuit = make_circuit(EDGES)
    (panel,) = panels_of(draw({"m": circuit}, max_circuit_edges=5, unit="logits"))
    assert caption_of(panel) == (
        f"5 of 6 kept circuit edges (model: {circuit.circuit.graph.n_edges}); "
        "4 on a path from input to logits; |score| ≥ 0.09 logits"
    )
    (panel,) = panels_of(draw({"m": make_circuit(EDGES, scored=False)}))
    assert caption_of(panel).endswith("4 on a path from input to logits")


def test_a_circuit_without_edges_is_an_empty_panel(make_circuit):
    (panel,) = panels_of(draw({"m": make_circuit({})}))
    assert list(nodes_of(panel)) == ["input", "logits"]
    assert {node.get("data-state") for node in nodes_of(panel).values()} == {"absent"}


# ---- where it lies ------------------------------------------------------------------------------


def test_rows_are_layers_upwards(make_random_circuit):
    (panel,) = panels_of(draw({"m": make_random_circuit()}))
    y = {Node.parse(name): place_of(node)[1] for name, node in nodes_of(panel).items()}
    for first, second in itertools.permutations(y, 2):
        if first.kind == second.kind == "head":
            assert (y[first] > y[second]) == (first.layer < second.layer)
    assert max(y.values()) == y[Node("input")] and min(y.values()) == y[Node("logits")]


@pytest.mark.parametrize(("edge", "raised"), [("a1.h0->m1", True), ("a0.h0->m1", False)])
def test_an_mlp_is_above_the_heads_that_it_reads_and_beside_others(make_circuit, edge, raised):
    circuit = make_circuit({edge: 1.0, "input->a1.h0<q>": 1.0})
    (panel,) = panels_of(draw({"m": circuit}))
    y = {name: place_of(node)[1] for name, node in nodes_of(panel).items()}
    assert (y["m1"] < y["a1.h0"]) if raised else (y["m1"] == y["a1.h0"])


@pytest.mark.parametrize("sizes", [{}, {"n_layers": 8, "n_heads": 8, "n_edges": 80}])
def test_nothing_overlaps_and_no_line_runs_through_a_node(make_random_circuit, sizes):
    dense, sparse = make_random_circuit(**sizes), make_random_circuit(**sizes | {"n_edges": 12})
    drawn, layout = laid_out(dense, sparse)
    rows: dict[float, list[NodeBox]] = {}
    for box in layout.boxes.values():
        rows.setdefault(box.y, []).append(box)
        assert layout.left < box.x - box.width / 2 and box.x + box.width / 2 < layout.right
    for row in rows.values():
        row.sort(key=lambda box: box.x)
        for first, second in itertools.pairwise(row):
            assert second.x - first.x >= (first.width + second.width) / 2 + 5
    for panel in drawn:
        passed = [
            point
            for line in panel.lines
            for point in numbers(layout.curves[line])
            if point[1] in rows
        ]
        # At the bends; lines end above and below the middle of a box.
        assert passed
        for x, y in passed:
            assert all(abs(x - box.x) > box.width / 2 for box in rows[y])


def test_nodes_and_lines_are_at_the_same_place_in_every_panel(make_random_circuit):
    figure = draw({"dense": make_random_circuit(), "sparse": make_random_circuit(n_edges=5)})
    dense, sparse = panels_of(figure)
    places = [{n: place_of(e) for n, e in nodes_of(p).items()} for p in (dense, sparse)]
    assert places[0] == places[1]
    lines = [{path.get("d") for path in paths_of(panel).values()} for panel in (dense, sparse)]
    assert len(lines[1]) == 5 and lines[1] < lines[0]
    assert "absent" in {node.get("data-state") for node in nodes_of(sparse).values()}
    assert "absent" not in {node.get("data-state") for node in nodes_of(dense).values()}


def test_lines_never_overshoot_between_their_bends():
    source, reader = Node("input"), Node("mlp", 3)
    boxes = {source: NodeBox(100.0, 400.0, 60.0), reader: NodeBox(300.0, 0.0, 40.0)}
    line = Line(source, reader, None)
    bends = [(10.0, 300.0), (90.0, 200.0), (95.0, 100.0)]
    points = numbers(line_curves({line: bends}, boxes, NODE_HEIGHT)[line])
    assert points[0] == (100, 400 - NODE_HEIGHT / 2) and points[-1] == (300, NODE_HEIGHT / 2)
    assert points[3:-1:3] == bends
    for (x0, _), (x1, _), (x2, _), (x3, _) in zip(
        points[0::3], points[1::3], points[2::3], points[3::3], strict=False
    ):
        # The curve lies within the hull of its control points, and these between its ends.
        assert min(x0, x3) <= min(x1, x2) and max(x1, x2) <= max(x0, x3)
    assert points[1][0] == points[0][0] and points[-2][0] == points[-1][0]  # vertical ends


@pytest.mark.parametrize("seed", range(3))
def test_crossings_are_counted_as_by_comparing_every_pair(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = [[f"{r}{i}" for i in range(6)] for r in "abc"]
    segments = [
        Segment(rows[r][i], rows[r + 1][j], port=port)
        for r, i, j, port in itertools.product(range(2), range(6), range(6), (-5.0, 5.0))
        if torch.rand(1, generator=generator) < 0.2
    ]
    expected = 0
    for first, second in itertools.combinations(segments, 2):
        if first.lower[0] == second.lower[0]:
            ends = [(segment.upper, segment.port) for segment in (first, second)]
            expected += (first.lower < second.lower and ends[0] > ends[1]) or (
                first.lower > second.lower and ends[0] < ends[1]
            )
    assert count_crossings(rows, segments) == expected > 0
    ordered = order_rows(rows, segments)
    assert [sorted(row) for row in ordered] == rows
    assert count_crossings(ordered, segments) < expected


def test_lines_are_ordered_by_the_ports_that_they_enter():
    rows = [["a", "b"], ["c"]]
    segments = [Segment("a", "c", port=5.0), Segment("b", "c", port=-5.0)]
    assert count_crossings(rows, segments) == 1
    assert order_rows(rows, segments) == [["b", "a"], ["c"]]


def test_a_port_stands_above_what_enters_it():
    x = place_rows([["a"], ["c"]], [Segment("a", "c", port=7.0)], [[], []], (0, 300))
    assert x["a"] - x["c"] == 7


def test_a_graph_that_can_be_drawn_without_crossings_is(make_circuit):
    rows = [["a", "b", "c"], ["d", "e", "f"], ["g", "h", "i"]]
    segments = [Segment(*pair) for pair in ("af", "bd", "ce", "dh", "ei", "fg")]
    assert count_crossings(rows, segments) > 0
    assert count_crossings(order_rows(rows, segments), segments) == 0


def test_positions_are_the_least_squares_ones_under_the_separations():
    # 95 and 60, which have to be in order, meet at their mean by the weights 2 and 1.
    assert isotonic([95.0, 60.0, 200.0], [2.0, 1.0, 1.0]) == pytest.approx([250 / 3] * 2 + [200])
    rows = [["a", "b"], ["c", "d"]]
    x = place_rows(rows, [Segment("a", "c"), Segment("b", "d")], [[40], [60]], (0, 100))
    assert [x[v] for v in "abcd"] == pytest.approx([20, 80, 20, 80])
    x = place_rows(rows, [Segment("a", "d")], [[40], [40]], (90, 150))
    assert x["a"] >= 90 and x["d"] <= 150 and x["d"] - x["c"] >= 40


def test_node_rows_leave_out_empty_layers():
    ends = [("a2.h0", "a7.h3"), ("a2.h0", "a7.h1"), ("a2.h0", "m7")]
    rows = node_rows([Line(Node.parse(source), Node.parse(to), None) for source, to in ends])
    assert [row.label for row in rows] == ["", "Layer 2", "Layer 7", ""]
    assert list(map(str, rows[2].nodes)) == ["a7.h1", "a7.h3", "m7"]


def test_text_is_legible_at_full_width(make_random_circuit):
    circuit = make_random_circuit(12, 12, 100)
    root = ElementTree.fromstring(draw({"a": circuit}, title="T").svg)
    assert float(root.get("width", "")) == 1000
    assert min(float(e.get("font-size", "16")) for e in root.iter()) >= 11


def test_marked_heads_are_framed_in_every_panel_and_named(make_circuit):
    whole, part = make_circuit(EDGES), make_circuit({"a2.h1->logits": -1.0})
    marked = {"mover": [(2, 1), "a1.h0"], "copier": ["a0.h0"], "undrawn": [(0, 1)]}
    figure = draw({"dense": whole, "sparse": part}, marked=marked)
    plain = draw({"dense": whole, "sparse": part})
    for panel in panels_of(figure):
        frames = {e.get("data-mark"): e for e in panel.iter() if "data-mark" in e.attrib}
        assert {name: frame.get("stroke") for name, frame in frames.items()} == {
            "a2.h1": MARKS[0],
            "a0.h0": MARKS[1],
        }
        for name, frame in frames.items():
            x, y, width, height = (float(frame.get(key, "")) for key in FRAME)
            assert (x + width / 2, y + height / 2) == pytest.approx(place_of(nodes_of(panel)[name]))
    root, without = (ElementTree.fromstring(one.svg) for one in (figure, plain))
    (legend,) = [e for e in root.iter() if e.get("data-role") == "mark-legend"]
    named = [e for e in legend if e.tag == f"{SVG}text"]
    assert [e.text for e in named] == ["mover", "copier"]
    height, less = (float(one.get("height", "")) for one in (root, without))
    assert less < float(named[0].get("y", "")) < height
    assert not any(e.get("data-role") == "mark-legend" for e in without.iter())


# ---- one piece of HTML, and files ---------------------------------------------------------------


def test_names_titles_and_units_stay_text(make_circuit):
    circuit = make_circuit(EDGES)
    figure = draw({ATTACK: circuit, "\x00": circuit}, title=ATTACK, transition=ATTACK, unit=ATTACK)
    marks = draw({"m": circuit}, marked={ATTACK: ["a0.h0"]})
    assert ATTACK in [element.text for element in ElementTree.fromstring(marks.svg).iter()]
    root = ElementTree.fromstring(figure.svg)
    assert {element.tag for element in root.iter()} == {
        SVG + name for name in ("svg", "g", "path", "rect", "text", "tspan", "circle")
    }
    assert ATTACK in [element.text for element in root.iter()]
    html = str(figure)
    assert "<img" not in html and html.count("</script>") == 1
    _, call = html.rsplit("startFigures(", 1)
    payload, rest = call.split(");\n", 1)
    assert rest == "})();\n</script>\n</div>"
    assert not set("<>&") & set(payload) and "alert" in payload


def test_html_is_self_contained_small_and_the_same_each_time(make_random_circuit):
    panels = {"a": make_random_circuit(), "b": make_random_circuit(seed=1)}
    html = str(draw(panels))
    assert html == str(draw(panels)) != str(draw(panels, colour="sign"))
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(?:src|href|url|import)\s*[=(]\s*[\"']?[\w/:.]+", html)
    assert len(html.encode()) < 100_000


def test_it_saves_html_svg_and_png(make_circuit, tmp_path):
    pytest.importorskip("resvg_py", reason="resvg-py is not installed")
    figure = draw({"Base Model": make_circuit(EDGES)}, title="Cause & effect")
    page = figure.save(tmp_path / "figure.html").read_text(encoding="utf-8")
    assert figure.light_html in page and "<title>Cause &amp; effect</title>" in page
    root = ElementTree.parse(figure.save(tmp_path / "figure.svg")).getroot()
    png = figure.save(tmp_path / "figure.png", scale=1).read_bytes()
    size = tuple(int(root.get(side, "")) for side in ("width", "height"))
    assert struct.unpack(">II", png[16:24]) == size
    assert repr(figure) == "ComponentDiagram('Base Model')"


# ---- bad input ----------------------------------------------------------------------------------


def test_scores_of_another_model_or_panel(make_circuit):
    circuit, scores = make_circuit(EDGES)
    _, other = make_circuit({"input->m0": 1.0}, CircuitGraph(2, 2, 2))
    for given in ({"m": other}, {"n": scores}):
        with pytest.raises(ValueError, match="scores of the circuit edges of a panel, one of"):
            component_diagram({"m": circuit}, scores=given)


def test_options_that_make_no_figure(make_circuit, unchecked_types):
    panel = make_circuit(EDGES)
    with pytest.raises(ValueError, match="at least one panel; got none"):
        component_diagram({})
    with pytest.raises(ValueError, match="max_circuit_edges of at least 1; got 0"):
        draw({"m": panel}, max_circuit_edges=0)
    with pytest.raises(ValueError, match="'slot' or 'sign'; got 'layer'"):
        draw({"m": panel}, colour="layer")
    with pytest.raises(ValueError, match="to colour by their sign; got none"):
        component_diagram({"m": panel.circuit}, colour="sign")
    with pytest.raises(ValueError, match=r"it has no \(9, 9\)"):
        draw({"m": panel}, marked={"mover": [(9, 9)]})
    with pytest.raises(ValueError, match="at most 7 names of heads"):
        draw({"m": panel}, marked={str(name): [] for name in range(8)})
    with pytest.raises(TypeError, match="expected Circuit as panel 'm'; got Tensor"):
        component_diagram({"m": panel.circuit.mask})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="a mapping .*got list"):
        component_diagram([panel.circuit])  # type: ignore[arg-type]


def test_a_circuit_makes_its_own_figure(make_circuit):
    circuit, scores = make_circuit(EDGES)
    figure = circuit.figure(scores=scores, unit="logits")
    assert figure.svg == draw({"Circuit": (Scored(circuit, scores))}, unit="logits").svg
    assert circuit._repr_html_() == str(circuit.figure())
