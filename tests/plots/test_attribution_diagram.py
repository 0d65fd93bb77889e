"""The diagram of an attribution graph: as a static file, and in a browser without a network."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import plain_transformer
from tiny import tiny_model, tokenizer_of

from sparse_tl.backend import boot
from sparse_tl.circuits import AttributionGraph, attribution_graph
from sparse_tl.plots import attribution_diagram
from sparse_tl.plots.diagrams.attribution_diagram import MOST_EDGES

TOKENS = torch.tensor([1, 7, 3, 9, 7])


@pytest.fixture(scope="module")
def graphs() -> dict[str, AttributionGraph]:
    model = boot(plain_transformer("llama"))
    return {
        name: attribution_graph(model, TOKENS, target=target, max_nodes=40)
        for name, target in {"Dense": 5, "Sparse": 6}.items()
    }


def test_links_are_those_of_the_graph(graphs: dict[str, AttributionGraph]) -> None:
    figure = attribution_diagram(graphs, max_nodes=10)
    assert [panel["name"] for panel in figure.data["panels"]] == ["Dense", "Sparse"]
    names = [row[0] for row in figure.data["nodes"]]
    for panel, graph in zip(figure.data["panels"], graphs.values(), strict=True):
        assert len(panel["lines"]) == min(len(graph.links), MOST_EDGES)
        drawn = {
            (names[source], names[target]): panel["scores"][edge]
            for source, target, _, edge in panel["lines"]
        }
        nodes = graph.nodes["name"]
        for source, target, flow in graph.links.itertuples(index=False):
            assert drawn[nodes[source], nodes[target]] == pytest.approx(flow, rel=1e-3)
    ElementTree.fromstring(figure.svg)
    assert "raises the target" in figure.svg
    steps = {row[0]: row[2] for row in figure.data["nodes"]}
    assert all(steps[source] < steps[target] for source, target in drawn)


def test_the_reader_chooses_the_number_of_nodes(page: Any, tmp_path: Any, graphs: Any) -> None:
    graph = graphs["Dense"]
    page.goto(attribution_diagram(graph, max_nodes=12).save(tmp_path / "page.html").as_uri())
    number, before = page.locator("input[name=edges]"), 0
    for most in (12, 20, len(graph.nodes)):
        number.fill(str(most))
        number.press("Enter")
        shown = page.locator("g[data-node]").count()
        assert before < shown <= most
        assert f"{shown} nodes with " in page.locator(".canvas").inner_text()
        before = shown


def test_the_title_has_the_spaces_that_tokens_leave_out(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(["<|end|>", "the", "cat", "sat"], tmp_path)
    graph = attribution_graph(tiny_model(d_vocab=4, tokenizer=tokenizer), "the cat sat the cat")
    assert graph.prompt.endswith("the cat sat the cat") and " " not in "".join(graph.tokens)
    assert attribution_diagram(graph).title.endswith(" the cat sat the cat")


def test_labels_and_groups_are_drawn(graphs: dict[str, AttributionGraph]) -> None:
    graph = graphs["Dense"]
    strongest = graph.to_pandas().query("kind == 'neuron'")["name"].tolist()[:3]
    named = graph.with_labels({strongest[0]: "plural"}, {"both": strongest[1:]})
    figure = attribution_diagram(named, max_nodes=len(graph.nodes))
    assert "plural" in figure.svg and 'data-node="both"' in figure.svg
    assert f'data-node="{strongest[1]}"' not in figure.svg
    assert figure.data["view"]["groups"] == {"both": strongest[1:]}
    other = graph.with_labels({}, {"both": strongest[:2]})
    figure = attribution_diagram({"one": named, "other": other})
    assert figure.data["view"]["groups"] == {"both": [*strongest[1:], strongest[0]]}


def test_panels_are_graphs_of_one_prompt(graphs: dict[str, AttributionGraph]) -> None:
    other = attribution_graph(boot(plain_transformer("llama")), TOKENS.flip(0), max_nodes=5)
    with pytest.raises(ValueError, match="one prompt"):
        attribution_diagram({**graphs, "other": other})


def test_a_card_says_what_a_node_does(page: Any, tmp_path: Any, graphs: Any) -> None:
    graph = graphs["Dense"]
    edge = graph.to_pandas().query("kind == 'attention edge'").iloc[0]
    figure = attribution_diagram(graphs, max_nodes=30)
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(figure.save(tmp_path / "page.html").as_uri())
    page.locator("input[name=search]").fill(edge["name"])
    page.locator("input[name=search]").press("Enter")
    card = page.locator(".card")
    text = card.inner_text()
    assert f"{edge['flow']:+.3g} logits" in text and "attention edge" in text
    assert all(token in text for token in edge["promotes"])
    shown = card.bounding_box()
    assert shown["y"] >= 0 and shown["y"] + shown["height"] <= 900
    assert page.locator("input[name=slots]").count() == 0
