"""Figures of shallow and deep models can be read: of 4 layers, of 12, and of 30 with nine heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from legibility import problems_of
from test_every_figure import SHOW, behaviour_of, by_plotly, head_roles_of
from test_layer_map import patching

from sparse_tl import plots
from sparse_tl.circuits import LogitAttribution, LogitLens, Scores
from sparse_tl.parts.grids import HeadGrid
from sparse_tl.plots import Figure, GridFigure
from sparse_tl.plots.page.rendering import html_page

WORDS = "When| Mary| and| John| went| to| the| store|,| John| gave| a| drink| to"
TOKENS = ("<|im_start|>", *WORDS.split("|"))
DEPTHS = ((4, 4), (12, 12), (30, 9))


def _scores(n_layers: int, n_heads: int) -> Scores:
    values = torch.randn(n_layers, n_heads, generator=torch.Generator().manual_seed(0)) ** 3
    return Scores(HeadGrid(n_layers, n_heads), values, "eap")


def _lens(n_layers: int) -> LogitLens:
    share = torch.linspace(0, 1, (n_layers + 1) * len(TOKENS)).view(n_layers + 1, -1)
    return LogitLens(TOKENS, TOKENS[3], share, [TOKENS] * (n_layers + 1), share)


def _attribution(n_layers: int, n_heads: int) -> LogitAttribution:
    layers = [
        [*(f"a{layer}.h{head}" for head in range(n_heads)), f"a{layer}.b", f"m{layer}"]
        for layer in range(n_layers)
    ]
    names = ("input", *(name for layer in layers for name in layer), "bias")
    values = torch.randn(len(names), 2, generator=torch.Generator().manual_seed(0)).double()
    return LogitAttribution(names, values, n_heads)


@pytest.fixture(scope="module")
def figures(make_random_flow: Any, make_random_circuit: Any) -> dict[str, Callable[..., Figure]]:
    """What draws a figure of a model of so many layers and heads."""

    def attention_edges(n_layers: int, n_heads: int) -> Figure:
        n = len(TOKENS)
        flow = make_random_flow(n_layers, n_heads, TOKENS, TOKENS, ((n - 1, n - 2),), 3.0)
        return plots.circuit_diagram({"Dense": flow, "Sparse": flow}, weight="first-order")

    def components(n_layers: int, n_heads: int) -> Figure:
        n_edges = min(1000, 50 * n_layers)
        circuit, scores = make_random_circuit(n_layers, n_heads, n_edges=n_edges)
        named = {"Dense": circuit, "Sparse": circuit}
        return plots.component_diagram(named, scores=dict.fromkeys(named, scores))

    def attention(_: int, n_heads: int) -> Figure:
        weights = torch.ones(n_heads, len(TOKENS), len(TOKENS)).tril()
        names = [f"a29.h{head}" for head in range(n_heads)]
        return plots.attention_view(weights / weights.sum(-1, keepdim=True), TOKENS, names)

    return {
        "attention_edges": attention_edges,
        "components": components,
        "attention": attention,
        "heads": lambda *shape: plots.head_map(dict.fromkeys(("Dense", "Sparse"), _scores(*shape))),
        "behaviour": lambda *shape: plots.head_map({"Dense": behaviour_of(*shape)}),
        "roles": lambda *shape: plots.head_roles_figure(head_roles_of(*shape)),
        "trajectories": lambda *shape: plots.gate_trajectories(head_roles_of(*shape)),
        "patching": lambda n_layers, _: plots.layer_map({"Dense": patching(n_layers, len(TOKENS))}),
        "lens": lambda n_layers, _: plots.layer_map({"Dense": _lens(n_layers)}),
        "direct": lambda *shape: _attribution(*shape).figure(),
    }


NAMES = ("attention_edges", "components", "attention", "heads", "behaviour", "roles")
NAMES += ("trajectories", "patching", "lens", "direct")


@pytest.fixture(scope="module")
def saved_page(open_page: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from plotly.offline import get_plotlyjs

    file = tmp_path_factory.mktemp("page") / "page.html"
    script = f"<script>{get_plotlyjs()}</script>"
    file.write_text(html_page("A figure", script, margin=0), encoding="utf-8")
    with open_page() as page:
        page.goto(file.as_uri())
        yield page


@pytest.mark.long
@pytest.mark.parametrize("shape", DEPTHS, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("name", NAMES)
def test_figures_of_all_depths_can_be_read(name, shape, figures, saved_page) -> None:
    figure = figures[name](*shape)
    html = by_plotly(figure.plotly) if isinstance(figure, GridFigure) else figure.light_html
    saved_page.evaluate(SHOW, [html, figure.page_margin])
    problems = problems_of(saved_page)
    assert not problems, problems
