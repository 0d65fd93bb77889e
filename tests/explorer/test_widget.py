"""The explorer without a front end: what it is sent, what it sends, and what a notebook keeps."""

from __future__ import annotations

import asyncio
import json
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch

from sparse_tl import ablate_attention_edges, trace_attention
from sparse_tl.explorer import (
    CircuitExplorer,
    explore,
    figures,
    widget,
)
from sparse_tl.metrics import logit_difference

pytestmark = pytest.mark.long

PROMPT = "36+28=?????"


def ask(explorer: CircuitExplorer, **content: Any) -> None:
    """Act on a message of the front end, which gets an answer."""
    answers: list[dict[str, Any]] = []
    explorer.send = lambda content, buffers=None: answers.append(content)
    explorer._handle_custom_msg({"id": 7, **content}, [])
    assert [answer["done"] for answer in answers] == [7]
    assert answers[0]["revision"] == explorer._revision


def caption_counts(svg: str) -> list[int]:
    groups = [g for g in ElementTree.fromstring(svg).iter() if "data-panel" in g.attrib]
    return [int(group.attrib["data-attention-edges"]) for group in groups]


def test_it_shows_the_figure_of_circuit_diagram(explorer, models):
    draw = partial(figures.circuit_diagram, models, PROMPT, positions=range(6, 11))
    expected = draw()
    explorer.compute_effects()
    assert explorer._figure == expected.json
    assert str(explorer.figure()) == str(expected)
    # With the choices of the reader, and with a style.
    choices = {"weight": "first-order", "threshold": 0.25}
    explorer._state = {"target": 1, **choices}
    assert str(explorer.figure()) == str(draw(position=7, **choices))
    styled = explore(models, PROMPT, position=7, title="T", **choices)
    styled.compute_effects()
    assert str(styled.figure()) == str(draw(position=7, title="T", **choices))


def test_a_clicked_head_is_removed_and_restored(explorer):
    before = explorer._panels[0]["outputs"][-1]
    assert all(row["logit_before"] == row["logit"] for row in before)
    ask(explorer, action="toggle_head", panel=0, layer=0, head=1)
    assert explorer._message is None
    assert explorer._panels[0]["removedHeads"] == [(0, 1)]
    rows = explorer._panels[0]["outputs"][-1]
    for row, expected in zip(
        rows, explorer.exploration.models["Dense"].outputs().to_dict("records"), strict=True
    ):
        assert row.pop("text") == row.pop("token") == expected.pop("token")
        assert row == pytest.approx(expected, rel=1e-4)
    assert any(row["logit_before"] != row["logit"] for row in rows)
    ask(explorer, action="toggle_head", panel=0, layer=0, head=1)
    assert explorer._panels[0]["outputs"][-1] == before
    assert explorer._panels[0]["removedHeads"] == []


def test_a_click_on_another_thread_waits_for_the_cell(models):
    """As in JupyterLab, while a cell computes: either would be refused the model."""

    async def cell() -> tuple[CircuitExplorer, Any]:
        explorer = explore(models, PROMPT)
        click = {"action": "toggle_head", "panel": 0, "layer": 0, "head": 1}
        with ablate_attention_edges(models["Dense"], [(0, 0, 1, 0)]):
            other = Thread(target=explorer._handle_custom_msg, args=(click, []))
            other.start()
            other.join()
            removed = explorer._panels[0]["removedHeads"]
        await asyncio.sleep(0)
        return explorer, removed

    with ThreadPoolExecutor(1) as kernel:  # here, the browser of other tests may have a loop
        explorer, before = kernel.submit(asyncio.run, cell()).result()
    assert before == [] and explorer._message is None
    assert explorer._panels[0]["removedHeads"] == [(0, 1)]


def test_a_clicked_line_is_removed_from_the_figure(explorer):
    counts = caption_counts(explorer.figure().svg)
    attention = explorer.exploration.models["Dense"].now.graph.attention
    edge = tuple(int(i) for i in torch.unravel_index(attention.argmax(), attention.shape))
    ask(explorer, action="toggle_attention_edges", panel=0, edges=[list(edge)])
    assert caption_counts(explorer.figure().svg)[1] == counts[1]
    assert explorer._panels[0]["removedEdges"] == [edge]
    assert explorer.exploration.models["Dense"].now.graph.attention[edge] == 0
    ask(explorer, action="restore")
    assert caption_counts(explorer.figure().svg) == counts


def test_a_clicked_node_shows_its_attention_and_tokens(explorer):
    ask(explorer, action="select", panel=1, level=2, column=10)
    node = explorer._node
    assert (node["panel"], node["level"], node["column"], node["nKeys"]) == (1, 2, 10, 11)
    for head in range(2):
        row = explorer.exploration.models["Sparse"].now.graph.attention[1, head, 10].tolist()
        assert node["attention"][head] == pytest.approx(row, abs=1e-4)
    assert [key["text"] for key in node["keys"]] == list(PROMPT)
    ask(explorer, action="toggle_attention_edges", panel=1, edges=[[1, 0, 10, 3]])
    assert explorer._node["removed"][0][3] and explorer._node["attention"][0][3] == 0
    ask(explorer, action="unselect")
    assert explorer._node is None


def test_the_last_question_mark_opens_the_node_that_predicts_it(build_small):
    explorer = explore({"Dense": build_small()}, "36+28=")
    ask(explorer, action="select", panel=0, level=2, column=5)
    before = explorer._node
    ask(explorer, action="select", panel=0, level=2, column=6)
    assert explorer._node == before and before["column"] == 5 and explorer._message is None
    ask(explorer, action="select", panel=0, level=2, column=7)
    assert "there is no node at level 2 and column 7" in explorer._message["text"]


def test_models_of_other_depths_have_the_effects_of_all_their_heads(build_small):
    depths = {"three": 3, "four": 4}
    models = {name: build_small(n_layers=n) for name, n in depths.items()}
    explorer = explore(models, PROMPT, positions=[9])
    explorer.compute_effects()
    for known, (title, n_layers) in zip(explorer._effects["heads"], depths.items(), strict=True):
        expected = explorer.exploration.models[title].head_effects()["effect"]
        names = [f"{layer},{head}" for layer in range(n_layers) for head in (0, 1)]
        found = [known[name][0][0] for name in names]
        assert found == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-9)
        assert len(known) == len(names)


def test_the_figure_that_is_saved_names_what_is_removed(explorer, tmp_path):
    explorer.toggle_head("Dense", 0, 0)
    explorer.toggle_attention_edges("Dense", [(1, 0, 3, 3), (1, 0, 4, 3)])
    assert explorer.figure().panel_names == ("Dense without 1 head and 2 edges", "Sparse")
    for suffix in ("html", "svg", "png"):
        assert explorer.save(tmp_path / f"figure.{suffix}").stat().st_size > 1000
    assert "without 1 head and 2 edges" in (tmp_path / "figure.svg").read_text()
    explorer.restore()
    assert explorer.figure().panel_names == ("Dense", "Sparse")


def test_another_metric_is_chosen(explorer, models):
    edge = [1, 0, 10, 3]
    ask(explorer, action="toggle_attention_edges", panel=0, edges=[edge])
    explorer.choose(target=4, weight="first-order", threshold=0.1)
    ask(explorer, action="choose_metric", metric="logit_difference", wrong="7")
    assert explorer._message is None
    assert explorer._metric == {
        "name": "logit_difference",
        "wrong": "7",
        "offered": ["log_probability", "logit_difference", "answer_logit"],
    }
    panel = explorer._panels[0]
    assert panel["removedEdges"] == [tuple(edge)]
    assert panel["quantity"] | {"answers": 0, "wrong": 0} == {
        "metric": "logit_difference", "unit": "logits", "answers": 0, "wrong": 0,
    }  # fmt: skip
    best = panel["quantity"]["answers"][4]
    assert panel["quantity"]["wrong"][4] == "7" != best
    values = explorer.exploration.models["Dense"].values()
    assert panel["values"][4] == pytest.approx([each[4].item() for each in values], rel=1e-4)
    figure = figures.circuit_diagram(
        models, PROMPT, positions=range(6, 11), metric=logit_difference, wrong="7",
        weight="first-order",
    )  # fmt: skip
    words = f"of the largest first-order attribution of logit “{best}” − logit “7”"
    assert words in figure.svg and words in explorer.figure().svg
    ask(explorer, action="restore")
    assert explorer.figure().svg == figure.svg
    ask(explorer, action="choose_metric", metric="log_probability", wrong="")
    assert explorer._metric["wrong"] == "" and explorer._panels[0]["quantity"]["unit"] == "nats"


def test_the_strongest_lines_get_their_exact_effects_while_they_are_shown(models, monkeypatch):
    """Where more edges are open than are removed unasked, before the figure is shown."""
    monkeypatch.setattr(widget, "MAX_EFFECTS", 10)
    explorer = explore(models, PROMPT, positions=[10])
    exploration = explorer.exploration
    explorer.compute_effects()
    assert exploration.models["Dense"].now.graph.effect is None  # attention is shown
    ask(explorer, action="choose", target=0, weight="effect", threshold=0.1)
    monkeypatch.setattr(widget, "EFFECT_SECONDS", 0.0)
    explorer.restore()  # a figure with new effects, and no time for them
    assert "data-estimate" in explorer.figure().svg
    explorer.compute_effects()
    assert exploration.models["Dense"].now.graph.effect is None
    monkeypatch.setattr(widget, "EFFECT_SECONDS", 60.0)
    explorer.restore()
    old = explorer._figure
    explorer.compute_effects()
    for title in models:
        graph = exploration.models[title].now.graph
        assert not graph.effect.isnan().any()
        expected = trace_attention(models[title], PROMPT, positions=[10], max_effects=1000).effect
        torch.testing.assert_close(graph.effect, expected, rtol=0, atol=1e-12)
    expected = figures.circuit_diagram(models, PROMPT, positions=[10], weight="effect")
    assert explorer._figure == expected.json != old
    assert "data-estimate" not in expected.svg


def test_a_metric_of_ones_own(models):
    def rank(logits, pairs):
        return -(logits > logits.gather(1, pairs.answers)).sum(dim=1).double() + 0 * logits[:, 0]

    explorer = explore({"m": models["Dense"]}, PROMPT, metric=rank)
    assert explorer._metric["offered"][-1] == "rank" == explorer._metric["name"]
    assert explorer._panels[0]["quantity"]["unit"] == ""
    explorer.compute_effects()
    assert all(
        row[4][0] <= 0 and row[4][0] % 1 == 0 for row in explorer._effects["heads"][0].values()
    )


# ---- prompts -------------------------------------------------------------------------------------


def test_another_prompt(explorer):
    explorer.select("Dense", 1, 9)
    ask(explorer, action="show_prompt", prompt="11+11=?????")
    assert explorer._prompt == "11+11=?????" and explorer._message is None
    data = json.loads(explorer._figure)
    assert data["panels"][0]["input"] == list("11+11=?????")
    assert explorer._node is None


# ---- bad input: a message in the widget, and the old state ---------------------------------------


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    (
        {"action": "show_prompt", "prompt": "1" * 17},
        "at most 16 tokens, the model's context; got 17",
    ),
    (
        {"action": "toggle_attention_edges", "panel": 0, "edges": [[0, 0, 3, 4]]},
        "has no (0, 0, 3, 4)",
    ),
    ({"action": "dance"}, "AttributeError"),
]


def test_what_cannot_be_done_is_a_message(explorer):
    explorer.toggle_head("Dense", 0, 0)
    old = explorer._prompt, explorer._figure, explorer._panels, explorer._node
    for content, problem in IMPOSSIBLE:
        ask(explorer, **content)
        assert explorer._message["kind"] == "error" and problem in explorer._message["text"]
        assert (explorer._prompt, explorer._figure, explorer._panels, explorer._node) == old
    ask(explorer, action="restore")
    assert explorer._message is None


# ---- in the notebook -----------------------------------------------------------------------------


def test_the_widget_opens_with_everything_that_it_shows(models, monkeypatch):
    """An update after the opening can be lost by a front end that is at work."""
    opened: list[dict[str, Any]] = []
    keep = CircuitExplorer.open
    monkeypatch.setattr(
        CircuitExplorer, "open", lambda self: (opened.append(self.get_state()), keep(self))[1]
    )
    explorer = explore(models, PROMPT)
    (state,) = opened
    assert state == explorer.get_state()
    assert state["_figure"] and len(state["_panels"]) == 2


def test_changed_weights_are_noticed_and_all_is_computed_again(build_small):
    model = build_small()
    explorer = explore({"m": model}, PROMPT)
    ask(explorer, action="toggle_head", panel=0, layer=0, head=1)
    old = explorer._panels
    ask(explorer, action="hello")
    assert explorer._message is None and explorer._panels == old
    with torch.no_grad():
        next(iter(model.blocks[1].attn.parameters())).data.mul_(2)
    ask(explorer, action="hello")
    assert "The weights of 'm' have changed" in explorer._message["text"]
    fresh = explore({"m": model}, PROMPT)
    fresh.toggle_head("m", 0, 1)
    assert explorer._panels == fresh._panels != old


def test_edges_of_a_node_carry_the_effect_of_ablating_them(models):
    explorer = explore(models, PROMPT, positions=[9])
    explorer.select("Dense", 1, 9)
    explorer.compute_effects()
    known, model = explorer._effects["node"], models["Dense"]
    edges = {name: tuple(map(int, name.split(","))) for name in known if name != "all"}
    assert len(edges) == 2 * 10
    tokens = model.to_tokens(PROMPT)
    with torch.no_grad():
        whole = model(tokens)[0, 9]
    best = whole.argmax()
    for name, group in {**{n: [e] for n, e in edges.items()}, "all": list(edges.values())}.items():
        with torch.no_grad(), ablate_attention_edges(model, group):
            cut = model(tokens)[0, 9]
        ((effect, _, prediction),) = known[name]
        change = (cut.log_softmax(-1) - whole.log_softmax(-1))[best].item()
        assert effect == pytest.approx(change, rel=1e-4, abs=1e-9)
        assert prediction == model.tokenizer.decode([int(cut.argmax())])
