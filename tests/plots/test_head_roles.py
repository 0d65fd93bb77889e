"""The figures of head roles show what they are given."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go
import pytest
import torch

from sparse_tl.head_roles import AblationCurve, HeadRoles
from sparse_tl.plots import ablation_grid, gate_trajectories, head_roles_figure
from sparse_tl.plots.palette import EMPTY_CELL, ROLES
from sparse_tl.plots.panels import ticks

ENDS = {"facilitation": -3, "irrelevance": -0.01, "interference": 0.6}


def curves(scale: float = 1.0, in_role: int = 11, control: bool = True) -> list[AblationCurve]:
    steps = torch.arange(11) / 10
    seeds = torch.tensor([[0.9], [1.1]])
    random = scale * -1.0 * steps * seeds
    return [
        AblationCurve(by, scale * end * steps * seeds, (in_role,) * 2, random if control else None)
        for by, end in ENDS.items()
    ]


@pytest.fixture
def grid() -> go.Figure:
    rows = {"Syntax": {"Dense": curves(), "Sparse": curves(0.5)}, "Math": {"Dense": curves(50)}}
    return ablation_grid(rows).plotly


@pytest.fixture
def roles() -> HeadRoles:
    gates = torch.rand(3, 1, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    gates[1:, :, -1] = torch.tensor([[0.0, 1.0], [0.5, 0.0]])
    return HeadRoles(
        seeds=(0,),
        lambda_=0.1,
        trajectories=gates,
        recorded_at=(0, 10),
        losses=torch.zeros(3, 1),
        dense_loss=0.0,
        fitted=torch.tensor([True]),
        removed=torch.zeros(2, 2),
        removed_together=torch.zeros(2, 3, 1),
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
    assert {trace.name: trace.line.color for trace in means} == {
        role.capitalize(): colour for role, colour in ROLES.items()
    }
    assert list(means[0].y) == pytest.approx([-0.3 * step for step in range(11)])
    titles = [annotation.text for annotation in grid.layout.annotations]
    assert titles == ["Dense", "Sparse", "Syntax", "Math"]
    assert grid.layout.xaxis3.title.text == "Number of Ablated Heads"
    assert grid.layout.xaxis.title.text is None and grid.layout.xaxis.showticklabels is False


def test_a_line_is_pale_where_no_head_of_its_role_is_left() -> None:
    red = ROLES["interference"]
    for in_role, solid, pale in ((2, [0, 1, 2], list(range(2, 11))), (0, [0], list(range(11)))):
        curve = curves(in_role=in_role, control=False)[2]
        traces = ablation_grid({"Math": {"Dense": [curve]}}).plotly.data
        found = {trace.opacity: list(trace.x) for trace in traces if trace.line.color == red}
        assert found == {1: solid, 0.35: pale}
        assert [trace.showlegend for trace in traces if trace.line.width] == [True, False]
    whole = curves(in_role=11, control=False)[2]
    assert len(ablation_grid({"Math": {"Dense": [whole]}}).plotly.data) == 2


def test_a_heat_map_is_drawn_in_its_colours(roles: HeadRoles) -> None:
    figure = head_roles_figure(roles)
    assert figure.plotly.data[0].z == ([0.0, 1.0], [0.5, 0.0])
    assert "<b>a0.h1</b><br>facilitation 1.000" in str(figure.plotly.data[0].text)
    assert figure.svg.count(f"fill: {ROLES['facilitation']}") == 1
    assert figure.svg.count(f"fill: {EMPTY_CELL}") > 2


def test_a_result_makes_its_own_figure(roles: HeadRoles, tmp_path: Path) -> None:
    assert roles.figure().svg == head_roles_figure(roles).svg
    curve = curves()[0]
    assert curve.figure(title="IOI").plotly == ablation_grid({"": {"IOI": [curve]}}).plotly
    for suffix in ("html", "svg", "png", "json"):
        path = gate_trajectories(roles).save(tmp_path / f"gates.{suffix}")
        assert path.stat().st_size > 500


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
    assert ticks(low, high)["ticktext"] == texts
