"""The figures of head roles show what they are given, as plotly and as a static drawing."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import plotly.graph_objects as go
import pytest

from sparse_tl.plots import (
    AblationLine,
    ablation_grid,
    gate_trajectories,
    head_roles_figure,
    save_figure,
)
from sparse_tl.plots.palette import EMPTY_CELL, ROLES, translucent
from sparse_tl.plots.panel_grid import round_ticks

NASTY = "</script><img src=x onerror=alert(1)>"


def _lines(scale: float = 1.0) -> list[AblationLine]:
    ends = {"facilitation": -3, "irrelevance": -0.01, "interference": 0.6, "random": -1}
    lines = []
    for order, end in ends.items():
        mean = [scale * end * step / 10 for step in range(11)]
        lines.append(AblationLine(order, mean, [m - 0.1 for m in mean], [m + 0.1 for m in mean]))
    return lines


@pytest.fixture
def grid() -> go.Figure:
    return ablation_grid(
        {
            "Syntax": {"Dense": _lines(), "Sparse": _lines(0.5)},
            "Math": {"Dense": _lines(50)},
        }
    )


def test_rows_share_their_vertical_axis(grid: go.Figure) -> None:
    ranges = [grid.layout[f"yaxis{number}"].range for number in ("", 2, 3, 4)]
    assert ranges[0] == ranges[1] and ranges[2] == ranges[3]
    assert ranges[0] != ranges[2]
    assert ranges[2][0] < -150 < ranges[2][1]
    assert len({grid.layout[f"xaxis{number}"].range for number in ("", 2, 3, 4)}) == 1
    domains = [grid.layout[f"xaxis{number}"].domain for number in ("", 2, 3, 4)]
    assert domains[0] == domains[2] and domains[1] == domains[3]


def test_lines_are_green_blue_red_and_grey(grid: go.Figure) -> None:
    means = [trace for trace in grid.data if trace.showlegend]
    assert [(trace.name, trace.line.color) for trace in means] == [
        ("Facilitation", ROLES["facilitation"]),
        ("Irrelevance", ROLES["irrelevance"]),
        ("Interference", ROLES["interference"]),
        ("Random", ROLES["random"]),
    ]
    assert list(means[0].y) == pytest.approx([-0.3 * step for step in range(11)])
    titles = [annotation.text for annotation in grid.layout.annotations]
    assert titles == ["Dense", "Sparse", "Syntax", "Math"]
    assert grid.layout.xaxis3.title.text == "Number of Ablated Heads"
    assert grid.layout.xaxis.title.text == ""


def test_a_line_is_pale_where_no_head_of_its_role_is_left() -> None:
    ends = [[-0.1 * step for step in range(5)]] * 3
    for in_role, solid, pale in ((2.4, [0, 1, 2], [2, 3, 4]), (0.0, [0], [0, 1, 2, 3, 4])):
        line = AblationLine("interference", *ends, in_role=in_role)
        traces = ablation_grid({"Math": {"Dense": [line]}}).data
        found = {trace.line.color: list(trace.x) for trace in traces if trace.line.width}
        red = ROLES["interference"]
        assert found == {red: solid, translucent(red, 0.35): pale}
        assert [trace.showlegend for trace in traces if trace.line.width] == [True, False]
    whole = AblationLine("interference", *ends, in_role=9.0)
    assert len(ablation_grid({"Math": {"Dense": [whole]}}).data) == 2


@pytest.mark.parametrize("suffix", ["html", "svg", "png", "json"])
def test_figures_are_saved(grid: go.Figure, tmp_path: Path, suffix: str) -> None:
    heat = head_roles_figure({"facilitation": [[0, 0.5], [1, 0.2]], "interference": [[0, 0]] * 2})
    gates = gate_trajectories({(0, 0): ("facilitation", [[0.5, 0.9]] * 3)}, [0, 10])
    for name, figure in {"grid": grid, "heat": heat, "gates": gates}.items():
        path = save_figure(figure, tmp_path / f"{name}.{suffix}", title="Head roles")
        assert path.stat().st_size > 500
        if suffix == "svg":
            ElementTree.parse(path)


def test_a_heatmap_is_drawn_in_its_colours(tmp_path: Path) -> None:
    figure = head_roles_figure({"facilitation": [[0.0, 1.0], [0.5, 0.0]]})
    svg = save_figure(figure, tmp_path / "heads.svg").read_text(encoding="utf-8")
    assert svg.count(f'fill="{ROLES["facilitation"]}"') == 1
    assert svg.count(f'fill="{EMPTY_CELL}"') == 2
    assert "a0.h1<br>facilitation 1.000" in str(figure.data[0].text)


def test_heatmaps_of_more_colours_are_refused(tmp_path: Path) -> None:
    figure = head_roles_figure({"facilitation": [[0.0, 1.0]]})
    figure.data[0].colorscale = "Viridis"
    with pytest.raises(ValueError, match="heatmaps of two colours"):
        save_figure(figure, tmp_path / "heads.svg")


def test_names_stay_text(tmp_path: Path) -> None:
    figure = ablation_grid({NASTY: {NASTY: _lines()}})
    for suffix in ("html", "svg"):
        text = save_figure(figure, tmp_path / f"grid.{suffix}").read_text(encoding="utf-8")
        assert "<img" not in text and "</script><" not in text.split("<body>")[-1][:200]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("helpful", [0.0], [0.0], [0.0]), "an order of"),
        (("random", [], [], []), "at least one; got 0"),
        (("random", [0.0], [0.0, 1.0], [0.0]), "got 1, 2 and 1"),
        (("random", [float("nan")], [0.0], [0.0]), "finite differences by random"),
    ],
)
def test_bad_lines_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AblationLine(*arguments)


def test_empty_grids_are_refused() -> None:
    for rows in ({}, {"Syntax": {}}, {"Syntax": {"Dense": []}}):
        with pytest.raises(ValueError, match="at least one task with one model"):
            ablation_grid(rows)


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0, 50, ["0", "20", "40"]),
        (-3.2, 0.7, ["\N{MINUS SIGN}3", "\N{MINUS SIGN}2", "\N{MINUS SIGN}1", "0"]),
        (-0.012, 0.01, ["\N{MINUS SIGN}0.01", "0.00", "0.01"]),
    ],
)
def test_ticks_are_round(low: float, high: float, texts: list[str]) -> None:
    assert round_ticks(low, high)["ticktext"] == texts
