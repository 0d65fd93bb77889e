"""Every figure of texts that are long or turn the direction of writing, and of next to nothing."""

from __future__ import annotations

import dataclasses
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_layer_map import attribution, lens, patching

from sparse_tl import load_addition_models, plots
from sparse_tl.circuits import Circuit, EffectCurve, Scores
from sparse_tl.head_roles import ROLES, AblationCurve
from sparse_tl.parts.graph import CircuitGraph
from sparse_tl.parts.grids import HeadGrid
from sparse_tl.parts.positioned_graph import PositionedGraph
from sparse_tl.plots import Figure

TURNED = "\u202ecba\u2066\u2069"
TEXT = TURNED + "x" * 10_000
STATE = {"format": "sparse_tl component diagram 1", "labels": {"m0": TEXT}, "notes": {"m0": TEXT}}
COLUMNS = (TEXT, *"6+28=?????")


def _curve(name: str) -> EffectCurve:
    return EffectCurve(name, [0, 1, 10], [0.0, 0.5, 1.0], [0.0, 0.4, 1.0], [0.0, 0.6, 1.0])


def _ablation(role: str, in_role: int) -> AblationCurve:
    values = -0.1 * torch.arange(6.0).repeat(2, 1)
    return AblationCurve(
        *(role, tuple(range(values.shape[1])), values, (in_role, in_role)), control=values / 3
    )


def _attention(n: int) -> torch.Tensor:
    return torch.ones(2, n, n).tril() / n


def _heads(n: int) -> Scores:
    return Scores(HeadGrid(n, n), torch.zeros(n, n), "eap")


def _positioned() -> Circuit:
    site = PositionedGraph(CircuitGraph(2, 2, 2), ("0", "1"))
    return Circuit.of(site, ["input->a0.h0<v>@0", "a0.h0->logits@1", "input->logits@1"])


@pytest.fixture(scope="module")
def named(make_random_flow: Any, make_random_circuit: Any) -> dict[str, Callable[[], Figure]]:
    """Figures with the text wherever they take one."""
    circuit = make_random_circuit().circuit
    flow = make_random_flow(2, 2, input_tokens=COLUMNS, output_tokens=COLUMNS)
    answer = dataclasses.replace(lens((TEXT, "b")), answer=TEXT)
    curves = [_ablation(role, n) for n, role in enumerate(ROLES)]
    state = STATE | {"groups": {TEXT: ["m1", "m2"]}}
    return {
        "attention edges": lambda: plots.circuit_diagram({TEXT: flow}, title=TEXT),
        "patterns": lambda: plots.attention_view(_attention(2), [TEXT, "b"], [TEXT, "b"]),
        "circuit": lambda: plots.component_diagram(
            {TEXT: circuit}, title=TEXT, unit=TEXT, marked={TEXT: [(0, 1)]}, state=state
        ),
        "columns": lambda: plots.component_diagram(_positioned(), tokens=[TEXT, "b"]),
        "heads": lambda: plots.head_map({TEXT: _heads(2)}, unit=TEXT, marked={TEXT: [(0, 0)]}),
        "patching": lambda: plots.layer_map({TEXT: patching(3, 4, TEXT)}),
        "lens": lambda: plots.layer_map({TEXT: answer}),
        "effect": lambda: plots.effect_figure({TEXT: [_curve(TEXT)]}, parts="heads"),
        "ablation": lambda: plots.ablation_grid({TEXT: {TEXT: curves}}),
    }


NAMED = ("attention edges", "patterns", "circuit", "columns", "heads", "patching", "lens", "effect")


@pytest.mark.parametrize("name", [*NAMED, "ablation"])
def test_a_long_text_is_clipped_and_stays_in_its_direction(named: Any, name: str) -> None:
    start = time.process_time()
    figure = named[name]()
    svg, html = figure.svg, figure.light_html
    assert time.process_time() - start < 10
    root = ElementTree.fromstring(svg)
    assert float(root.get("width", "")) <= 1000
    # The longest text that is drawn; tooltips may say more.
    assert max(len(e.text or "") for e in root.iter()) < 2000 and len(svg) < 200_000
    for mark in "\u202e\u2066\u2069":
        assert mark not in svg and mark not in html


@pytest.fixture(scope="module")
def smallest(make_flow: Any, make_random_flow: Any, make_circuit: Any) -> dict[str, Any]:
    """Figures of one token, of no or one edge, and of classes without heads."""
    one = {"input_tokens": ("a",), "output_tokens": ("b",), "targets": ((0, 0),)}
    edge = make_circuit({"input->logits": 1.0}).circuit
    none = make_circuit({}).circuit
    empty = [_ablation(role, 0) for role in ROLES]
    return {
        "one token": lambda: plots.circuit_diagram({"M": make_random_flow(2, 2, **one)}),
        "no attention edge": lambda: plots.circuit_diagram({"M": make_flow({})}),
        "one attention edge": lambda: plots.circuit_diagram({"M": make_flow({(0, 0, 9, 0): 1.0})}),
        "pattern of a token": lambda: plots.attention_view(_attention(1), ["a"], ["b", "c"]),
        "no attention": lambda: plots.attention_view(0 * _attention(3), ["a"] * 3, ["b", "c"]),
        "none and one edge": lambda: plots.component_diagram({"none": none, "one": edge}),
        "no edge at all": lambda: plots.component_diagram(none, off_path=True),
        "one head": lambda: plots.head_map({"M": _heads(1)}),
        "patching of a place": lambda: plots.layer_map({"M": patching(1, 1)}),
        "lens of a token": lambda: plots.layer_map({"M": lens(("a",))}),
        "attribution to a head": lambda: plots.layer_map({"M": attribution(1)}),
        "empty classes": lambda: plots.ablation_grid({"T": {"M": empty}}),
        "one curve": lambda: plots.effect_figure({"T": [_curve("M")]}, parts="heads"),
    }


def test_next_to_nothing_is_drawn(smallest: Any) -> None:
    for name, draw in smallest.items():
        figure = draw()
        assert float(ElementTree.fromstring(figure.svg).get("width", "")) > 100, name
        assert figure.light_html


def test_a_model_in_place_of_a_result_is_refused_with_what_to_do() -> None:
    model, _ = load_addition_models()
    kind = type(model).__name__
    for panels in (model, {"Dense": model}):
        with pytest.raises(TypeError, match=f"expected .*Circuit.*; got .*{kind}") as said:
            plots.component_diagram(panels)
        assert "attribute_circuit_edges(...).top(100) makes Circuit" in str(said.value)
        assert len(str(said.value)) < 250 and "\n" not in str(said.value)
    with pytest.raises(TypeError, match=rf"got a {kind}; .*makes Scores; .*; pass \{{name"):
        plots.head_map(model)
