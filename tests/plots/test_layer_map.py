"""Layer maps show what they are given."""

from __future__ import annotations

import math

import torch

from sparse_tl import CircuitGraph, Scores, layer_map
from sparse_tl.circuits import ActivationPatching, LogitAttribution, LogitLens
from sparse_tl.graph import HeadGrid
from sparse_tl.plots import ComponentDiagram, GridFigure
from sparse_tl.plots.page.palette import HELPS


def patching(n_layers: int = 2, n_columns: int = 3, token: str = " cat") -> ActivationPatching:
    """The first place moves the metric the other way, the last one all the way."""
    values = torch.zeros(n_layers, n_columns, 2).double()
    values[0, 0], values[-1, -1] = -1.0, 2.0
    columns = [token] * n_columns
    return ActivationPatching(
        "resid_pre", "corrupted", columns, values, torch.tensor([1.0, 3.0]), torch.zeros(2)
    )


def lens(tokens: tuple[str, ...] = ("a", "b")) -> LogitLens:
    share = torch.linspace(0, 1, 3 * len(tokens)).view(3, -1)
    return LogitLens(tokens, "z", share, [tokens] * 3, share)


def attribution(n_heads: int = 2) -> LogitAttribution:
    names = ["input", *(f"a0.h{head}" for head in range(n_heads)), "a0.b", "m0", "bias"]
    values = torch.arange(len(names), dtype=torch.float64)[:, None] - 2
    return LogitAttribution(tuple(names), values.expand(-1, 2), n_heads)


def test_cells_are_effects_and_a_colour_bar_has_their_values() -> None:
    figure = layer_map({"Dense": patching(), "Sparse": patching()})
    cells = figure.plotly.data[0]
    assert [list(row) for row in cells.z] == [[-0.5, 0.0, 0.0], [0.0, 0.0, 1.0]]
    assert (cells.zmin, cells.zmax) == (-1, 1)
    assert "<b>resid_pre of layer 1, position 2</b><br>\N{MIDDLE DOT}cat<br>effect +1.000" in str(
        cells.text
    )
    texts = [text.text for text in figure.plotly.layout.annotations]
    assert texts[:2] == ["Dense", "Sparse"]
    assert cells.colorbar.title.text == "Effect of resid_pre"
    assert cells.colorscale[-1] == (1, HELPS)


def test_the_lens_writes_its_tokens_and_keeps_its_last_row_on_top() -> None:
    figure = lens().figure(title="Sparse")
    plotly = figure.plotly
    assert plotly.layout.yaxis.ticktext == ("0", "1", "final")
    written = [(a.x, a.y, a.text) for a in plotly.layout.annotations if a.text in ("a", "b")]
    assert [(x, y, text) for x, y, text in written if y >= 0] == [
        (x, y, text) for y in range(3) for x, text in enumerate("ab")
    ]


def test_components_that_do_not_exist_have_no_cell() -> None:
    cells = attribution().figure().plotly.data[0]
    assert [sum(not math.isnan(value) for value in row) for row in cells.z] == [1, 4, 1]
    assert list(cells.z[1]) == [-1, 0, 1, 2]
    assert cells.text[2][0] == "<b>bias</b><br>+3 logits"


def test_scores_of_circuit_edges_are_drawn_as_a_circuit() -> None:
    graph = CircuitGraph(2, 2, 2)
    values = graph.exists * torch.arange(graph.exists.numel()).view(graph.exists.shape) / 7
    scores = Scores(graph, values, "eap")
    figure = scores.figure(title="Dense", size=5)
    assert isinstance(figure, ComponentDiagram)
    assert "of 5 circuit edges" in figure.svg and "Dense" in figure.svg
    assert isinstance(scores.figure(), ComponentDiagram)  # all of them, where there are few
    heads = Scores(HeadGrid(2, 2), torch.rand(2, 2), "eap")
    assert isinstance(heads.figure(), GridFigure)
