"""Every figure of next to nothing."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import torch
from component_examples import ablation_of
from test_layer_map import attribution, lens, patching

from sparse_tl import plots
from sparse_tl.circuits import EffectCurve, Scores
from sparse_tl.graph import HeadGrid
from sparse_tl.head_roles import ROLES


def _curve(name: str) -> EffectCurve:
    return EffectCurve(name, [0, 1, 10], [0.0, 0.5, 1.0], [0.0, 0.4, 1.0], [0.0, 0.6, 1.0])


def _attention(n: int) -> torch.Tensor:
    return torch.ones(2, n, n).tril() / n


def _heads(n: int) -> Scores:
    return Scores(HeadGrid(n, n), torch.zeros(n, n), "eap")


@pytest.fixture(scope="module")
def smallest(make_flow: Any, make_random_flow: Any, make_circuit: Any) -> dict[str, Any]:
    """Figures of one token, of no or one edge, and of classes without heads."""
    one = {"input_tokens": ("a",), "output_tokens": ("b",), "targets": ((0, 0),)}
    edge = make_circuit({"input->logits": 1.0}).circuit
    none, line = make_circuit({}).circuit, {(0, 0, 9, 0): 1.0}
    empty = [ablation_of(role, -0.1 * torch.arange(6.0).repeat(2, 1), 0) for role in ROLES]
    return {
        "one token": lambda: plots.attention_diagram({"M": make_random_flow(2, 2, **one)}),
        "no attention edge": lambda: plots.attention_diagram({"M": make_flow({})}),
        "one attention edge": lambda: plots.attention_diagram({"M": make_flow(line)}),
        "pattern of a token": lambda: plots.attention_maps(_attention(1), ["a"], ["b", "c"]),
        "no attention": lambda: plots.attention_maps(0 * _attention(3), ["a"] * 3, ["b", "c"]),
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
        if isinstance(figure, plots.GridFigure):
            assert figure.plotly.layout.width > 100, name
        else:
            assert float(ElementTree.fromstring(figure.svg).get("width", "")) > 100, name
        assert figure.light_html
