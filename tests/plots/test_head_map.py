"""Maps of head scores show what they are given, and frame the heads that they are told."""

from __future__ import annotations

import pytest
import torch

from sparse_tl import Scores, head_map
from sparse_tl.circuits import HeadBehaviour
from sparse_tl.graph import HeadGrid
from sparse_tl.plots import GridFigure
from sparse_tl.plots.page.palette import EMPTY_CELL, HELPS, HURTS, MARKS

GRID = HeadGrid(2, 3)
SCORES = Scores(GRID, torch.tensor([[-0.5, 0.25, 0.0], [0.0, 0.1, 0.0]]), "eap-ig")


def test_cells_are_scores_and_the_colour_bar_gives_the_largest() -> None:
    figure = head_map({"Dense": SCORES, "Sparse": SCORES}, unit="logits")
    for cells in figure.plotly.data:
        assert cells.z[0] == pytest.approx([-0.5, 0.25, 0.0])
        assert (cells.zmin, cells.zmax) == (-0.5, 0.5)
        assert "<b>a0.h1</b><br>+0.25 logits" in str(cells.text)
        assert cells.colorscale == ((0, HELPS), (0.5, EMPTY_CELL), (1, HURTS))
        assert cells.colorbar.title.text == "Score, logits"
    assert [text.text for text in figure.plotly.layout.annotations] == ["Dense", "Sparse"]


def test_marked_heads_are_framed_and_named() -> None:
    marked = {"mover": [(1, 2), "a0.h1"], "copier": [(0, 1)]}
    figure = SCORES.figure(marked=marked)
    cells, movers, copiers = figure.plotly.data
    corners = [(x, y) for x, y in zip(movers.x, movers.y, strict=True) if x == x]
    assert len(corners) == 10
    assert all(abs(x - 2) < 0.5 and abs(y - 1) < 0.5 for x, y in corners[:5])
    assert all(abs(x - 1) < 0.5 and abs(y) < 0.5 for x, y in corners[5:])
    assert "<b>a0.h1</b><br>+0.25<br>mover<br>copier" in str(cells.text)
    assert [(trace.name, trace.line.color) for trace in (movers, copiers)] == [
        ("mover", MARKS[0]),
        ("copier", MARKS[1]),
    ]


def _behaviour() -> HeadBehaviour:
    """Of two layers of three heads: induction that copies, a sink, and a negative mover."""
    return HeadBehaviour(
        {
            "mover": torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -0.3]]),
            "induction": torch.tensor([[0.0, 0.0, 0.0], [0.7, 0.1, 0.0]]),
            "sink": torch.tensor([[0.9, 0.2, 0.3], [0.1, 0.1, 0.8]]),
            "copying": torch.tensor([[0.1, 0.0, 0.0], [0.6, 0.2, -0.9]]),
        }
    )


def _labels(figure: GridFigure) -> list[tuple[str, int, int, str]]:
    """Text, head, layer and panel."""
    return sorted(
        (text.text, text.x, text.y, text.xref)
        for text in figure.plotly.layout.annotations
        if not text.xref.endswith("domain") and text.xref != "paper"
    )


def test_behaviour_is_coloured_by_kind_and_labelled() -> None:
    figure = head_map({"Dense": _behaviour(), "Sparse": _behaviour()}, marked={"mine": [(0, 1)]})
    names = ["neg negative mover", "ind induction", "sink"]
    legend = {trace.name: trace.line.color for trace in figure.plotly.data if trace.name in names}
    assert list(legend) == names
    dense, _ = (trace for trace in figure.plotly.data if trace.type == "heatmap")
    drawn = {
        (layer, head): dense.colorscale[value][1]
        for layer, row in enumerate(dense.z)
        for head, value in enumerate(row)
    }
    assert len(drawn) == 6
    assert [drawn[place] for place in ((1, 2), (1, 0), (0, 0))] == list(legend.values())
    assert {drawn[place] for place in ((0, 1), (0, 2), (1, 1))} == {EMPTY_CELL}
    said = "<b>a1.h2</b><br>negative mover<br>mover -0.300<br>induction 0.000"
    assert said in str(dense.text)
    labels = [("ind+", 0, 1), ("neg", 2, 1)]
    assert _labels(figure) == sorted((*label, ref) for label in labels for ref in ("x", "x2"))
    frames = [trace for trace in figure.plotly.data if trace.name == "mine"]
    assert len(frames) == 2
    own, drawn = _behaviour().figure(title="Dense"), head_map({"Dense": _behaviour()})
    assert own.plotly.to_json() == drawn.plotly.to_json()
